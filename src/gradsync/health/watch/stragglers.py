"""Finds what slows all ranks: a rank that all others wait for, or communication. Pure logic; time is an argument.

A rank is a straggler if its own work takes longer than the median of the others' in the same windows:

- by 7.5 % in the median of the last 10 windows (or 20, 40, 80),
- by half of that in four of five of these windows, and
- by more than such medians scatter in this run.

It is no longer one once that is less than a twentieth. A rank that was a straggler only briefly was slowed by an
accident, and this machine may see more of them: from then on twice as many windows are required.

Only reports on the same window are compared: what slows a whole machine for a while, or longer data, shows on all ranks
in the same windows, and cancels out. The scatter is estimated from the windows before, and from how the last windows
lie around their median. Medians of five consecutive windows are used as well as single ones: on a busy machine one
process is slowed for a while, then another, and such windows are not independent samples.

In every window some rank arrives last, waits for nobody, and still waits for communication: the least that any rank
waits is the time communication takes. A slow link slows most collectives for all ranks alike, so that share grows on
all of them while no rank's own work does. It is compared with the run's own past: what is slow for one model is fast
for another.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Generic, TypeVar

__all__ = [
    "FIRST_PAUSE_SECONDS",
    "LENGTHS",
    "OVER",
    "SLOWER",
    "CommunicationDetector",
    "Round",
    "Slowdown",
    "Straggler",
    "StragglerDetector",
    "against_the_others",
]

SLOWER = 0.075
OVER = 0.05
# What a person would not bother about, and the clock of a busy machine cannot tell.
LEAST_SECONDS = 0.5e-3
LEAST_SHARE = 0.02
AS_SLOW = 0.9
# How many windows a decision may rest on. The first finds what is plain within 20 windows, the others what scatters.
LENGTHS = (10, 20, 40, 80)
# What lasted for fewer windows than this multiple of those it was decided on was brief.
BRIEF = 10
FIRST_PAUSE_SECONDS = 60.0


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


# -- whether the last windows stand out -------------------------------------------------------------------------------

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


# -- a slow rank -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that needs ``own`` seconds for its part of a window, where the others need ``others``; with ``is_over``,
    it was one.

    It waits for no other rank: the time ``communication`` that it waits itself is what communication takes.
    """

    member: int
    window: int
    own: float
    others: float
    communication: float
    is_over: bool = False

    @property
    def slower(self) -> float:
        """By what share the rank is slower than the others."""
        return self.own / self.others - 1


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Communication takes ``now`` seconds per window where it took ``before``; if that ``is_over``, no longer."""

    window: int
    now: float
    before: float
    is_over: bool = False


class _Patience:
    """The number of windows that a decision needs at least; doubled each time that what was found was brief."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self._lengths = lengths
        self.windows = lengths[0]

    def was_brief(self, windows: int) -> bool:
        """Note that what was found is over, after that many windows; returns whether that was brief."""
        is_brief = windows < BRIEF * self.windows
        self.windows = min(self._lengths[-1], 2 * self.windows) if is_brief else self._lengths[0]
        return is_brief


Found = TypeVar("Found", Straggler, Slowdown)


class _Warned(Generic[Found]):
    """What was ``found`` and warned about, for the first time in window ``since``.

    It is warned about again after a minute, then two, four and so on.
    """

    def __init__(self, found: Found, now: float) -> None:
        self.found: Found = found
        self.since = found.window
        self._pause = FIRST_PAUSE_SECONDS
        self.due = now + self._pause

    def again(self, current: Found, now: float) -> Found | None:
        # Not of windows that were reported already: training may be over, and the process not.
        if now < self.due or current.window <= self.found.window:
            return None
        self.found = current
        self._pause *= 2
        self.due = now + self._pause
        return current


class StragglerDetector:
    """Finds a rank that all others wait for, in the windows that all ranks have reported to the hub."""

    def __init__(self) -> None:
        self._model, self._window = 0, 0
        # Those in the latest window. A rank without data, or gone, may be in none of the last windows.
        self._present: tuple[int, ...] = ()
        # By what share each was slower than the others, window by window, and the last windows as reported.
        self._slower: dict[int, PaceSeries] = {}
        self._rounds: deque[Round] = deque(maxlen=LENGTHS[-1])
        self._warned: dict[int, _Warned[Straggler]] = {}
        self._patience = _Patience(LENGTHS)
        self._excused = LEAST_SECONDS

    def add(self, window: Round) -> None:
        if window.model != self._model:
            self._model, self._slower, self._warned, self._present = window.model, {}, {}, ()
            self._rounds.clear()
        self._window = window.window
        if len(window.own) < 2:
            return
        self._rounds.append(window)
        self._present = tuple(window.own)
        for member, others in against_the_others(window.own).items():
            if member not in self._slower:
                self._slower[member] = PaceSeries()
            self._slower[member].add(window.own[member] / others - 1)

    def warnings(self, now: float, *, excused: float = 0.0) -> list[Straggler]:
        """The stragglers to warn about now: new ones, and those whose next warning is due.

        No rank is named for up to ``excused`` seconds: communication takes that much more than it did, and collectives
        that gradsync does not know of, which count as a rank's own work, may take that, too.
        """
        self._excused = max(LEAST_SECONDS, excused)
        found = [
            self._again(member, now) if member in self._warned else self._find(member, now) for member in self._present
        ]
        self._present = ()
        return [each for each in found if each is not None]

    def _find(self, member: int, now: float) -> Straggler | None:
        slower = self._slower[member]
        if not slower.is_high(SLOWER / 2):
            return None
        for count in LENGTHS:
            if count >= self._patience.windows and slower.stands_out(count, least=SLOWER):
                found = self._straggler(member, count)
                if self._matters(found, count):
                    self._warned[member] = _Warned(found, now)
                    return found
        return None

    def _matters(self, found: Straggler, count: int) -> bool:
        excess = found.own - found.others
        slowest = max(self._straggler(member, count).own for member in self._present)
        # Nobody waits for one that is slow itself where another one is much slower.
        least = max(self._excused, LEAST_SHARE * (found.own + found.communication))
        return excess >= least and found.own >= AS_SLOW * slowest

    def _straggler(self, member: int, count: int) -> Straggler:
        """A rank's times as a straggler, over its last ``count`` windows."""
        rounds = [each for each in self._rounds if member in each.own][-count:]
        return Straggler(
            member=member,
            window=self._window,
            own=median([each.own[member] for each in rounds]),
            others=median([against_the_others(each.own)[member] for each in rounds]),
            communication=median([each.waited[member] for each in rounds]),
        )

    def _again(self, member: int, now: float) -> Straggler | None:
        warned, slower = self._warned[member], self._slower[member]
        is_over = median(slower.last(self._patience.windows)) < min(OVER, warned.found.slower / 2)
        if not is_over and now < warned.due:
            return None
        current = self._straggler(member, self._patience.windows)
        if not is_over:
            return warned.again(current, now)
        del self._warned[member]
        if not self._patience.was_brief(self._window - warned.since):
            # It was slow, and did not scatter: no measure for what comes.
            del self._slower[member]
        return replace(current, is_over=True)


# -- slow communication ----------------------------------------------------------------------------------------------

# By how much of what it took communication must take longer, and how much of a window that must be.
GROWTH, SHARE = 0.5, 0.10
MUCH = 0.25
COMMUNICATION_LENGTHS = (10, 20, 40)
# Before there is a past to compare with.
LEAST_HISTORY = 20


class CommunicationDetector:
    """Finds communication that has become slow, in the windows that all ranks have reported to the hub."""

    def __init__(self) -> None:
        self._model, self._window = 0, 0
        self._restart()

    def _restart(self) -> None:
        self._times, self._windows = PaceSeries(), PaceSeries()
        self._past: list[float] = []
        # What it takes as a rule, as of some windows ago.
        self._usual, self._until_known = 0.0, LEAST_HISTORY + COMMUNICATION_LENGTHS[0]
        self._warned: _Warned[Slowdown] | None = None
        self._patience = _Patience(COMMUNICATION_LENGTHS)

    def add(self, window: Round) -> None:
        if window.model != self._model:
            self._model = window.model
            self._restart()
        self._window = window.window
        # A rank without data waits for nothing else, and one that is missing may have come last.
        if window.is_whole and window.own:
            self._until_known -= 1
            self._times.add(min(window.waited.values()))
            self._windows.add(max(own + window.waited[member] for member, own in window.own.items()))

    @property
    def is_much(self) -> bool | None:
        """Whether communication takes a good part of the windows; None while that is unknown."""
        if len(self._times) < COMMUNICATION_LENGTHS[0]:
            return None
        count = COMMUNICATION_LENGTHS[0]
        return median(self._times.last(count)) >= MUCH * median(self._windows.last(count))

    @property
    def rise(self) -> float:
        """How many seconds per window communication takes more than it did, whether there was a warning or not."""
        if self._warned is not None:
            return max(0.0, median(self._times.last(BLOCK)) - self._warned.found.before)
        if not self._usual or not self._times.is_high((1 + GROWTH / 2) * self._usual):
            return 0.0
        return max(0.0, median(self._times.last(BLOCK)) - self._usual)

    def warning(self, now: float) -> Slowdown | None:
        """The slowdown to warn about now, if it is new, or due again."""
        if self._warned is not None:
            return self._again(self._warned, now)
        if self._until_known <= 0:
            self._usual, self._until_known = median(self._times.before(COMMUNICATION_LENGTHS[0])), LEAST_HISTORY
        if not self._times.is_high((1 + GROWTH / 2) * self._usual):
            return None
        for count in COMMUNICATION_LENGTHS:
            past = self._times.before(count)
            if len(past) < LEAST_HISTORY:
                return None
            if count < self._patience.windows:
                continue
            before = median(past)
            least = max(GROWTH * before, SHARE * median(self._windows.before(count)), LEAST_SECONDS)
            if self._times.stands_out(count, least=least, above=before):
                self._past, found = past, self._slowdown(count, before)
                self._warned = _Warned(found, now)
                return found
        return None

    def _slowdown(self, count: int, before: float) -> Slowdown:
        return Slowdown(window=self._window, now=median(self._times.last(count)), before=before)

    def _again(self, warned: _Warned[Slowdown], now: float) -> Slowdown | None:
        before, count = warned.found.before, COMMUNICATION_LENGTHS[0]
        current = self._slowdown(count, before)
        if current.now - before >= (warned.found.now - before) / 3:
            return warned.again(current, now)
        self._warned = None
        self._patience.was_brief(self._window - warned.since)
        # The slow windows are no past to compare with.
        self._times = PaceSeries([*self._past, *self._times.last(count)])
        return replace(current, is_over=True)
