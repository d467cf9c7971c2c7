"""Which rank all others wait for, step by step. Pure logic, with the time as an argument.

A rank is a straggler if its own work takes a tenth longer than the median of the others', and longer than the times of
ranks scatter anyway, in two looks at different windows; in one look, if it takes a quarter longer. It is one no more
when that is less than a twentieth.
"""

import statistics
from dataclasses import dataclass

from gradsync.watch.pace import Pace

__all__ = ["Straggler", "Stragglers", "Verdict"]

SLOWER, MUCH_SLOWER = 0.10, 0.25
OVER = 0.05
# Times the median distance from the median: what lies farther is no accident.
SCATTER = 3.0
# What a person would not bother about, and the clock of a busy machine cannot tell.
LEAST_SECONDS = 0.5e-3
LOOKS = 2
FIRST_PAUSE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that needs ``own`` seconds for its part of a window, where the others need ``others``. What it waits
    itself, ``wire``, is what the wire takes: nobody is waited for there."""

    member: int
    window: int
    own: float
    others: float
    wire: float

    @property
    def slower(self) -> float:
        """By what share."""
        return self.own / self.others - 1


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is to be said now: that a rank is a straggler, or ``is_over``: that it was one."""

    straggler: Straggler
    is_over: bool


class Stragglers:
    """What the hub thinks of the paces it has heard."""

    def __init__(self) -> None:
        self._paces: dict[int, Pace] = {}
        self._suspect: tuple[int, int, int] | None = None
        self._named: Straggler | None = None
        self._next, self._pause = 0.0, FIRST_PAUSE_SECONDS

    def hear(self, member: int, pace: Pace) -> None:
        self._paces[member] = pace

    def forget(self, member: int) -> None:
        self._paces.pop(member, None)
        self._suspect = self._named = None

    def look(self, now: float) -> Verdict | None:
        """What is new, or is to be said again: after a minute, two, four and so on."""
        slowest = self._slowest()
        if self._named is not None:
            return self._look_again(self._named, slowest, now)
        if slowest is None or not self._is_slow(slowest):
            self._suspect = None
            return None
        member, window, looks = self._suspect or (slowest.member, -1, 0)
        if member != slowest.member:
            window, looks = -1, 0
        # The same windows tell nothing new.
        looks += slowest.window > window
        self._suspect = slowest.member, slowest.window, looks
        if looks < LOOKS and slowest.slower < MUCH_SLOWER:
            return None
        self._named, self._suspect = slowest, None
        self._pause = FIRST_PAUSE_SECONDS
        self._next = now + self._pause
        return Verdict(straggler=slowest, is_over=False)

    def _look_again(self, named: Straggler, slowest: Straggler | None, now: float) -> Verdict | None:
        current = self._of(named.member)
        if current is None:
            return None
        if current.slower < OVER or (slowest is not None and slowest.member != named.member):
            self._named = None
            return Verdict(straggler=current, is_over=True)
        # Nor is it said again of windows that were spoken of: training may be over, and the process not.
        if now < self._next or current.window <= named.window:
            return None
        self._named = current
        self._pause *= 2
        self._next = now + self._pause
        return Verdict(straggler=current, is_over=False)

    def _slowest(self) -> Straggler | None:
        known = [member for member, pace in self._paces.items() if pace.is_known]
        if len(known) < max(2, len(self._paces)):
            return None
        return self._of(max(known, key=lambda member: self._paces[member].own))

    def _of(self, member: int) -> Straggler | None:
        others = [pace.own for number, pace in self._paces.items() if number != member and pace.is_known]
        pace = self._paces.get(member)
        if pace is None or not pace.is_known or not others:
            return None
        return Straggler(
            member=member, window=pace.window, own=pace.own, others=statistics.median(others), wire=pace.waited
        )

    def _is_slow(self, slowest: Straggler) -> bool:
        excess = slowest.own - slowest.others
        scatter = statistics.median(pace.spread for pace in self._paces.values())
        return slowest.slower >= SLOWER and excess >= max(LEAST_SECONDS, SCATTER * scatter)
