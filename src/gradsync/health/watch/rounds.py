"""Collects the ranks' reports on the same window, and tests whether such a series has risen. Pure logic.

Ranks report their windows at different moments; only reports on the same window are compared. If a whole machine
is slower for a while, or all data is longer, that shows on all ranks in the same windows, and cancels out.

In a series with one number per window, a run of windows stands out if all of these hold:

- its median does;
- four of five of its windows do, by half as much;
- medians of as many windows do not scatter that far anyway.

The scatter is estimated from the windows before, and from how the run's own windows lie around their median. Medians of
five consecutive windows are used as well as single ones: on a busy machine one process is slowed for a while, then
another, and such windows are not independent samples.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradsync.health.watch.pace_meter import Pace

__all__ = ["BLOCK", "KEPT", "PaceSeries", "Round", "Rounds", "against_the_others", "median"]

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
    """The median of the values, computed faster than by ``statistics``."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class PaceSeries:
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
        """The values before the last ``count``."""
        return self._values[-(count + HISTORY) : -count]

    def is_high(self, limit: float) -> bool:
        """Whether most of the last few values lie above ``limit``: a quick check before the costly ones."""
        return sum(each > limit for each in self._values[-BLOCK:]) > BLOCK // 2

    def stands_out(self, count: int, *, least: float, above: float = 0.0) -> bool:
        """Whether the last ``count`` values exceed ``above`` by ``least``, and by more than they scatter."""
        if len(self._values) < count:
            return False
        ordered = sorted(self._values[-count:])
        rise = median(ordered) - above
        if rise < least or ordered[count // 5] - above < least / 2:
            return False
        return rise >= SURE * MIDDLE_SCATTER * self._scatter(count) / math.sqrt(count)

    def _scatter(self, count: int) -> float:
        """The standard deviation of one window's value, as if windows were independent."""
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
    """The standard deviation, by the distances to the median: one value in five may be any outlier."""
    ordered = sorted(distances)
    return ordered[min(len(ordered) - 1, len(ordered) * 4 // 5)] / FOUR_FIFTHS


# Windows that some rank has not reported yet. A rank that is further behind no longer reports older ones.
MOST_OPEN = 256


@dataclass(frozen=True, kw_only=True)
class Round:
    """The times of one window of the model of that number: seconds of ``own`` work and of waiting, by member.

    A rank that only stood by is in neither; ``is_whole`` if there was none.
    """

    model: int
    window: int
    own: Mapping[int, float]
    waited: Mapping[int, float]
    is_whole: bool = True


class Rounds:
    """Collects the reports of ``members`` ranks into rounds."""

    def __init__(self, members: int) -> None:
        self.members = set(range(members))
        self._model = 0
        self._open: dict[int, dict[int, tuple[float, float]]] = {}
        self._done = 0

    def add(self, member: int, pace: Pace) -> Iterator[Round]:
        """Add a report, and return the windows that all ranks have reported now, in their order."""
        if not pace.own or pace.model < self._model or member not in self.members:
            return
        if pace.model > self._model:
            # The first model is gone: all ranks come to the next one.
            self._model, self._open, self._done = pace.model, {}, 0
        first = pace.last - len(pace.own) + 1
        for window, times in enumerate(zip(pace.own, pace.waited, strict=True), first):
            if window <= self._done:
                continue
            reports = self._open.setdefault(window, {})
            reports[member] = times
            if len(reports) == len(self.members):
                yield self._close(window)
        while len(self._open) > MOST_OPEN:
            del self._open[min(self._open)]

    def forget(self, member: int) -> None:
        """Forget a rank that will report no more windows."""
        self.members.discard(member)
        self._open = {}

    def _close(self, window: int) -> Round:
        reports = self._open.pop(window)
        self._done = window
        for missed in [number for number in self._open if number < window]:
            del self._open[missed]
        worked = {member: times for member, times in sorted(reports.items()) if times[0] > 0}
        return Round(
            model=self._model,
            window=window,
            own={member: own for member, (own, _) in worked.items()},
            waited={member: waited for member, (_, waited) in worked.items()},
            is_whole=len(worked) == len(self.members),
        )


def against_the_others(own: Mapping[int, float]) -> dict[int, float]:
    """For each member the median of the others' own times. Sorted once: there may be hundreds."""
    members = sorted(own, key=own.__getitem__)
    ordered = [own[member] for member in members]
    half = (len(ordered) - 1) // 2

    def other(place: int, index: int) -> float:
        return ordered[index + (index >= place)]

    if len(ordered) % 2 == 0:
        return {member: other(place, half) for place, member in enumerate(members)}
    return {member: (other(place, half - 1) + other(place, half)) / 2 for place, member in enumerate(members)}
