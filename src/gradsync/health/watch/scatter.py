"""Tests whether a series with one number per window has risen, or only scatters. Pure logic.

A run of windows stands out if all of these hold:

- its median does;
- four of five of its windows do, by half as much;
- medians of as many windows do not scatter that far anyway.

The scatter is estimated from the windows before, and from how the run's own windows lie around their median. Medians of
five consecutive windows are used as well as single ones: on a busy machine one process is slowed for a while, then
another, and such windows are not independent samples.
"""

import math
from collections.abc import Sequence

__all__ = ["BLOCK", "KEPT", "Series", "median"]

KEPT = 240
HISTORY = 120
BLOCK = 5
LEAST_BLOCKS = 4
# The median of n numbers scatters by this factor over the square root of n, times the scatter of one number.
MIDDLE_SCATTER = 1.25
# Four fifths of a normal distribution lie within this many standard deviations.
FOUR_FIFTHS = 1.28
# This many standard deviations are not chance, in a run of a million windows.
SURE = 5.0


def median(values: Sequence[float]) -> float:
    """The median. Quicker than that of ``statistics``."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class Series:
    """The most recent values, one number per window."""

    def __init__(self, values: Sequence[float] = ()) -> None:
        self._values = list(values)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        self._values.append(value)
        if len(self._values) >= 2 * KEPT:
            del self._values[:KEPT]

    def last(self, count: int) -> list[float]:
        return self._values[-count:]

    def before(self, count: int) -> list[float]:
        """Those before the last ``count``."""
        return self._values[-(count + HISTORY) : -count]

    def is_high(self, limit: float) -> bool:
        """Whether most of the last few lie above that: else no more than this is looked at, which costs next to
        nothing."""
        return sum(each > limit for each in self._values[-BLOCK:]) > BLOCK // 2

    def stands_out(self, count: int, *, least: float, above: float = 0.0) -> bool:
        """Whether the last ``count`` lie ``above`` that by ``least``, and by more than they scatter."""
        if len(self._values) < count:
            return False
        ordered = sorted(self._values[-count:])
        rise = median(ordered) - above
        if rise < least or ordered[count // 5] - above < least / 2:
            return False
        return rise >= SURE * MIDDLE_SCATTER * self._scatter(count) / math.sqrt(count)

    def _scatter(self, count: int) -> float:
        """The standard deviation of one window, as if they were independent."""
        now, before = self.last(count), self.before(count)
        typical = median(now)
        distances = [abs(each - typical) for each in now]
        blocks: list[float] = []
        if before:
            usual = median(before)
            distances += [abs(each - usual) for each in before]
            parts = (before[start : start + BLOCK] for start in range(len(before) % BLOCK, len(before), BLOCK))
            blocks = [abs(median(part) - usual) for part in parts]
        scatter = _deviation(distances)
        if len(blocks) >= LEAST_BLOCKS:
            scatter = max(scatter, _deviation(blocks) * math.sqrt(BLOCK) / MIDDLE_SCATTER)
        return scatter


def _deviation(distances: Sequence[float]) -> float:
    """The standard deviation, from the distances to the median: one value in five may be any outlier."""
    ordered = sorted(distances)
    return ordered[min(len(ordered) - 1, len(ordered) * 4 // 5)] / FOUR_FIFTHS
