"""An observer that records when each bucket was ready, started and finished, and explains what that means."""

import functools
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsync.communicator import Handle
from gradsync.core.bucket.bucket import Bucket
from gradsync.observe.charts.canvas import PARTS
from gradsync.observe.charts.notebook import Piece, frame, heading, legend, lines, strip, table
from gradsync.observe.charts.numbers import count, duration, size

__all__ = ["BucketTimes", "GatherTimes", "StepTimes", "Timeline"]


NOTHING = "no synchronized backward recorded yet"
# What, of which bucket (index and bytes: a recorded step must not keep gradients alive), when.
Marks = list[tuple[str, tuple[int, int] | None, Any]]


@dataclass(kw_only=True)
class BucketTimes:
    """The path of one bucket, in seconds since the backward began.

    ``reduced`` is when its collective was complete, ``finish`` when the engine had waited for it.
    """

    index: int
    nbytes: int
    ready: float | None = None
    start: float | None = None
    reduced: float | None = None
    finish: float | None = None


@dataclass(kw_only=True)
class GatherTimes:
    """New parameters of one bucket on their way, behind the forward: in seconds since the backward began, so before
    zero. ``end`` is None as long as they have not arrived."""

    index: int
    nbytes: int
    start: float
    end: float | None = None


@dataclass(kw_only=True)
class StepTimes:
    """One synchronized backward, with the gathers of a sharded optimizer since the previous one."""

    buckets: list[BucketTimes] = field(default_factory=list)
    gathers: list[GatherTimes] = field(default_factory=list)
    backward_end: float = 0.0
    finished: float = 0.0

    @property
    def overlaps(self) -> bool:
        """Whether at least one collective was started while backward still computed."""
        return any(times.start is not None and times.start < self.backward_end for times in self.buckets)

    @property
    def exposed(self) -> float:
        """Seconds of synchronization that backward did not hide."""
        return self.finished - self.backward_end


class Timeline:
    """Records every synchronized backward: ``DistributedDataParallel(model, observer=Timeline())``.

    On the CPU, times are read from the clock. On CUDA the host runs ahead of the device, so events are recorded on the
    stream and read when you access :attr:`steps`.
    """

    def __init__(self, *, keep: int = 100) -> None:
        self._keep = keep
        self._marks: Marks = []
        # Of gathers since the last synchronization: what comes in pairs, a start and an end.
        self._gathers: list[Marks] = []
        self._recorded: list[tuple[Marks, list[Marks]]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, as that of a wrapper takes along, begins with nothing recorded."""
        return (functools.partial(Timeline, keep=self._keep), ())

    @property
    def steps(self) -> list[StepTimes]:
        """The recorded steps, oldest first."""
        return [_read(*marks) for marks in self._recorded]

    @property
    def last(self) -> StepTimes | None:
        """The most recently recorded step."""
        return _read(*self._recorded[-1]) if self._recorded else None

    def take(self) -> list[StepTimes]:
        """Return :attr:`steps`, and forget them."""
        recorded, self._recorded = self._recorded, []
        return [_read(*marks) for marks in recorded]

    def backward_began(self, *, synchronizes: bool) -> None:
        self._marks = []
        self._mark("began", None)

    def bucket_ready(self, bucket: Bucket) -> None:
        self._mark("ready", bucket)

    def bucket_started(self, bucket: Bucket, handle: Handle) -> None:
        self._mark("start", bucket)
        marks = self._marks
        # Runs on the wire's own thread, and on CUDA on a stream that is ordered after the collective.
        handle.when_done(lambda: self._mark("reduced", bucket, marks))

    def backward_ended(self) -> None:
        self._mark("ended", None)

    def bucket_finished(self, bucket: Bucket) -> None:
        self._mark("finish", bucket)

    def synchronization_finished(self) -> None:
        self._mark("synchronized", None)
        self._recorded.append((self._marks, self._gathers))
        del self._recorded[: -self._keep]
        self._marks, self._gathers = [], []

    def gather_started(self, bucket: Bucket, handle: Handle) -> None:
        marks: Marks = []
        self._mark("gather", bucket, marks)
        self._gathers.append(marks)
        handle.when_done(lambda: self._mark("gathered", bucket, marks))

    def _mark(self, what: str, bucket: Bucket | None, marks: Marks | None = None) -> None:
        # Several threads come by. There is no lock: a signal handler that reads a parameter in here waits for another
        # thread, which would wait for this one.
        identity = None if bucket is None else (bucket.index, bucket.buffer.nbytes)
        (self._marks if marks is None else marks).append((what, identity, _now()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keep={self._keep}, {count(len(self._recorded), 'step')} recorded)"

    def __str__(self) -> str:
        last = self.last
        return NOTHING if last is None else render(last)

    def _repr_html_(self) -> str:
        """The last step, in a notebook."""
        last = self.last
        return frame(lines([NOTHING])) if last is None else as_html(last)


def _now() -> Any:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def _since(mark: Any, origin: Any) -> float:
    if isinstance(mark, float):
        return mark - float(origin)
    mark.synchronize()
    seconds: float = origin.elapsed_time(mark) / 1e3
    return seconds


def _read(marks: Marks, gathers: list[Marks]) -> StepTimes:
    step = StepTimes()
    by_bucket: dict[tuple[int, int], dict[str, float]] = {}
    origin = marks[0][2]
    for what, bucket, mark in marks:
        seconds = _since(mark, origin)
        if what == "ended":
            step.backward_end = seconds
        elif what == "synchronized":
            step.finished = seconds
        elif bucket is not None:
            by_bucket.setdefault(bucket, {})[what] = seconds
    step.buckets = [
        BucketTimes(index=index, nbytes=nbytes, **by_bucket[index, nbytes]) for index, nbytes in sorted(by_bucket)
    ]
    for started, *ended in gathers:
        assert started[1] is not None
        gather = GatherTimes(index=started[1][0], nbytes=started[1][1], start=_since(started[2], origin))
        gather.end = _since(ended[0][2], origin) if ended else None
        step.gathers.append(gather)
    return step


def render(step: StepTimes, *, width: int = 60) -> str:
    """The step as text: ``·`` waiting for its turn, ``█`` under way, ``|`` the end of backward; and new parameters on
    their way, ``▒``, before backward began and after."""
    first = min([0.0, *(gather.start for gather in step.gathers)])
    total = max(step.finished - first, 1e-9)

    def column(seconds: float) -> int:
        return min(int((seconds - first) / total * width), width - 1)

    def fill(row: list[str], since: float | None, until: float | None, sign: str) -> None:
        if since is not None and until is not None:
            row[column(since) : column(until) + 1] = sign * (column(until) + 1 - column(since))

    rows = [_headline(step, first)]
    end = column(step.backward_end)
    for times in step.buckets:
        row = [" "] * width
        if times.ready is not None and times.start is not None:
            row[column(times.ready) : column(times.start)] = "·" * (column(times.start) - column(times.ready))
        for gather in step.gathers:
            if gather.index == times.index:
                fill(row, gather.start, gather.end, "▒")
        fill(row, times.start, times.finish if times.reduced is None else times.reduced, "█")
        for place, sign in ((column(0.0), "["), (end, "|")) if first < 0 else ((end, "|"),):
            if row[place] == " ":
                row[place] = sign
        rows.append(f"bucket {times.index:3d} {times.nbytes / 2**20:8.2f} MiB {''.join(row).rstrip()}")
    return "\n".join(rows)


def _headline(step: StepTimes, first: float) -> str:
    words = f"ends at {step.backward_end * 1e3:.2f} ms, synchronized at {step.finished * 1e3:.2f} ms"
    return f"gathers begin {-first * 1e3:.2f} ms before backward; it {words}" if first < 0 else f"backward {words}"


def as_html(step: StepTimes) -> str:
    """The same as :func:`render` draws, in the colours of reports."""
    first = min([0.0, *(gather.start for gather in step.gathers)])
    total = max(step.finished - first, 1e-9)
    end = step.backward_end

    def piece(since: float, until: float, part: str, words: str) -> Piece:
        hint = f"{words}: {duration(max(until - since, 0.0))}"
        return (since - first) / total, (min(until, step.finished) - first) / total, PARTS[part], hint

    names = {"backward": "backward", "ready, waits": "waiting", "wire, hidden": "hidden", "wire, exposed": "exposed"}
    rows = [("backward", "", strip([piece(0.0, end, "backward", "backward")]))]
    for times in step.buckets:
        pieces = []
        for gather in step.gathers:
            if gather.index == times.index and gather.end is not None:
                names["new parameters"] = "update"
                pieces.append(piece(gather.start, gather.end, "update", "new parameters"))
        reduced = times.finish if times.reduced is None else times.reduced
        if times.start is not None and reduced is not None:
            ready = times.start if times.ready is None else times.ready
            pieces.append(piece(ready, times.start, "waiting", "ready, waits"))
            pieces.append(piece(times.start, min(reduced, end), "hidden", "on the wire behind backward"))
            pieces.append(piece(max(times.start, end), reduced, "exposed", "on the wire after backward"))
        rows.append((f"bucket {times.index}", size(times.nbytes), strip(pieces, marks=[(end - first) / total])))
    colours = {name: PARTS[part] for name, part in names.items()}
    return frame(heading(_headline(step, first)), table(rows, right=(1,)), legend(colours))
