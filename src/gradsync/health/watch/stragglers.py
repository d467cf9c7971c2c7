"""Finds what slows all ranks: a rank that all others wait for, or communication. Pure logic; time is an argument.

A rank is a straggler if its own work takes longer than the median of the others' in the same windows:

- by 7.5 % in the median of the last 10 windows (or 20, 40, 80),
- by half of that in four of five of these windows, and
- by more than such medians scatter in this run.

It is no longer one once that is less than a twentieth. A rank that was a straggler only for a moment was
slowed by an accident, and this machine may see more of them: from then on twice as many windows are required.

In every window some rank arrives last, waits for nobody, and still waits for communication: the least that any rank
waits is the time communication takes. A slow link slows most collectives for all ranks alike, so that share grows on
all of them while no rank's own work does. It is compared with the run's own past: what is slow for one model is fast
for another.
"""

from collections import deque
from dataclasses import dataclass

from gradsync.health.watch.rounds import BLOCK, PaceSeries, Round, against_the_others, median

__all__ = [
    "FIRST_PAUSE_SECONDS",
    "LENGTHS",
    "MOMENT",
    "OVER",
    "SLOWER",
    "SlowWire",
    "Straggler",
    "Stragglers",
    "Verdict",
    "WireVerdict",
]

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
        self._slower: dict[int, PaceSeries] = {}
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
                self._slower[member] = PaceSeries()
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

    def _detector(self, member: int, slower: PaceSeries, now: float) -> Verdict | None:
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

    def _again(self, naming: Naming, slower: PaceSeries, now: float) -> Verdict | None:
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


# By how much of what it took the wire must take longer, and how much of a window that must be.
GROWTH, SHARE = 0.5, 0.10
MUCH = 0.25
WIRE_LENGTHS = (10, 20, 40)
# Before there is a past to compare with.
LEAST_HISTORY = 20


@dataclass(frozen=True, kw_only=True)
class WireVerdict:
    """Communication takes ``now`` seconds per window where it took ``before``; if that ``is_over``, no longer."""

    window: int
    now: float
    before: float
    is_over: bool


class SlowWire:
    """The hub's view of communication time, from the windows that all ranks have reported."""

    def __init__(self) -> None:
        self._model, self._window = 0, 0
        self._restart()

    def _restart(self) -> None:
        self._wire, self._wall = PaceSeries(), PaceSeries()
        self._past: list[float] = []
        # What it takes as a rule, as of some windows ago.
        self._usual, self._until_known = 0.0, LEAST_HISTORY + WIRE_LENGTHS[0]
        self._named: WireVerdict | None = None
        self._next, self._pause = 0.0, FIRST_PAUSE_SECONDS
        # As of stragglers: what was slow for a moment only makes patient.
        self._since, self._shortest = 0, WIRE_LENGTHS[0]

    def hear(self, told: Round) -> None:
        if told.model != self._model:
            self._model = told.model
            self._restart()
        self._window = told.window
        # One that stands by waits for nothing else, and one that nobody knows of may have come last.
        if told.is_whole and told.own:
            self._until_known -= 1
            self._wire.add(min(told.waited.values()))
            self._wall.add(max(own + told.waited[member] for member, own in told.own.items()))

    @property
    def is_much(self) -> bool | None:
        """Whether windows are spent waiting for it, to a good part; None while nobody knows."""
        if len(self._wire) < WIRE_LENGTHS[0]:
            return None
        return median(self._wire.last(WIRE_LENGTHS[0])) >= MUCH * median(self._wall.last(WIRE_LENGTHS[0]))

    @property
    def rise(self) -> float:
        """How many seconds a window it takes more now than it did, whether that was said already or not."""
        if self._named is not None:
            return max(0.0, median(self._wire.last(BLOCK)) - self._named.before)
        if not self._usual or not self._wire.is_high((1 + GROWTH / 2) * self._usual):
            return 0.0
        return max(0.0, median(self._wire.last(BLOCK)) - self._usual)

    def look(self, now: float) -> WireVerdict | None:
        """What is new, or is to be said again: after a minute, two, four and so on."""
        if self._named is not None:
            return self._again(self._named, now)
        if self._until_known <= 0:
            self._usual, self._until_known = median(self._wire.before(WIRE_LENGTHS[0])), LEAST_HISTORY
        if not self._wire.is_high((1 + GROWTH / 2) * self._usual):
            return None
        for count in WIRE_LENGTHS:
            past = self._wire.before(count)
            if len(past) < LEAST_HISTORY:
                return None
            if count < self._shortest:
                continue
            before = median(past)
            if self._wire.stands_out(count, least=self._least(before, count), above=before):
                self._past, self._since = past, self._window
                self._named = self._verdict(count, before, is_over=False)
                self._pause = FIRST_PAUSE_SECONDS
                self._next = now + self._pause
                return self._named
        return None

    def _least(self, before: float, count: int) -> float:
        return max(GROWTH * before, SHARE * median(self._wall.before(count)), LEAST_SECONDS)

    def _verdict(self, count: int, before: float, *, is_over: bool) -> WireVerdict:
        return WireVerdict(window=self._window, now=median(self._wire.last(count)), before=before, is_over=is_over)

    def _again(self, named: WireVerdict, now: float) -> WireVerdict | None:
        current = self._verdict(WIRE_LENGTHS[0], named.before, is_over=False)
        if current.now - named.before < (named.now - named.before) / 3:
            self._named = None
            was_a_moment = self._window - self._since < MOMENT * self._shortest
            self._shortest = min(WIRE_LENGTHS[-1], 2 * self._shortest) if was_a_moment else WIRE_LENGTHS[0]
            # The slow windows are no past to compare with.
            self._wire = PaceSeries([*self._past, *self._wire.last(WIRE_LENGTHS[0])])
            return self._verdict(WIRE_LENGTHS[0], named.before, is_over=True)
        if now < self._next or current.window <= named.window:
            return None
        self._named = current
        self._pause *= 2
        self._next = now + self._pause
        return current
