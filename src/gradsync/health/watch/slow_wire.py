"""Detects that communication has become slow. Pure logic, with the time as an argument.

In every window some rank arrives last, waits for nobody, and still waits for communication: the least that any rank
waits is the time communication takes. A slow link slows most collectives for all ranks alike, so that share grows on
all of them while no rank's own work does. It is compared with the run's own past: what is slow for one model is fast
for another.
"""

from dataclasses import dataclass

from gradsync.health.watch.rounds import Round
from gradsync.health.watch.scatter import BLOCK, Series, median
from gradsync.health.watch.stragglers import FIRST_PAUSE_SECONDS, MOMENT

__all__ = ["SlowWire", "WireVerdict"]

# By how much of what it took the wire must take longer, and how much of a window that must be.
GROWTH, SHARE = 0.5, 0.10
MUCH = 0.25
LEAST_SECONDS = 0.5e-3
LENGTHS = (10, 20, 40)
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
        self._wire, self._wall = Series(), Series()
        self._past: list[float] = []
        # What it takes as a rule, as of some windows ago.
        self._usual, self._until_known = 0.0, LEAST_HISTORY + LENGTHS[0]
        self._named: WireVerdict | None = None
        self._next, self._pause = 0.0, FIRST_PAUSE_SECONDS
        # As of stragglers: what was slow for a moment only makes patient.
        self._since, self._shortest = 0, LENGTHS[0]

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
        if len(self._wire) < LENGTHS[0]:
            return None
        return median(self._wire.last(LENGTHS[0])) >= MUCH * median(self._wall.last(LENGTHS[0]))

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
            self._usual, self._until_known = median(self._wire.before(LENGTHS[0])), LEAST_HISTORY
        if not self._wire.is_high((1 + GROWTH / 2) * self._usual):
            return None
        for count in LENGTHS:
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
        current = self._verdict(LENGTHS[0], named.before, is_over=False)
        if current.now - named.before < (named.now - named.before) / 3:
            self._named = None
            was_a_moment = self._window - self._since < MOMENT * self._shortest
            self._shortest = min(LENGTHS[-1], 2 * self._shortest) if was_a_moment else LENGTHS[0]
            # The slow windows are no past to compare with.
            self._wire = Series([*self._past, *self._wire.last(LENGTHS[0])])
            return self._verdict(LENGTHS[0], named.before, is_over=True)
        if now < self._next or current.window <= named.window:
            return None
        self._named = current
        self._pause *= 2
        self._next = now + self._pause
        return current
