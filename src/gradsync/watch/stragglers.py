"""Which ranks all others wait for, window by window. Pure logic, with the time as an argument.

A rank is a straggler if its own work takes longer than the median of the others' in the same windows: in the middle of
the last ten (or 20, 40, 80) by 7.5 %, in four of five of them by half of that, and by more than such middles scatter in
this run. It is one no more when that is less than a twentieth. Whoever was one for a moment only was slowed by an
accident, of which this machine may see more: from then on twice as many windows are wanted.
"""

from dataclasses import dataclass

from gradsync.watch.rounds import Round, against_the_others
from gradsync.watch.scatter import Series, middle

__all__ = ["FIRST_PAUSE_SECONDS", "LENGTHS", "OVER", "SLOWER", "Straggler", "Stragglers", "Verdict"]

SLOWER = 0.075
OVER = 0.05
# What a person would not bother about, and the clock of a busy machine cannot tell.
LEAST_SECONDS = 0.5e-3
LEAST_SHARE = 0.02
AS_SLOW = 0.9
# Of how many windows a look may be. The first finds what is plain within 20 windows, the others what scatters.
LENGTHS = (10, 20, 40, 80)
# Who was a straggler for fewer windows than so many times a look was it for a moment.
MOMENT = 10
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


class Record:
    """What is known of one rank: by what share it was slower than the others, and seconds."""

    def __init__(self) -> None:
        self.slower, self.own, self.others, self.waited = Series(), Series(), Series(), Series()

    def straggler(self, member: int, window: int, count: int) -> Straggler:
        """Over the last ``count`` windows."""
        own, others, wire = (middle(each.last(count)) for each in (self.own, self.others, self.waited))
        return Straggler(member=member, window=window, own=own, others=others, wire=wire)


@dataclass(kw_only=True)
class Naming:
    """That a rank was named, with the window it was; when it is named again, and how long after that."""

    named: Straggler
    since: int
    next: float
    pause: float = FIRST_PAUSE_SECONDS


class Stragglers:
    """What the hub thinks of the windows that all ranks have told of."""

    def __init__(self) -> None:
        self._model, self._window = 0, 0
        self._records: dict[int, Record] = {}
        self._named: dict[int, Naming] = {}
        self._shortest = LENGTHS[0]

    def hear(self, told: Round) -> None:
        if told.model != self._model:
            self._model, self._records, self._named = told.model, {}, {}
        self._window = told.window
        if len(told.own) < 2:
            return
        for member, others in against_the_others(told.own).items():
            record = self._records.setdefault(member, Record())
            own = told.own[member]
            record.slower.add(own / others - 1)
            record.own.add(own)
            record.others.add(others)
            record.waited.add(told.waited[member])

    def look(self, now: float) -> list[Verdict]:
        """What is new, or is to be said again: after a minute, two, four and so on."""
        verdicts = []
        for member, record in list(self._records.items()):
            naming = self._named.get(member)
            verdict = self._judge(member, record, now) if naming is None else self._again(naming, record, now)
            if verdict is not None:
                verdicts.append(verdict)
        return verdicts

    def _judge(self, member: int, record: Record, now: float) -> Verdict | None:
        for count in LENGTHS:
            if count >= self._shortest and record.slower.stands_out(count, least=SLOWER):
                found = record.straggler(member, self._window, count)
                if self._matters(found, count):
                    self._named[member] = Naming(named=found, since=self._window, next=now + FIRST_PAUSE_SECONDS)
                    return Verdict(straggler=found, is_over=False)
        return None

    def _matters(self, found: Straggler, count: int) -> bool:
        excess = found.own - found.others
        slowest = max(middle(record.own.last(count)) for record in self._records.values())
        # Nobody waits for one that is slow itself where another one is much slower.
        return excess >= max(LEAST_SECONDS, LEAST_SHARE * (found.own + found.wire)) and found.own >= AS_SLOW * slowest

    def _again(self, naming: Naming, record: Record, now: float) -> Verdict | None:
        named = naming.named
        current = record.straggler(named.member, self._window, self._shortest)
        if middle(record.slower.last(self._shortest)) < min(OVER, named.slower / 2):
            del self._named[named.member]
            was_a_moment = self._window - naming.since < MOMENT * self._shortest
            self._shortest = min(LENGTHS[-1], 2 * self._shortest) if was_a_moment else LENGTHS[0]
            if not was_a_moment:
                # It was slow, and did not scatter: no measure for what comes.
                del self._records[named.member]
            return Verdict(straggler=current, is_over=True)
        # Nor is it said again of windows that were spoken of: training may be over, and the process not.
        if now < naming.next or current.window <= named.window:
            return None
        naming.named = current
        naming.pause *= 2
        naming.next = now + naming.pause
        return Verdict(straggler=current, is_over=False)
