"""When a rank tells of its windows, and what the hub says of them.

A beat a second would be 50 windows of 20 ms late. Windows are therefore told of as they come, five at a time, in a few
bytes, without the rest of a beat. Nobody on the path of backward does anything for that: the thread of the watch looks
as often as windows are long, within limits, and finds what has come.
"""

from collections.abc import Sequence

from gradsync.watch.pace import Pace, PaceMeter
from gradsync.watch.rounds import Rounds
from gradsync.watch.slow_wire import SlowWire
from gradsync.watch.stragglers import Stragglers
from gradsync.watch.words import Member, slow_wire, straggling

__all__ = ["PaceJudge", "PaceTeller"]

WINDOWS_AT_A_TIME = 5
SHORTEST_SECONDS, LONGEST_SECONDS = 0.05, 0.25
# What the hub hears in a second, of all ranks together.
MOST_TOLD = 500


class PaceTeller:
    """Of one rank of ``members`` many."""

    def __init__(self, members: int) -> None:
        self._shortest = max(SHORTEST_SECONDS, members / MOST_TOLD)
        self._told = (0, 0)
        # When it is to be asked next.
        self.next = 0.0

    def tell(self, meter: tuple[int, PaceMeter] | None, now: float) -> Pace | None:
        """The windows that are new, of the model of that number."""
        number, measured = meter or (0, None)
        seconds = LONGEST_SECONDS if measured is None else WINDOWS_AT_A_TIME * measured.seconds
        self.next = now + max(self._shortest, min(LONGEST_SECONDS, seconds))
        if measured is None or self._told == (number, measured.count):
            return None
        pace = measured.since(self._told[1] if self._told[0] == number else 0, model=number)
        if not pace.own:
            return None
        self._told = number, pace.last
        return pace


class PaceJudge:
    """What the hub makes of it."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._rounds = Rounds(len(members))
        self._stragglers, self._wire = Stragglers(), SlowWire()

    def hear(self, member: int, pace: Pace, now: float) -> list[str]:
        """What is to be said of it."""
        is_new = False
        for told in self._rounds.hear(member, pace):
            self._stragglers.hear(told)
            self._wire.hear(told)
            is_new = True
        if not is_new:
            return []
        said = [straggling(self._members, verdict) for verdict in self._stragglers.look(now)]
        wire = self._wire.look(now)
        return said if wire is None else [*said, slow_wire(wire)]

    def forget(self, member: int) -> None:
        self._rounds.forget(member)
