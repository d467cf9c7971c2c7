"""The observer that records when everything in a step happened.

It is always on, so it must cost nearly nothing: during a step it appends to a list, and the marks are interpreted when
somebody asks or a file is written. On a GPU the host runs ahead of the device, so events are recorded on the stream,
and read later.
"""

import atexit
import contextlib
import functools
import logging
import os
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gradsync.base import __version__
from gradsync.communicator.device_stage import DeviceClock
from gradsync.communicator.topology import host_identity
from gradsync.core.bucket.bucket import Bucket
from gradsync.core.bucket.layout import BucketLayout
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.core.reduction.measurement import known_link
from gradsync.observe.recording.files import BucketPart, Clock, Header, Recording, Step, step_line, write_recording
from gradsync.observe.recording.loading import listen
from gradsync.observe.recording.marks import (
    ARRIVED,
    EVALUATION,
    FORWARD,
    FORWARD_END,
    FULL,
    LOADED,
    LOADING,
    NEEDED,
    STEP,
    STEP_END,
    Gather,
    Marker,
    Marks,
    no_core_time,
    read_step,
)

__all__ = ["Recorder", "close_recorders"]

LOGGER = logging.getLogger("gradsync")

# Steps that are kept as they are; of those before, as many again, ever further apart.
KEPT = 500
KEPT_IN_MEMORY = 100
# A step that has not ended after this many marks has no optimizer that could end it, and is dropped.
MOST_MARKS = 200_000
# When files are written, in seconds after the one before; the last holds from then on.
WRITTEN_AFTER = (5.0, 15.0, 60.0)

# Those with a folder that were not closed yet. They hold no model, and outlive it.
_unwritten: "list[Recorder]" = []
# How many models of each rank were recorded to each folder.
_models: Counter[tuple[Path, int]] = Counter()


class Recorder(Marker):
    """Keeps the last ``keep`` steps of one model.

    If it has a ``folder``, it writes them there: now and then, when it is closed, and at the end of the process.

    Every model has one that writes nothing, which ``model.explain()`` reads. ``GRADSYNC_RECORD=FOLDER`` gives it a
    folder; pass your own as an observer: ``DistributedDataParallel(model, observer=Recorder("folder"))``.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, keep: int | None = None) -> None:
        super().__init__()
        self.folder = None if folder is None else Path(folder)
        self._keep = keep if keep is not None else KEPT if self.folder is not None else KEPT_IN_MEMORY
        self._header: Header | None = None
        self._synchronizer: weakref.ref[Synchronizer] | None = None
        self._on_core = time.thread_time
        self._layout: BucketLayout | None = None
        self._layouts: list[tuple[BucketPart, ...]] = []
        # Gathers whose parameters this step uses: those that the step before has started.
        self._used: list[Gather] = []
        self._steps: deque[tuple[int, int, Any, Marks, list[Gather]]] = deque(maxlen=self._keep)
        # When the step began: the last one's end. Where that is in the marks, once its optimizer has stepped.
        self._begin: Any = None
        self._cut = 0
        self._in_forward = self._loads = False
        # The one that runs forwards: what others load is loaded meanwhile.
        self._thread: int | None = None
        self.total = self.skipped = 0
        self._lines: dict[int, str] = {}
        self._stride = 1
        self._due, self._waits = 0.0, list(WRITTEN_AFTER)
        self._closed = self._failed = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy it without its records: the copy that a copied wrapper takes along begins empty, and writes nothing."""
        return (functools.partial(Recorder, keep=self._keep), ())

    # -- what it watches -------------------------------------------------------------------------------------------

    def attach(self, synchronizer: Synchronizer, name: str, clock: Clock) -> None:
        """Prepare for a model, before its first event. One that moves to another communicator is attached again."""
        self._synchronizer = weakref.ref(synchronizer)
        if synchronizer.parameters[0].device.type == "cuda":
            self._now, self._on_core = DeviceClock(synchronizer.parameters[0].device), no_core_time
        number = 0 if self._header is None else self._header.model
        if self._header is None and self.folder is not None:
            # One that no other model of this rank has in the folder, ended or not: it would lose its file.
            key = self.folder, synchronizer.options.communicator.rank
            number, _models[key] = _models[key], _models[key] + 1
        self._header = _describe(synchronizer, name, clock, number)
        listen(self)
        if self.folder is not None and self not in _unwritten:
            _unwritten.append(self)
            self._due = time.monotonic() + self._waits[0]

    def align(self, clock: Clock) -> None:
        """Take what ranks have measured of their clocks."""
        if self._header is not None:
            self._header = replace(self._header, clock=clock)

    # -- events: the hot path --------------------------------------------------------------------------------------

    def evaluation_began(self) -> None:
        # Once is enough: somebody may evaluate for hours.
        if not self._marks or self._marks[-1][0] != EVALUATION:
            self._marks.append((EVALUATION, None, None))

    def forward_began(self) -> None:
        now = self._now()
        if self._cut:
            self._end_step()
        elif len(self._marks) > MOST_MARKS:
            self._marks, self._used, self._gathers, self._begin = [], [], [], now
        elif self._begin is None:
            self._begin = now
        self._in_forward, self._thread = True, threading.get_ident()
        self._marks.append((FORWARD, None, now))

    def forward_ended(self) -> None:
        self._in_forward = False
        self._marks.append((FORWARD_END, None, self._now()))

    def backward_began(self, *, synchronizes: bool) -> None:
        # A forward that raised, or whose output went elsewhere, is over too.
        self._in_forward = False
        super().backward_began(synchronizes=synchronizes)

    def chunk_full(self, bucket: Bucket) -> None:
        self._marks.append((FULL, (bucket.index,), self._now()))

    def gather_needed(self, bucket: Bucket) -> None:
        now = self._now()
        self._marks.append((NEEDED, None, now))
        gather = self._waiting.get(bucket.index)
        if gather is not None:
            gather[4] = now

    def gather_arrived(self, bucket: Bucket) -> None:
        now = self._now()
        self._marks.append((ARRIVED, None, now))
        gather = self._waiting.pop(bucket.index, None)
        if gather is not None:
            gather[5] = now

    def loading_began(self) -> None:
        # Batches of an evaluation are part of it, and somebody may read data for hours without a step.
        evaluates = bool(self._marks) and self._marks[-1][0] == EVALUATION
        if self._thread == threading.get_ident() and not evaluates and len(self._marks) <= MOST_MARKS:
            self._loads = True
            self._marks.append((LOADING, None, self._now()))

    def loading_ended(self) -> None:
        if self._loads and self._thread == threading.get_ident():
            self._loads = False
            self._marks.append((LOADED, None, self._now()))

    def step_began(self) -> None:
        if not self._in_forward:
            self._marks.append((STEP, None, self._now()))

    def step_ended(self, optimizer: Any) -> None:
        # Parameters that are updated when a layer waits for them have optimizers that step inside the forward.
        if self._in_forward or self._begin is None:
            return
        self._marks.append((STEP_END, None, self._now()))
        self._cut = len(self._marks)
        if self._header is not None and not self._header.optimizer:
            self._header = replace(self._header, optimizer=type(optimizer).__name__)

    def step_skipped(self) -> None:
        self.skipped += 1

    # -- a step is over --------------------------------------------------------------------------------------------

    def _end_step(self) -> None:
        """End the step. Called at the next forward: until then another optimizer may step, and the step is not over."""
        marks, cut, self._cut = self._marks, self._cut, 0
        self._marks = marks[cut:]
        del marks[cut:]
        self._steps.append((self.total, self._number_of_layout(), self._begin, marks, self._used))
        self._used, self._gathers = self._gathers, []
        self._begin = marks[-1][2]
        self.total += 1
        if self.folder is not None and not self._closed and time.monotonic() > self._due:
            self.write()

    def _number_of_layout(self) -> int:
        synchronizer = None if self._synchronizer is None else self._synchronizer()
        layout = None if synchronizer is None else synchronizer.layout
        if layout is not None and layout is not self._layout and synchronizer is not None:
            self._layout, parts = layout, []
            for plan in layout.buckets:
                names = tuple(synchronizer.specs[slot.parameter].name for slot in plan.slots)
                parts.append(BucketPart(nbytes=plan.numel * plan.dtype.itemsize, parameters=names))
            self._layouts.append(tuple(parts))
        return len(self._layouts) - 1

    # -- what it knows ---------------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[Step]:
        """The last steps, oldest first. On a GPU it waits for them."""
        return self.steps_since(0)

    def steps_since(self, number: int) -> list[Step]:
        """The :attr:`steps` from ``number`` on."""
        if self._cut:
            self._end_step()
        return self._read([each for each in list(self._steps) if each[0] >= number])

    @property
    def layouts(self) -> tuple[tuple[BucketPart, ...], ...]:
        """The bucket layouts that steps refer to by their number."""
        return tuple(self._layouts)

    @property
    def recording(self) -> Recording | None:
        """The recording of what it has kept; None before it is attached to a model."""
        return self._recording(self.steps, ended=self._closed)

    def _recording(self, steps: Sequence[Step], *, ended: bool) -> Recording | None:
        synchronizer = None if self._synchronizer is None else self._synchronizer()
        if self._header is None:
            return None
        if synchronizer is not None:
            self._header = replace(self._header, **_changing(synchronizer))
        layouts = tuple(self._layouts)
        return Recording(header=self._header, layouts=layouts, steps=tuple(steps), total=self.total, ended=ended)

    def _read(self, steps: list[tuple[int, int, Any, Marks, list[Gather]]]) -> list[Step]:
        read: Callable[[Any], float] = float
        if isinstance(self._now, DeviceClock):
            anchor = self._now()
            anchor.synchronize()
            now = time.perf_counter()

            def read(event: Any) -> float:
                event.synchronize()
                return now - float(event.elapsed_time(anchor)) / 1e3

        return [
            read_step(marks, gathers, read=read, number=number, layout=layout, begin=begin)
            for number, layout, begin, marks, gathers in steps
        ]

    # -- files -----------------------------------------------------------------------------------------------------

    def write(self, *, ended: bool = False) -> None:
        """Write everything kept so far. It never raises: an observer must not break a training."""
        if self.folder is None or self._failed:
            return
        try:
            if self._cut:
                self._end_step()
            fresh = [each for each in list(self._steps) if each[0] not in self._lines]
            self._lines.update({step.number: step_line(step) for step in self._read(fresh)})
            self._thin()
            recording = self._recording((), ended=ended)
            if recording is not None:
                write_recording(self.folder, recording, self._lines.values())
        except Exception:
            self._failed = True
            LOGGER.exception("the recording cannot be written to %s, and is not tried again", self.folder)
        self._waits = self._waits[1:] or self._waits
        self._due = time.monotonic() + self._waits[0]

    def _thin(self) -> None:
        recent = self.total - self._keep
        while True:
            self._lines = {
                number: line for number, line in self._lines.items() if number >= recent or not number % self._stride
            }
            if sum(number < recent for number in self._lines) <= self._keep:
                return
            self._stride *= 2

    def close(self) -> None:
        """Write the file one last time: the training is over."""
        if not self._closed:
            self.write(ended=True)
            self._closed = True
            with contextlib.suppress(ValueError):
                _unwritten.remove(self)


@atexit.register
def close_recorders() -> None:
    """Close all recorders, at the end of the process or before ``os._exit`` ends it."""
    # Each takes itself off the list.
    for recorder in _unwritten.copy():
        recorder.close()


os.register_at_fork(after_in_child=_unwritten.clear)


def _describe(synchronizer: Synchronizer, name: str, clock: Clock, number: int) -> Header:
    communicator = synchronizer.options.communicator
    backend = "" if communicator.group is None else str(torch.distributed.get_backend(communicator.group))
    return Header(
        rank=communicator.rank,
        world_size=communicator.world_size,
        model=number,
        name=name,
        host=socket.gethostname(),
        identity=host_identity().hex(),
        process=os.getpid(),
        device=str(synchronizer.parameters[0].device),
        backend=backend,
        communicator=repr(communicator),
        schedule=synchronizer.options.policy.schedule,
        caps_chosen=synchronizer.options.policy.sizes is not None,
        parameters={spec.name: spec.nbytes for spec in synchronizer.specs},
        clock=clock,
        versions={"gradsync": __version__, "torch": str(torch.__version__)},
        **_changing(synchronizer),
    )


def _changing(synchronizer: Synchronizer) -> dict[str, Any]:
    """The parts of the header that may change during the training."""
    link = known_link(synchronizer.options.communicator)
    return {
        "reduction": repr(synchronizer.reduction),
        "caps": tuple(synchronizer.caps.caps),
        "compiled": "" if synchronizer.compilation is None else synchronizer.compilation.describe(),
        "link": None if link is None else (link.latency, link.seconds_per_byte),
    }
