"""Collects the ranks' reports on the same window. Pure logic.

Ranks report their windows when they get round to it; only reports on the same window are compared. If a whole machine
is slower for a while, or all data is longer, that shows on all ranks in the same windows, and cancels out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gradsync.health.watch.pace import Pace

__all__ = ["Round", "Rounds", "against_the_others"]

# Windows that some rank has not reported yet. A rank that is further behind no longer reports older ones.
MOST_OPEN = 256


@dataclass(frozen=True, kw_only=True)
class Round:
    """One window of the model of that number: seconds of ``own`` work and of waiting, by member.

    A rank that only stood by is in neither; ``is_whole`` if there was none.
    """

    model: int
    window: int
    own: Mapping[int, float]
    waited: Mapping[int, float]
    is_whole: bool = True


class Rounds:
    """Collects the reports of ``members`` ranks."""

    def __init__(self, members: int) -> None:
        self.members = set(range(members))
        self._model = 0
        self._open: dict[int, dict[int, tuple[float, float]]] = {}
        self._done = 0

    def hear(self, member: int, pace: Pace) -> Iterator[Round]:
        """The windows of which all have told now, in their order."""
        if not pace.own or pace.model < self._model or member not in self.members:
            return
        if pace.model > self._model:
            # The first model is gone: all ranks come to the next one.
            self._model, self._open, self._done = pace.model, {}, 0
        first = pace.last - len(pace.own) + 1
        for window, times in enumerate(zip(pace.own, pace.waited, strict=True), first):
            if window <= self._done:
                continue
            told = self._open.setdefault(window, {})
            told[member] = times
            if len(told) == len(self.members):
                yield self._close(window)
        while len(self._open) > MOST_OPEN:
            del self._open[min(self._open)]

    def forget(self, member: int) -> None:
        """It will not tell any more."""
        self.members.discard(member)
        self._open = {}

    def _close(self, window: int) -> Round:
        told = self._open.pop(window)
        self._done = window
        for missed in [number for number in self._open if number < window]:
            del self._open[missed]
        worked = {member: times for member, times in sorted(told.items()) if times[0] > 0}
        return Round(
            model=self._model,
            window=window,
            own={member: own for member, (own, _) in worked.items()},
            waited={member: waited for member, (_, waited) in worked.items()},
            is_whole=len(worked) == len(self.members),
        )


def against_the_others(own: Mapping[int, float]) -> dict[int, float]:
    """For each member the median of the others'. Sorted once: there may be hundreds."""
    members = sorted(own, key=own.__getitem__)
    ordered = [own[member] for member in members]
    half = (len(ordered) - 1) // 2

    def other(place: int, index: int) -> float:
        return ordered[index + (index >= place)]

    if len(ordered) % 2 == 0:
        return {member: other(place, half) for place, member in enumerate(members)}
    return {member: (other(place, half - 1) + other(place, half)) / 2 for place, member in enumerate(members)}
