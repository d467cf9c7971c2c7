"""Measures how long a rank works on each window itself, and how long it waits for others.

From the end of one synchronization to the end of the next, a rank either does its own work (data, forward, backward,
update) or waits in a collective. The rank that all others wait for waits the least itself, and what it does wait is
communication time. The host's clock can measure this where the host computes and waits.

Where the host only queues work for a CUDA device it sees neither. There, events on the device's own timeline are used::

    began   waiting             work ended      ended
      │ own ├───────┤ own work      │  waiting    │    the compute stream: what it does, and what it waits for
    ──┴─────┴───────┴───────────────┴─────────────┴──▶

Time that a device waits for its host (slow data, a slow process) lies between the same events, and counts as the rank's
own. So does the time that a forward waits for parameters of a sharded optimizer: all ranks wait for these alike.

At the end of a window, the training thread reads the events that the device has passed by then. It never waits for one,
and no other thread touches them: a separate thread would have device 0 as its current device, and create a context
there; and any CUDA call of its would break a graph that the training captures meanwhile. For other accelerators nothing
is known.
"""

import contextlib
import logging
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gradsync.base.files import from_json_or
from gradsync.communicator.collective import waited_here
from gradsync.communicator.device_stage import DeviceClock

__all__ = [
    "MOST_WINDOWS",
    "NO_PACE",
    "DevicePaceMeter",
    "Pace",
    "PaceMeter",
    "UnknownPaceMeter",
    "is_marked",
    "make_meter",
]

# What is kept for a watch that comes late; older windows are not reported.
MOST_WINDOWS = 64
MOST_SECONDS = 1e6


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The times of consecutive windows of the model of that number; ``last`` is the number of the last window.

    For each window: the seconds of the rank's ``own`` work, and of its waiting. No own work at all means that nothing
    is known of the window, or that the rank only stood by in it.
    """

    model: int = 0
    last: int = 0
    own: tuple[float, ...] = ()
    waited: tuple[float, ...] = ()


NO_PACE = Pace()


def read_pace(data: object) -> Pace:
    """Read the pace that another rank has sent; one of no windows if it is something else."""
    pace = from_json_or(Pace, data, NO_PACE)
    is_sound = len(pace.own) == len(pace.waited) <= MOST_WINDOWS and min(pace.model, pace.last) >= 0
    return pace if is_sound and all(0 <= each <= MOST_SECONDS for each in (*pace.own, *pace.waited)) else NO_PACE


class PaceMeter:
    """Measures a rank's pace: the engine reports each synchronized window; the watch reads, from a different thread."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        # In forwards, in all; and how much of it is in the threads' own counts.
        self._waited_before, self._noted = 0.0, dict[int, float]()
        self._is_waiting = False
        # Their numbers, own work and waiting.
        self._windows: deque[tuple[int, float, float]] = deque(maxlen=MOST_WINDOWS)
        # How many windows there were, and how long the last one took.
        self.count = 0
        self.seconds = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which this rank waits for others before its work has ended, also outside of gradsync."""
        if self._is_waiting:
            yield
            return
        began, waited, thread = time.perf_counter(), waited_here(), threading.get_ident()
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False
            self._waited_before += time.perf_counter() - began
            self._noted[thread] = self._noted.get(thread, 0.0) + waited_here() - waited

    def work_ended(self) -> None:
        """Note that this rank's part of the window is done, or queued: from here on it waits for others."""

    def window_ended(self, *, worked: bool = True) -> None:
        """Note that a window has been synchronized.

        A rank whose data has run out has not ``worked`` in it: it only stands by.
        """
        now, waited = time.perf_counter(), waited_here()
        own = waiting = 0.0
        if self._last is not None:
            # Backwards may run on another thread than forwards, and waited_here() is of this one alone.
            noted = self._noted.get(threading.get_ident(), 0.0)
            self.seconds, waiting = now - self._last[0], waited - self._last[1] - noted + self._waited_before
            # Another thread trains from here on: it has waited for other things.
            if worked and 0 <= waiting <= self.seconds:
                own = self.seconds - waiting
        self._last, self._waited_before, self._noted = (now, waited), 0.0, {}
        self.count += 1
        self._windows.append((self.count, own, waiting if own else 0.0))

    def since(self, number: int, *, model: int = 0) -> Pace:
        """The pace of the windows after ``number``, as far as they are kept."""
        # A copy is made in one go, whatever the other thread does.
        new = [window for window in list(self._windows) if window[0] > number]
        if not new:
            return NO_PACE
        numbers, own, waited = zip(*new, strict=True)
        # In whole microseconds, which are short where they are sent.
        own, waited = (tuple(round(each, 6) for each in seconds) for seconds in (own, waited))
        return Pace(model=model, last=numbers[-1], own=own, waited=waited)


LOGGER = logging.getLogger("gradsync")

# To mark a window costs the host some hundredths of a millisecond. Of shorter ones one in two, four, eight is marked,
# which are the same on all ranks. Not each eighth: what a rank does once in eight windows, as writing a log, would be
# in all that are marked, or in none. Steps of the golden section round a domain keep to no rhythm.
SHORTEST_SECONDS = 0.02
MOST_APART = 32
ROUND = 1 << 32
GOLDEN_STEP = 0x9E3779B1
# Forwards that no backward follows have waits, too, and their window may never end.
MOST_WAITS = 64


class Marked(NamedTuple):
    """A window that has not been read yet. It has no mark for the end of its work where nothing is known of that."""

    number: int
    began: Any
    work_ended: Any
    ended: Any
    waits: list[tuple[Any, Any]]

    @property
    def marks(self) -> tuple[Any, ...]:
        return self.began, self.work_ended, self.ended, *(mark for wait in self.waits for mark in wait)


# The meters of one device that are in use. Where several models are trained, waiting in one of them is not work of
# another one whose window contains the wait.
Neighbours = list["weakref.ref[DevicePaceMeter]"]


class DevicePaceMeter(PaceMeter):
    """A meter that uses ``marks`` of the device. If other models use them, too, their meters are its ``neighbours``."""

    def __init__(self, marks: DeviceClock, neighbours: Neighbours | None = None) -> None:
        super().__init__()
        self._marks = marks
        self._neighbours: Neighbours = [] if neighbours is None else neighbours
        # Of the window that goes on, if it is marked.
        self._began: Any = None
        self._work_ended: Any = None
        self._waits: list[tuple[Any, Any]] = []
        # In how many waits it is, one in the other, and where the first of them began.
        self._depth = 0
        self._stopped: Any = None
        self._unread: deque[Marked] = deque()
        self._last_read = 0
        self._ended_at = 0.0
        # By the watch. Where there is none, nothing is marked.
        self._is_asked = False
        self._has_failed = False

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        for meter in (self, *self._others()):
            meter._unless_failed(meter._begin_wait)
        try:
            yield
        finally:
            for meter in (self, *self._others()):
                meter._unless_failed(meter._end_wait)

    def work_ended(self) -> None:
        self._unless_failed(self._end_work)
        for other in self._others():
            other._unless_failed(other._begin_wait)

    def window_ended(self, *, worked: bool = True) -> None:
        now = time.perf_counter()
        if self._ended_at:
            self.seconds = now - self._ended_at
        self._ended_at = now
        self.count += 1
        self._unless_failed(self._end_window, worked)
        for other in self._others():
            other._unless_failed(other._end_wait)

    def _others(self) -> "Iterator[DevicePaceMeter]":
        # A copy: the watch adds meters, and those of models that are gone leave the list.
        return (other for each in list(self._neighbours) if (other := each()) is not None and other is not self)

    def _unless_failed(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call ``action``, and end only the measurement if that fails: pace is useful but not essential.

        If the device is lost, the training learns of it from its next call.
        """
        if self._has_failed:
            return
        try:
            action(*arguments)
        except Exception as error:
            self._has_failed = True
            self._began, self._work_ended, self._stopped = None, None, None
            self._waits, self._unread = [], deque()
            LOGGER.warning("slow ranks are not looked for any more, as this device could not be asked: %s", error)

    def _begin_wait(self) -> None:
        self._depth += 1
        if self._began is None or self._depth > 1:
            return
        if len(self._waits) < MOST_WAITS:
            self._stopped = self._marks()
        else:
            # Those that are not known would be its work.
            self._began, self._waits = None, []

    def _end_wait(self) -> None:
        self._depth = max(0, self._depth - 1)
        if self._stopped is not None and not self._depth:
            self._waits.append((self._stopped, self._marks()))
            self._stopped = None

    def _end_work(self) -> None:
        if self._began is not None:
            self._work_ended = self._marks()

    def _end_window(self, worked: bool) -> None:
        began, marks_next = self._began, self._is_asked and is_marked(self.count + 1, self._apart)
        ended = self._marks() if began is not None or marks_next else None
        if began is not None:
            # Nor is anything known of one that ends while it waits.
            work_ended = self._work_ended if worked and self._stopped is None else None
            self._unread.append(Marked(self.count, began, work_ended, ended, self._waits))
        self._began, self._work_ended, self._waits = ended if marks_next else None, None, []
        self._depth, self._stopped = 0, None
        while self._unread and self._unread[0].ended.query():
            self._read(self._unread.popleft())

    @property
    def _apart(self) -> int:
        """Of how many windows one is marked, a power of two.

        So ranks whose windows differ a little mark at least one of two alike.
        """
        apart = 1
        while apart < MOST_APART and apart * self.seconds < SHORTEST_SECONDS:
            apart *= 2
        return apart

    def _read(self, window: Marked) -> None:
        # Those between were not marked. Windows are reported without gaps, and nothing is known of these.
        first = max(self._last_read + 1, window.number - MOST_WINDOWS) if self._last_read else window.number
        self._windows.extend((number, 0.0, 0.0) for number in range(first, window.number))
        self._windows.append((window.number, *_times(window)))
        self._last_read = window.number
        for mark in window.marks:
            # Where the next one is marked, too, it begins with the end of this one.
            if mark is not None and mark is not (self._unread[0].began if self._unread else self._began):
                self._marks.reuse(mark)

    def since(self, number: int, *, model: int = 0) -> Pace:
        if not self._is_asked:
            self._is_asked = True
            self._neighbours.append(weakref.ref(self, self._neighbours.remove))
        return super().since(number, model=model)


def is_marked(number: int, apart: int) -> bool:
    """Whether the window of that number is marked, where one in ``apart`` is.

    Those of one in four are among those of one in two.
    """
    return number * GOLDEN_STEP % ROUND * apart < ROUND


def _times(window: Marked) -> tuple[float, float]:
    """The seconds of own work in a window, and of waiting."""
    if window.work_ended is None:
        return 0.0, 0.0
    before = sum(_seconds(*wait) for wait in window.waits)
    own = _seconds(window.began, window.work_ended) - before
    waited = before + _seconds(window.work_ended, window.ended)
    return (own, waited) if own > 0 and waited >= 0 else (0.0, 0.0)


def _seconds(began: Any, ended: Any) -> float:
    return float(began.elapsed_time(ended)) / 1e3


# By device. All models of a process are there: whatever group one of them waits for, no other works meanwhile.
_neighbours: defaultdict[torch.device, Neighbours] = defaultdict(list)


class UnknownPaceMeter(PaceMeter):
    """A meter for a device whose times cannot be read: reporting the host's times instead would be wrong."""

    def since(self, number: int, *, model: int = 0) -> Pace:
        return NO_PACE


def make_meter(device: torch.device) -> PaceMeter:
    """Make the meter of a model whose gradients are computed on ``device``."""
    match device.type:
        case "cuda":
            return DevicePaceMeter(DeviceClock(device), _neighbours[device])
        case "cpu":
            return PaceMeter()
    return UnknownPaceMeter()
