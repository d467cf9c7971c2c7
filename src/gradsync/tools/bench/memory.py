"""How much memory a rank uses, with memory that ranks share counted once.

Linux's proportional set size divides every page by the number of processes that have it mapped, so the sum over ranks
is the memory really in use: also if gradients are in memory that all ranks of a host share. It has no high-water mark;
a thread reads it again and again, which is possible while torch computes, and keeps the largest value.
"""

import threading
from pathlib import Path
from typing import Self

from gradsync.base.errors import ConfigurationError

__all__ = ["PeakMemory", "memory_unreadable", "used_bytes"]

ROLLUP = Path("/proc/self/smaps_rollup")
PAUSE_SECONDS = 0.002


def memory_unreadable() -> str | None:
    """Why the memory of a process cannot be read here, or None."""
    return None if ROLLUP.exists() else "this system does not tell the memory of a process"


def used_bytes() -> int:
    """The proportional set size of this process."""
    for line in ROLLUP.read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ConfigurationError(f"expected a line with Pss in {ROLLUP}, found none. Run on Linux 4.14 or later")


class PeakMemory:
    """The most memory that this process had while the context was open, beyond what it had before."""

    def __init__(self) -> None:
        self.before = 0
        self.peak = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak memory", daemon=True)

    @property
    def growth(self) -> int:
        return self.peak - self.before

    def take(self) -> int:
        """The growth since the last call; the next begins from what is used now."""
        self._see()
        with self._lock:
            growth, self.peak = self.growth, 0
        return growth

    def __enter__(self) -> Self:
        self.before = self.peak = used_bytes()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._see()

    def _watch(self) -> None:
        while not self._stop.wait(PAUSE_SECONDS):
            self._see()

    def _see(self) -> None:
        # What was read before a call of take() must not be noted after it.
        with self._lock:
            self.peak = max(self.peak, used_bytes())
