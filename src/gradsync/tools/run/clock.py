"""Where the time of a loop goes, measured as phases are entered and left. Phases nest, each with its own time."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["BACKWARD", "DATA", "FORWARD", "OPTIMIZER", "PHASES", "REST", "PhaseClock"]

DATA, FORWARD, BACKWARD, OPTIMIZER, REST = "data", "forward", "backward", "optimizer", "rest"
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, REST)


class PhaseClock:
    """Seconds in each phase, of the thread that made it. What other threads do happens at the same time, and costs the
    loop nothing of its own.

    What precedes the first forward is not counted: there models are made, and memory is touched for the first time.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._thread = threading.get_ident()
        self._inside = [REST]
        self._since: float | None = None
        self._counted = dict.fromkeys(PHASES, 0.0)
        self._until_step = dict(self._counted)

    @property
    def seconds(self) -> dict[str, float]:
        """Up to the end of the last optimizer step: what a script does afterwards is no part of its loop."""
        return dict(self._until_step)

    def is_mine(self) -> bool:
        """Whether it is the loop's thread that asks."""
        return threading.get_ident() == self._thread

    def is_inside(self, phase: str) -> bool:
        """Whether the phase has begun and not ended, whatever else has begun since."""
        return phase in self._inside

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """What runs meanwhile belongs to the phase, but for what belongs to another one inside."""
        if not self.is_mine():
            yield
            return
        if phase == FORWARD and self._since is None:
            self._since = self._now()
        self._count()
        self._inside.append(phase)
        try:
            yield
        finally:
            self._count()
            self._inside.pop()

    def enter(self, phase: str) -> None:
        """As :meth:`inside`, for those who are called at the beginning and at the end."""
        if self.is_mine():
            self._count()
            self._inside.append(phase)

    def leave(self, phase: str) -> None:
        if self.is_mine() and self._inside[-1] == phase:
            self._count()
            self._inside.pop()

    def stepped(self) -> None:
        """An optimizer step is over."""
        if self.is_mine():
            self._count()
            self._until_step = dict(self._counted)

    def _count(self) -> None:
        if self._since is not None:
            now = self._now()
            self._counted[self._inside[-1]] += now - self._since
            self._since = now
