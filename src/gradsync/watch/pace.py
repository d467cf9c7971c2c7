"""How long a rank works on a window itself, and how long it waits for others: medians over the last few windows.

From the end of one synchronization to the end of the next a rank does its own work (data, forward, backward, update),
or waits in a collective. The rank that all others wait for waits the least itself, and what it waits is the wire's.
The host's clock tells that where the host computes and waits. Where it only queues work for an accelerator it sees
neither, and all ranks look the same.
"""

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from gradsync.communicator.collective import waited_here

__all__ = ["NO_PACE", "WINDOWS", "Pace", "PaceMeter"]

# Enough for a median that one checkpoint or one hiccup does not move, few enough to tell of a change within 20 steps.
WINDOWS = 10


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of a window, in the middle of the last ``count``: of its ``own`` work, with how far half of them lie from
    it (``spread``), and of waiting (``waited``). ``window`` is the number of the last one."""

    window: int = 0
    count: int = 0
    own: float = 0.0
    spread: float = 0.0
    waited: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.count >= WINDOWS and self.own > 0

    @classmethod
    def read(cls, data: Any) -> "Pace":
        """What ``vars`` has made of one. Whatever else it may be becomes one that is not known."""
        fields = data if isinstance(data, dict) else {}
        whole = [fields.get(name) for name in ("window", "count")]
        seconds = [fields.get(name) for name in ("own", "spread", "waited")]
        if any(type(each) is not int for each in whole) or any(type(each) not in (int, float) for each in seconds):
            return NO_PACE
        if not all(0 <= each < 1e9 for each in (*whole, *seconds)):  # type: ignore[operator]
            return NO_PACE
        return cls(window=whole[0], count=whole[1], own=seconds[0], spread=seconds[1], waited=seconds[2])  # type: ignore[arg-type]


NO_PACE = Pace()


class PaceMeter:
    """Is told by an engine that a window was synchronized, and asked by the watch, on another thread."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._windows: deque[tuple[float, float]] = deque(maxlen=WINDOWS)
        self._count = 0

    def window_ended(self) -> None:
        now, waited = time.perf_counter(), waited_here()
        if self._last is not None:
            wall, waiting = now - self._last[0], waited - self._last[1]
            # Another thread trains from here on: it has waited for other things.
            if 0 <= waiting <= wall:
                self._windows.append((wall - waiting, waiting))
        self._last = now, waited
        self._count += 1

    def pace(self) -> Pace:
        # A copy is made in one go, whatever the other thread does.
        windows = list(self._windows)
        if not windows:
            return NO_PACE
        own = statistics.median(each for each, _ in windows)
        return Pace(
            window=self._count,
            count=len(windows),
            own=round(own, 6),
            spread=round(statistics.median(abs(each - own) for each, _ in windows), 6),
            waited=round(statistics.median(each for _, each in windows), 6),
        )
