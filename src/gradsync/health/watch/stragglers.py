"""Finds stragglers: ranks that all others wait for, window by window. Pure logic, with the time as an argument.

A rank is a straggler if its own work takes longer than the median of the others' in the same windows:

- by 7.5 % in the median of the last 10 windows (or 20, 40, 80),
- by half of that in four of five of these windows, and
- by more than such medians scatter in this run.

It is no longer one once that is less than a twentieth. A rank that was a straggler only for a moment was
slowed by an accident, and this machine may see more of them: from then on twice as many windows are required.
"""

from collections import deque
from dataclasses import dataclass

from gradsync.health.watch.rounds import Round, against_the_others
from gradsync.health.watch.scatter import Series, median

__all__ = ["FIRST_PAUSE_SECONDS", "LENGTHS", "MOMENT", "OVER", "SLOWER", "Straggler", "Stragglers", "Verdict"]

SLOWER = 0.075
OVER = 0.05
# What a person would not bother about, and the clock of a busy machine cannot tell.
LEAST_SECONDS = 0.5e-3
LEAST_SHARE = 0.02
AS_SLOW = 0.9
# Of how many windows a look may be. The first finds what is plain within 20 windows, the others what scatters.
LENGTHS = (10, 20, 40, 80)
# A rank that was a straggler for fewer windows than this multiple of a look was one only for a moment.
MOMENT = 10
FIRST_PAUSE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that needs ``own`` seconds for its part of a window, where the others need ``others``.

    The time it waits itself, ``wire``, is communication time: it waits for no other rank.
    """

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
    """What to report now: that a rank is a straggler or, if ``is_over``, that it was one."""

    straggler: Straggler
    is_over: bool


@dataclass(kw_only=True)
class Naming:
    """A report that named a rank: in which window, when to name it again, and how long after that."""

    named: Straggler
    since: int
    next: float
    pause: float = FIRST_PAUSE_SECONDS


class Stragglers:
    """The hub's view of the windows that all ranks have reported."""

    def __init__(self) -> None:
        self._model, self._window = 0, 0
        # Those of whom something is new. Who stands by for long, or is gone, may be in none of the last windows.
        self._present: tuple[int, ...] = ()
        # By what share each was slower than the others, window by window, and the last windows as they were told of.
        self._slower: dict[int, Series] = {}
        self._rounds: deque[Round] = deque(maxlen=LENGTHS[-1])
        self._named: dict[int, Naming] = {}
        self._shortest, self._excused = LENGTHS[0], LEAST_SECONDS

    def hear(self, told: Round) -> None:
        if told.model != self._model:
            self._model, self._slower, self._named, self._present = told.model, {}, {}, ()
            self._rounds.clear()
        self._window = told.window
        if len(told.own) < 2:
            return
        self._rounds.append(told)
        self._present = tuple(told.own)
        for member, others in against_the_others(told.own).items():
            if member not in self._slower:
                self._slower[member] = Series()
            self._slower[member].add(told.own[member] / others - 1)

    def look(self, now: float, *, excused: float = 0.0) -> list[Verdict]:
        """What is new, or is to be said again: after a minute, two, four and so on.

        Nobody is named for so many seconds as are ``excused``: the wire takes them more than it did, and collectives
        that gradsync does not know of, which count as a rank's own work, may take them as well.
        """
        verdicts = []
        self._excused = max(LEAST_SECONDS, excused)
        for member in self._present:
            naming, slower = self._named.get(member), self._slower[member]
            verdict = self._detector(member, slower, now) if naming is None else self._again(naming, slower, now)
            if verdict is not None:
                verdicts.append(verdict)
        self._present = ()
        return verdicts

    def _detector(self, member: int, slower: Series, now: float) -> Verdict | None:
        if not slower.is_high(SLOWER / 2):
            return None
        for count in LENGTHS:
            if count >= self._shortest and slower.stands_out(count, least=SLOWER):
                found = self._straggler(member, count)
                if self._matters(found, count):
                    self._named[member] = Naming(named=found, since=self._window, next=now + FIRST_PAUSE_SECONDS)
                    return Verdict(straggler=found, is_over=False)
        return None

    def _matters(self, found: Straggler, count: int) -> bool:
        excess = found.own - found.others
        slowest = max(self._straggler(member, count).own for member in self._present)
        # Nobody waits for one that is slow itself where another one is much slower.
        least = max(self._excused, LEAST_SHARE * (found.own + found.wire))
        return excess >= least and found.own >= AS_SLOW * slowest

    def _straggler(self, member: int, count: int) -> Straggler:
        """As it was over its last ``count`` windows."""
        rounds = [told for told in self._rounds if member in told.own][-count:]
        return Straggler(
            member=member,
            window=self._window,
            own=median([told.own[member] for told in rounds]),
            others=median([against_the_others(told.own)[member] for told in rounds]),
            wire=median([told.waited[member] for told in rounds]),
        )

    def _again(self, naming: Naming, slower: Series, now: float) -> Verdict | None:
        named = naming.named
        is_over = median(slower.last(self._shortest)) < min(OVER, named.slower / 2)
        if not is_over and now < naming.next:
            return None
        current = self._straggler(named.member, self._shortest)
        if is_over:
            del self._named[named.member]
            was_a_moment = self._window - naming.since < MOMENT * self._shortest
            self._shortest = min(LENGTHS[-1], 2 * self._shortest) if was_a_moment else LENGTHS[0]
            if not was_a_moment:
                # It was slow, and did not scatter: no measure for what comes.
                del self._slower[named.member]
            return Verdict(straggler=current, is_over=True)
        # Nor is it said again of windows that were spoken of: training may be over, and the process not.
        if current.window <= named.window:
            return None
        naming.named = current
        naming.pause *= 2
        naming.next = now + naming.pause
        return Verdict(straggler=current, is_over=False)
