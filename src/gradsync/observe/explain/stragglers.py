"""Which rank the others wait for: the single verdict on slow ranks, used by both the text and the advice.

It is based on waiting alone, as measured by :mod:`split`: every wait is for the rank that started the last bucket last.
A rank is a straggler if

- the others wait for it: at least :data:`SLOW` of a step, and longer than their clocks may differ;
- it waits less itself than the median of the others, by the same amount, and by :data:`CERTAIN` standard errors.

The second condition rules out ranks that take turns at being last. A rank that waits less than others has worked
longer, so its time in each phase only says where it was late, not which rank was.
"""

import math
import statistics
from dataclasses import dataclass
from typing import Any

from gradsync.observe.charts.numbers import duration
from gradsync.observe.explain.evidence import missing_evidence
from gradsync.observe.explain.merging import Timeline
from gradsync.observe.explain.split import Split

__all__ = ["SLOW", "Straggler", "find_stragglers"]

# A rank is slow if that costs the others more than this share of the step: less is what ranks differ by on any machine.
SLOW = 0.03
# As sure as one can be of a mean of few steps: a normal distribution is beyond it once in 700 times.
CERTAIN = 3.0
# A phase is named if it makes at least this share of the others' waiting.
NAMED = 0.1
PHASES = ("data", "loop", "forward", "backward", "optimizer", "other")
NAMES = {"loop": "the loop's own code", "other": "what precedes the optimizer's step"}


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """``waited`` are seconds of a step that each of the others waits for this rank, ``last`` is the share of steps in
    which it came last. ``phases`` are those in which it takes longer than the median of the others: its seconds, and
    theirs."""

    rank: int
    waited: float
    last: float
    phases: dict[str, tuple[float, float]]

    def __str__(self) -> str:
        return (
            f"the others wait {duration(self.waited)} of a step for rank {self.rank}, which comes last in "
            f"{self.last:.0%} of the steps"
        )

    @property
    def cause(self) -> str:
        """What it is slower in."""
        who = f"the others, who wait {duration(self.waited)} of a step for it"
        if not self.phases:
            return f"rank {self.rank} comes later than {who}, though no phase takes it longer"
        words = " and ".join(
            f"{own / usual - 1:.0%} slower in {NAMES.get(phase, phase)} ({duration(own)} against {duration(usual)})"
            if usual > own / 20
            else f"{duration(own - usual)} slower in {NAMES.get(phase, phase)} (against {duration(usual)})"
            for phase, (own, usual) in self.phases.items()
        )
        return f"rank {self.rank} is {words} than {who}"

    @property
    def remedy(self) -> str:
        """What to look at."""
        rank, phases = self.rank, set(self.phases)
        if phases == {"data"}:
            return f"look at what rank {rank} reads, and where from: its loader is slower than those of the others"
        if phases >= {"forward", "backward"}:
            return (
                f"look at the machine of rank {rank}: other work, fewer cores, a slower clock; or give it smaller "
                "batches"
            )
        where = " and ".join(NAMES.get(phase, phase) for phase in self.phases) or "its threads"
        return f"look at what rank {rank} does in {where} that others do not, with a profiler there"


def find_stragglers(timeline: Timeline, split: Split) -> tuple[Straggler, ...]:
    """Those for whom the others wait most come first; none without enough evidence."""
    if len(split.ranks) < 2 or missing_evidence(timeline, split):
        return ()
    apart = max(each.header.clock.error or 0.0 for each in timeline.recordings)
    least = max(SLOW * split.mean.step, 2 * apart)
    found = []
    for rank in split.ranks:
        # Over the others: nobody waits for itself.
        waited = split.waited_for.get(rank, 0.0) * len(split.ranks) / (len(split.ranks) - 1)
        ahead = _waits_less(split, rank)
        error = statistics.stdev(ahead) / math.sqrt(len(ahead))
        if waited >= least and statistics.fmean(ahead) >= max(least, CERTAIN * error):
            last = split.was_last.get(rank, 0.0)
            phases = _slower(split, rank, max(SLOW * split.mean.step, NAMED * waited))
            found.append(Straggler(rank=rank, waited=waited, last=last, phases=phases))
    return tuple(sorted(found, key=lambda each: -each.waited))


def _waits_less(split: Split, rank: int) -> list[float]:
    """Step by step, by how many seconds it waits less than the median of the others."""
    others = [waits for other, waits in split.waits.items() if other != rank]
    return [
        statistics.median(theirs) - own
        for own, theirs in zip(split.waits[rank], zip(*others, strict=True), strict=True)
    ]


def _slower(split: Split, rank: int, least: float) -> dict[str, tuple[float, float]]:
    """Phases that take it so much longer; or the one that does most, where all are less."""
    slower: dict[str, tuple[float, float]] = {}
    for phase in PHASES:
        others: list[Any] = [getattr(parts, phase) for other, parts in split.ranks.items() if other != rank]
        slower[phase] = getattr(split.ranks[rank], phase), statistics.median(others)
    most = max(slower, key=lambda phase: slower[phase][0] - slower[phase][1])
    return {
        phase: (own, usual)
        for phase, (own, usual) in slower.items()
        if own - usual > least or (phase == most and own > usual)
    }
