"""Where the time of a step went, rank by rank and on average, and which rank the others wait for.

The parts of a step add up to it. The verdict on slow ranks is the only one, used by both the text and the advice. It is
based on waiting alone: every wait is for the rank that started the last bucket last. A rank is slow if

- the others wait for it: at least :data:`SLOW` of a step, and longer than their clocks may differ;
- it waits less itself than the median of the others, by the same amount, and by :data:`CERTAIN` standard errors.

The second condition rules out ranks that take turns at being last. A rank that waits less than others has worked
longer, so its time in each phase only says where it was late, not which rank was.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from gradsync.observe.charts.numbers import count, duration
from gradsync.observe.explain.merging import WARM_UP, MergedCollective, MergedRecording, MergedStep
from gradsync.observe.recording.files import Synchronization

__all__ = [
    *("FEWEST_STEPS", "PARTS", "SHORTEST_STEP", "SLOW", "BucketSplit", "Parts", "SlowRank", "Split"),
    *("find_stragglers", "missing_evidence", "split", "step_parts"),
]

# Of two ranks that are equally fast one comes last in all of n steps with a chance of 2 · 2⁻ⁿ: below a hundredth from
# eight on.
FEWEST_STEPS = 8
# Marks take about a microsecond each, some dozens a step, and threads wake up tens of microseconds late. Of a step of a
# millisecond that is 2 %, from which on a gain is worth a line.
SHORTEST_STEP = 1e-3
# A rank is slow if that costs the others more than this share of the step: less is what ranks differ by on any machine.
SLOW = 0.03
# As sure as one can be of a mean of few steps: a normal distribution is beyond it once in 700 times.
CERTAIN = 3.0
# A phase is named if it makes at least this share of the others' waiting.
NAMED = 0.1
PHASES = ("data", "loop", "forward", "backward", "optimizer", "other")
NAMES = {"loop": "the loop's own code", "other": "what precedes the optimizer's step"}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The seconds of a step, by what they were spent on. All but ``hidden`` add up to it.

    data
        the loop waits for its loader
    loop
        code of the loop's own, between an optimizer's step, or a micro-batch, and the next forward
    waiting
        for the rank that started a bucket last, after this one's backward had ended
    turn
        all had come, and the last bucket waited for its turn: the link was busy with those before it
    exposed
        the link carried the last bucket, or parameters that a forward waited for, and this rank had nothing to compute
    hidden
        the link carried something while this rank computed
    """

    data: float = 0.0
    loop: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    waiting: float = 0.0
    turn: float = 0.0
    exposed: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0
    hidden: float = 0.0

    @property
    def step(self) -> float:
        return sum(float(getattr(self, name)) for name in PARTS)

    @property
    def compute(self) -> float:
        return self.forward + self.backward


PARTS = tuple(field.name for field in fields(Parts) if field.name != "hidden")


@dataclass(frozen=True, kw_only=True)
class BucketSplit:
    """One bucket of the layout, on average. ``ready`` and ``start`` are seconds after its backward began, ``seconds``
    how long the link was busy with it, ``hidden`` how much of that the mean rank computed, ``last`` who started it last
    how often."""

    index: int
    nbytes: int
    parameters: tuple[str, ...]
    ready: float
    start: float
    seconds: float
    hidden: float
    last: dict[int, int]


@dataclass(frozen=True, kw_only=True)
class Split:
    """A split of the step: ``ranks`` are the parts of each rank, ``mean`` their mean. ``waited_for`` is how many
    seconds per step ranks wait for each, on average; ``was_last`` the share of steps in which it came last to a
    synchronization; ``waits`` how long each rank itself waited for another, step by step."""

    mean: Parts
    ranks: dict[int, Parts]
    waited_for: dict[int, float]
    was_last: dict[int, float]
    waits: dict[int, tuple[float, ...]]
    buckets: tuple[BucketSplit, ...]
    micro_batches: float
    synchronizations: float
    collectives: float


def split(timeline: MergedRecording) -> Split:
    """The split of the mean step."""
    each_rank: list[list[Parts]] = [[] for _ in timeline.members]
    waited_for: defaultdict[int, float] = defaultdict(float)
    last: Counter[int] = Counter()
    for step in timeline.steps:
        for place, parts in enumerate(each_rank):
            parts.append(_parts(step, place, waited_for))
        if len(timeline.members) > 1:
            # A step may have several synchronizations, each with a last rank of its own.
            last.update({each[-1].last for each in step.collectives if each})
    count, size = len(timeline.steps), len(timeline.members)
    ranks = {rank: _mean(parts) for rank, parts in zip(timeline.members, each_rank, strict=True)}
    steps = [step for merged in timeline.steps for step in merged.ranks]
    return Split(
        mean=_mean(ranks.values()),
        ranks=ranks,
        waited_for={timeline.members[place]: seconds / count / size for place, seconds in waited_for.items()},
        was_last={timeline.members[place]: times / count for place, times in last.items()},
        waits=dict(zip(timeline.members, (tuple(part.waiting for part in parts) for parts in each_rank), strict=True)),
        buckets=tuple(_buckets(timeline)),
        micro_batches=statistics.fmean(step.micro_batches for step in steps),
        synchronizations=statistics.fmean(len(step.synchronizations) for step in steps),
        collectives=statistics.fmean(step.collectives for step in steps),
    )


def step_parts(merged: MergedStep) -> Parts:
    """The parts of one step, on average over its ranks."""
    return _mean(_parts(merged, place, defaultdict(float)) for place in range(len(merged.ranks)))


def _mean(parts: Iterable[Parts]) -> Parts:
    known = [vars(each) for each in parts]
    return Parts(**{name: statistics.fmean(each[name] for each in known) for name in known[0]})


def _parts(merged: MergedStep, place: int, waited_for: defaultdict[int, float]) -> Parts:
    step = merged.ranks[place]
    spent = {name: step.spent(name) for name in ("data", "loop", "forward", "backward", "optimizer", "other")}
    # Of synchronizations that not all ranks have, nothing more is known.
    exposed = step.spent("gather") + step.spent("synchronization")
    waiting = turn = hidden = 0.0
    for collectives, part in zip(merged.collectives, step.synchronizations, strict=False):
        parts = _exposure(collectives, part, place, waited_for)
        waiting += parts["waiting"]
        turn += parts["turn"]
        hidden += parts["hidden"]
        spent["other"] += parts["other"]
        exposed -= parts["waiting"] + parts["turn"] + parts["other"]
    return Parts(**spent, waiting=waiting, turn=turn, exposed=max(0.0, exposed), hidden=hidden)


def _exposure(
    collectives: Sequence[MergedCollective], part: Synchronization, place: int, waited_for: defaultdict[int, float]
) -> dict[str, float]:
    """The time between the end of this rank's backward and its last mean, by cause.

    The last bucket starts where a backward has ended. Until the last rank has come there, nothing that the link could
    do would help: ranks wait for that rank. From then on they wait for communication.
    """
    parts = dict.fromkeys(("waiting", "turn", "hidden", "other"), 0.0)
    since, until = part.backward_end, part.finished
    if not collectives:
        return parts
    final = collectives[-1]
    come = min(max(since, final.begin), until)
    # Its own last to come is a rank that starts what is left: that is the engine's work.
    parts["waiting" if final.last != place else "other"] += come - since
    if final.last != place:
        waited_for[final.last] += come - since
    for each in collectives:
        begin, end = each.busy(place)
        if each is not final:
            parts["turn"] += max(0.0, min(end, until) - max(begin, come))
        parts["hidden"] += max(0.0, min(end, since) - begin)
    # Ends are seen by threads, at times the last one first: what came before it still had its turn.
    parts["other"] += max(0.0, until - max(come, final.free[place], final.ends[place]))
    return parts


def _buckets(timeline: MergedRecording) -> Iterable[BucketSplit]:
    """The split of each bucket, over the last synchronization of every step, in the layout that they have."""
    seen: dict[int, list[tuple[MergedStep, MergedCollective]]] = {}
    for step in timeline.steps:
        for collective in step.collectives[-1] if step.collectives else ():
            seen.setdefault(collective.index, []).append((step, collective))
    for index, pairs in sorted(seen.items()):
        if index >= len(timeline.layout):
            continue
        rows = []
        for step, collective in pairs:
            for place, (rank, bucket) in enumerate(zip(step.ranks, collective.buckets, strict=True)):
                part, (begin, end) = rank.synchronizations[len(step.collectives) - 1], collective.busy(place)
                ready = bucket.start if bucket.ready is None else bucket.ready
                hidden = max(0.0, min(end, part.backward_end) - begin)
                rows.append((ready - part.begin, bucket.start - part.begin, collective.seconds(place), hidden))
        ready, start, seconds, hidden = map(statistics.fmean, zip(*rows, strict=True))
        yield BucketSplit(
            index=index,
            **vars(timeline.layout[index]),
            ready=ready,
            start=start,
            seconds=seconds,
            hidden=hidden,
            last=dict(Counter(timeline.members[collective.last] for _, collective in pairs)),
        )


# -- slow ranks -------------------------------------------------------------------------------------------------------


def missing_evidence(timeline: MergedRecording, split: Split) -> str:
    """A sentence that says why nothing should be concluded from a split; empty where something can."""
    known, step = len(timeline.steps), split.mean.step
    if known < FEWEST_STEPS:
        return (
            f"no advice: {count(known, 'usual step')} can be chance, and {FEWEST_STEPS} after the first {WARM_UP} are "
            "needed. Record more steps"
        )
    if step < SHORTEST_STEP:
        return (
            f"no advice: in steps of {duration(step)} what recording and waking threads take cannot be told from the "
            f"rest; they have to last {duration(SHORTEST_STEP)}"
        )
    return ""


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A slow rank: ``waited`` are seconds of a step that each of the others waits for it, ``last`` is the share of
    steps in which it came last. ``phases`` are those in which it takes longer than the median of the others: its
    seconds, and theirs."""

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
        """What the rank is slower in, in words."""
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
        """What to look at to make the rank faster, in words."""
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


def find_stragglers(timeline: MergedRecording, split: Split) -> tuple[SlowRank, ...]:
    """The slow ranks, those for whom the others wait most first; none without enough evidence."""
    if len(split.ranks) < 2 or missing_evidence(timeline, split):
        return ()
    apart = max(each.header.clock.error or 0.0 for each in timeline.recordings)
    least = max(SLOW * split.mean.step, 2 * apart)
    found = []
    for rank in split.ranks:
        # Over the others: nobody waits for itself.
        waited = split.waited_for.get(rank, 0.0) * len(split.ranks) / (len(split.ranks) - 1)
        # How many seconds the rank waits less than the median of the others, step by step.
        others = [waits for other, waits in split.waits.items() if other != rank]
        usual = map(statistics.median, zip(*others, strict=True))
        ahead = [theirs - own for own, theirs in zip(split.waits[rank], usual, strict=True)]
        error = statistics.stdev(ahead) / math.sqrt(len(ahead))
        if waited >= least and statistics.fmean(ahead) >= max(least, CERTAIN * error):
            last = split.was_last.get(rank, 0.0)
            phases = _slower(split, rank, max(SLOW * split.mean.step, NAMED * waited))
            found.append(SlowRank(rank=rank, waited=waited, last=last, phases=phases))
    return tuple(sorted(found, key=lambda each: -each.waited))


def _slower(split: Split, rank: int, least: float) -> dict[str, tuple[float, float]]:
    """The phases that take the rank so much longer; or the one that does most, where all are less."""
    mine, others = vars(split.ranks[rank]), [vars(parts) for other, parts in split.ranks.items() if other != rank]
    slower = {phase: (mine[phase], statistics.median(each[phase] for each in others)) for phase in PHASES}
    most = max(slower.values(), key=lambda pair: pair[0] - pair[1])
    return {
        phase: pair
        for phase, pair in slower.items()
        if pair[0] - pair[1] > least or (pair is most and pair[0] > pair[1])
    }
