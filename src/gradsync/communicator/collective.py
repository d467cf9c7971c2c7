"""The handle that every communicator returns: a collective with a number, a description, and the work that performs it.

The work may be a task on one of our queues, a ``Work`` of torch, or a handle of another communicator. A collective only
needs the interface :class:`Work`. When the work fails, the communicator explains the error and keeps it as its failure.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from gradsync.base.errors import GradsyncError
from gradsync.communicator.background import Background, GivenUpError, Numbering
from gradsync.communicator.base import Handle, Stage
from gradsync.communicator.transport_state import TransportState

__all__ = [
    "DONE",
    "Allocation",
    "Collective",
    "HandleGroup",
    "HandleWithFinish",
    "InlineWork",
    "QueuedWork",
    "StageHandle",
    "Work",
    "add_waited",
    "copy_failure",
    "is_waiting_here",
    "waited_here",
]

T = TypeVar("T")


class _ThreadWaits(threading.local):
    """How many seconds the calling thread has waited for collectives, and whether it is waiting now.

    Thread-local, so it ends with the thread. A table keyed by thread id would grow with every thread, and ids are
    reused.
    """

    seconds = 0.0
    is_waiting = False


_waits_here = _ThreadWaits()


def waited_here() -> float:
    """How many seconds this thread has waited for collectives, in all."""
    return _waits_here.seconds


def add_waited(seconds: float) -> None:
    """Count that many seconds for this thread, which waited for a thread that waited for collectives."""
    _waits_here.seconds += seconds


def is_waiting_here() -> bool:
    """Whether this thread is waiting for a collective. If so, the caller is a signal handler."""
    return _waits_here.is_waiting


class Work(Protocol):
    """What performs a collective."""

    def wait(self) -> None:
        """Return when it is done, or raise."""

    def done(self) -> bool:
        """Whether the work is done."""

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the work is done, or now if it is."""


class Owner(Protocol):
    """The communicator, as its handles see it."""

    @property
    def state(self) -> TransportState: ...

    def explain(self, collective: "Collective", error: BaseException) -> BaseException:
        """The exception to raise for ``error``, which is the communicator's failure from then on."""

    def start_stage(self, first: Handle, stage: Stage) -> Handle:
        """Start ``stage`` after ``first``, as :meth:`Handle.then` does."""

    def take_number(self) -> int | str:
        """Take the next number in the order."""

    def abort(self, reason: str) -> None: ...


class _Done:
    """Work that was already complete when it was started."""

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True

    def when_done(self, callback: Callable[[], None]) -> None:
        callback()


DONE: Work = _Done()


class QueuedWork:
    """Work that is started when its turn comes on ``queue``: by a stage, or after one."""

    __slots__ = ("_started", "_task")

    def __init__(self, queue: Background, start: Callable[[], Work | None], place: Numbering | None = None) -> None:
        self._started: Work | None = None

        def run() -> None:
            self._started = start()

        self._task = queue.start(run, place=place)

    def wait(self) -> None:
        self._task.wait()
        if self._started is not None:
            self._started.wait()

    def done(self) -> bool:
        return self._task.done() and (self._started is None or self._started.done())

    def when_done(self, callback: Callable[[], None]) -> None:
        self._task.when_done(lambda: (self._started or DONE).when_done(callback))


class Collective:
    """A collective on ``communicator``. ``detail`` is its operation, or the rank it comes from."""

    __slots__ = ("_error", "communicator", "detail", "dtype", "kind", "number", "numel", "place", "work")

    def __init__(self, communicator: Owner, kind: str, detail: str, numel: int, dtype: torch.dtype) -> None:
        self.communicator = communicator
        self.kind, self.detail, self.numel, self.dtype = kind, detail, numel, dtype
        # All are given when it is started: what is refused before takes no number. Its place is that among all
        # collectives of the communicator, whichever communicator starts them.
        self.number: int | str = 0
        self.place = 0
        self.work: Work = DONE
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<{self.describe()}>"

    def wait(self) -> None:
        # In this order: a stage that breaks the communicator notes its own error first.
        failure = self.communicator.state.failure
        if self._error is None and failure is not None and not self.work.done():
            self._error = copy_failure(failure)
        if self._error is not None:
            raise self._error
        waits, since, here = self.communicator.state.waits, time.monotonic(), _waits_here
        # A collective may be made of others: what is waited for inside is waited for here.
        is_outermost = not here.is_waiting
        try:
            # Inside, so that an interrupt leaves neither behind.
            waits[self], here.is_waiting = since, True
            self.work.wait()
        except BaseException as error:
            explained = self.communicator.explain(self, error)
            # An interruption is raised once: the next wait raises what it has broken.
            self._error = explained if isinstance(explained, Exception) else None
            if explained is error:
                raise
            raise explained from error
        finally:
            # Two threads may have waited for it.
            waits.pop(self, None)
            if is_outermost:
                here.is_waiting = False
                here.seconds += time.monotonic() - since

    def done(self) -> bool:
        # Whatever cannot be asked raises when it is waited for.
        with contextlib.suppress(Exception):
            return self._error is not None or self.work.done() or self.communicator.state.failure is not None
        return True

    def when_done(self, callback: Callable[[], None]) -> None:
        self.work.when_done(callback)

    def then(self, stage: Stage) -> Handle:
        return self.communicator.start_stage(self, stage)

    def describe(self) -> str:
        return f"{self.name()} ({self.what()})"

    def name(self) -> str:
        return f"collective {self.number}"

    def what(self) -> str:
        """The description without the number: ranks compare it."""
        return f"{self.kind} {self.detail}".rstrip() + f" of {self.numel} × {self.dtype}"

    def measured(self) -> str:
        """The text of :meth:`describe`, with the number of bytes."""
        return f"{self.name()} ({self.what()}, {self.numel * self.dtype.itemsize} bytes)"


class InlineWork(_Done, Generic[T]):
    """Work that the waiting thread, the only one to know of it, does itself."""

    result: T

    def __init__(self, run: Callable[[], T]) -> None:
        self._run = run

    def wait(self) -> None:
        self.result = self._run()


class Allocation(Collective):
    """Memory that all ranks allocate and share. It has no number: only the caller that asked for it waits for it."""

    __slots__ = ()

    def __init__(self, communicator: Owner, numel: int, dtype: torch.dtype) -> None:
        super().__init__(communicator, "shared", "memory", numel, dtype)

    def name(self) -> str:
        return "an allocation"


class StageHandle(Collective):
    """A stage on ``communicator``, which runs after ``first``. It raises the stage's own exception."""

    __slots__ = ("_after",)

    def __init__(self, communicator: Owner, first: Handle) -> None:
        super().__init__(communicator, "stage", "", 0, torch.uint8)
        self.number = communicator.take_number()
        self._after = first.describe()

    def call(self, first: Handle, stage: Stage) -> Work | None:
        """Wait for ``first`` and call ``stage``."""
        first.wait()
        try:
            return stage()
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, GivenUpError):
                # A thread that waits meanwhile gets this error, not its effect on the communicator.
                self._error = error
            # The others may be in what the stage would have started.
            self.communicator.abort(f"{self.describe()} raised {type(error).__name__}: {error}")
            raise

    def begin(self, run: Callable[[], Work | None]) -> None:
        """Have ``run`` called now. What it raises is raised by :meth:`wait`, as if it had come later."""
        try:
            self.work = run() or DONE
        except Exception as error:
            self._error = self.communicator.explain(self, error)

    def describe(self) -> str:
        return f"{self.name()} after {self._after}"

    def name(self) -> str:
        return f"stage {self.number}"

    def measured(self) -> str:
        return self.describe()


class HandleGroup:
    """Several collectives of one communicator, in the order they were started, waited for as one."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = list(handles)

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()

    def done(self) -> bool:
        return all(handle.done() for handle in self._handles)

    def when_done(self, callback: Callable[[], None]) -> None:
        left, lock = len(self._handles), threading.Lock()

        def count_down() -> None:
            nonlocal left
            with lock:
                left -= 1
                is_last = left == 0
            if is_last:
                callback()

        for handle in self._handles:
            handle.when_done(count_down)

    def then(self, stage: Stage) -> Handle:
        def after_all() -> Handle | None:
            self.wait()
            return stage()

        return self._handles[-1].then(after_all)

    def describe(self) -> str:
        return " and ".join(handle.describe() for handle in self._handles)


class HandleWithFinish:
    """A collective plus local work that the first thread to wait for it does, once."""

    def __init__(self, handle: Handle, finish: Callable[[], object]) -> None:
        self._handle = handle
        # Kept: on a device a stage may have waited, and what this refers to belongs to another stream. See
        # [Note: memory over streams] in device_stage.py.
        self._finish = finish
        self._is_finished = False
        self._lock = threading.Lock()

    def wait(self) -> None:
        self._handle.wait()
        with self._lock:
            if not self._is_finished:
                self._finish()
                self._is_finished = True

    def done(self) -> bool:
        return self._handle.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        self._handle.when_done(callback)

    def then(self, stage: Stage) -> Handle:
        def after_the_rest() -> Handle | None:
            self.wait()
            return stage()

        return self._handle.then(after_the_rest)

    def describe(self) -> str:
        return self._handle.describe()


def copy_failure(failure: GradsyncError) -> GradsyncError:
    """A copy of the first failure, for somebody else to raise."""
    copy = type(failure)(*failure.args)
    copy.__cause__ = failure
    return copy
