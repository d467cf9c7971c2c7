"""Measures how long a rank works on each window itself, and how long it waits for others.

From the end of one synchronization to the end of the next, a rank either does its own work (data, forward, backward,
update) or waits in a collective. The rank that all others wait for waits the least itself, and what it does wait is
communication time. The host's clock can measure this where the host computes and waits. Where the host only queues work
for a CUDA device it sees neither, and the device is asked: see :mod:`gradsync.health.watch.device_pace`. For other
accelerators nothing is known.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradsync.communicator.collective import waited_here

__all__ = ["MOST_WINDOWS", "NO_PACE", "Pace", "PaceMeter"]

# What is kept for a watch that comes late; older windows are not told of.
MOST_WINDOWS = 64
MOST_SECONDS = 1e6
MICROSECOND = 1e-6


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Consecutive windows of the model of that number; ``last`` is the number of the last window.

    For each window: the seconds of the rank's ``own`` work, and of its waiting. No own work at all means that nothing
    is known of the window, or that the rank only stood by in it.
    """

    model: int = 0
    last: int = 0
    own: tuple[float, ...] = ()
    waited: tuple[float, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """In whole microseconds, which are short."""
        return {
            "model": self.model,
            "last": self.last,
            "own": [round(each / MICROSECOND) for each in self.own],
            "waited": [round(each / MICROSECOND) for each in self.waited],
        }

    @classmethod
    def read(cls, data: Any) -> "Pace":
        """What :meth:`as_data` has made. Whatever else it may be becomes one of no windows."""
        fields = data if isinstance(data, dict) else {}
        model, last, own, waited = (fields.get(name) for name in ("model", "last", "own", "waited"))
        if not isinstance(own, list) or not isinstance(waited, list) or len(own) != len(waited):
            return NO_PACE
        if len(own) > MOST_WINDOWS or not all(map(_is_whole, (model, last, *own, *waited))):
            return NO_PACE
        return cls(model=int(model or 0), last=int(last or 0), own=_seconds(own), waited=_seconds(waited))


NO_PACE = Pace()


def _is_whole(number: object) -> bool:
    # Not a bool, which is an int, too.
    return type(number) is int and 0 <= number <= MOST_SECONDS / MICROSECOND


def _seconds(microseconds: Sequence[int]) -> tuple[float, ...]:
    return tuple(each * MICROSECOND for each in microseconds)


class PaceMeter:
    """The engine reports each synchronized window to it; the watch reads it, from a different thread."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        # In a forward, all in all; and what the threads that did so have noted of it themselves.
        self._waited_before, self._noted = 0.0, dict[int, float]()
        self._is_waiting = False
        # Their numbers, own work and waiting.
        self._windows: deque[tuple[int, float, float]] = deque(maxlen=MOST_WINDOWS)
        # How many windows there were, and how long the last one took.
        self.count = 0
        self.seconds = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """This rank waits for others before its work has ended, also in collectives that are not gradsync's."""
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
        """What this rank has to do for the window is done, or queued: from here on it waits for others."""

    def window_ended(self, *, worked: bool = True) -> None:
        """A window has been synchronized. One whose data has run out has not ``worked``: the rank only stands by."""
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
        """The windows after ``number``, as far as they are kept."""
        # A copy is made in one go, whatever the other thread does.
        new = [window for window in list(self._windows) if window[0] > number]
        if not new:
            return NO_PACE
        numbers, own, waited = zip(*new, strict=True)
        return Pace(model=model, last=numbers[-1], own=own, waited=waited)
