"""Replays recorded steps with something changed: how long would they have taken?

Every recorded step is replayed with its recorded durations, on every rank: computing takes as long as it did, buckets
start as long after the beginning of their backward as they did, and communication takes the recorded time for each.
Only waiting is computed again: a bucket's collective begins when the last rank has started it and the link is free. So
a replay without a change gives nearly the recorded time, and the ratio of two replays is the gain.

:mod:`gradsync.observe.plan` has its own simulator, because it answers a different question: it scales one synthetic
step, from a profile and a link of known costs, to ranks and links that nobody has recorded. Here every recorded step of
every rank is replayed with its own durations, which keeps differences between ranks and steps. A profile would average
them away, and what the simulator needs to know about a link cannot be learned by observing it.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gradsync.core.bucket.layout import BucketCaps, ParameterSpec, plan_layout
from gradsync.observe.explain.link import BucketCost
from gradsync.observe.explain.merging import MergedRecording, MergedStep
from gradsync.observe.recording.files import Span

__all__ = [
    *("accumulated", "as_fast_as_others", "duration", "in_eight_bits", "next_forward", "other_buckets", "regroup"),
    *("synchronized_once", "without"),
]

# Bytes of int8 to those of float32, scales included, and seconds a byte of coding: before it goes, and on the way.
INT8_SHARE, ENCODE, DECODE = 0.254, 4e-10, 6e-10
# What is left of a duration at least, however much other buckets save on it.
LEAST = 0.1

# Seconds by what they were spent on.
Spent = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class ReplayedBucket:
    """A bucket of a replay: ``starts`` are seconds after the backward began, rank by rank; with ``at_end`` after it
    ended. ``seconds`` is how long the link is busy with it."""

    nbytes: int
    starts: tuple[float, ...]
    at_end: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ReplayedBackward:
    """What all ranks do up to the end of one synchronization: they spend ``seconds`` one after the other, and then run
    a backward with these buckets, if there are any. ``tails`` last from the end of the last bucket to where a rank goes
    on."""

    seconds: tuple[Spent, ...]
    backward: tuple[float, ...] = ()
    buckets: tuple[ReplayedBucket, ...] = ()
    tails: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReplayScript:
    """One step of all ranks: its backwards, and what comes after the last of them."""

    backwards: tuple[ReplayedBackward, ...]
    rest: tuple[Spent, ...]


Change = Callable[..., ReplayScript]


def duration(timeline: MergedRecording, change: Change | None = None, *details: object) -> float:
    """Seconds that a step takes in a replay. ``change`` is called with each script, and with ``details``."""
    sizes = [bucket.nbytes for bucket in timeline.layout]
    ends = [0.0] * len(timeline.members)
    for merged in timeline.steps:
        script = _script_of(merged, sizes)
        ends = _play(ends, script if change is None else change(script, *details))
    return max(ends) / max(len(timeline.steps), 1)


def _play(at: list[float], script: ReplayScript) -> list[float]:
    """Play the script, which each rank begins ``at`` its time; returns when each rank has run it."""
    ranks = range(len(at))
    for each in script.backwards:
        begins = [at[rank] + sum(each.seconds[rank].values()) for rank in ranks]
        ends = [begins[rank] + each.backward[rank] for rank in ranks]
        free = 0.0
        for bucket in each.buckets:
            bases = ends if bucket.at_end else begins
            free = max(free, *(bases[rank] + bucket.starts[rank] for rank in ranks)) + bucket.seconds
        at = [max(ends[rank], free) + each.tails[rank] for rank in ranks]
    return [at[rank] + sum(script.rest[rank].values()) for rank in ranks]


def _script_of(merged: MergedStep, sizes: Sequence[int]) -> ReplayScript:
    """The script of a recorded step."""
    backwards = []
    places = range(len(merged.ranks))
    begins = [step.begin for step in merged.ranks]
    for number, collectives in enumerate(merged.collectives):
        parts = [step.synchronizations[number] for step in merged.ranks]
        buckets = []
        for each in collectives:
            starts = [bucket.start for bucket in each.buckets]
            late = all(starts[place] >= parts[place].backward_end for place in places)
            origins = [part.backward_end if late else part.begin for part in parts]
            buckets.append(
                ReplayedBucket(
                    nbytes=sizes[each.index] if each.index < len(sizes) else 0,
                    starts=tuple(starts[place] - origins[place] for place in places),
                    at_end=late,
                    seconds=statistics.fmean(map(each.seconds, places)),
                )
            )
        ends = collectives[-1].ends if collectives else [part.finished for part in parts]
        tails = (max(0.0, part.finished - max(part.backward_end, ends[place])) for place, part in enumerate(parts))
        backwards.append(
            ReplayedBackward(
                seconds=tuple(_spent(merged.ranks[place].spans, begins[place], parts[place].begin) for place in places),
                backward=tuple(part.backward_end - part.begin for part in parts),
                buckets=tuple(buckets),
                tails=tuple(tails),
            )
        )
        begins = [part.finished for part in parts]
    rest = tuple(_spent(merged.ranks[place].spans, begins[place], merged.ranks[place].end) for place in places)
    return ReplayScript(backwards=tuple(backwards), rest=rest)


def _spent(spans: Sequence[Span], since: float, until: float) -> Spent:
    spent: Spent = {}
    for span in spans:
        inside = min(span.end, until) - max(span.begin, since)
        if inside > 0:
            spent[span.name] = spent.get(span.name, 0.0) + inside
    return spent


# -- changes ----------------------------------------------------------------------------------------------------------


def _spending(script: ReplayScript, change: Callable[[tuple[Spent, ...]], tuple[Spent, ...]]) -> ReplayScript:
    """The script with what ranks spend before each backward, and after the last, changed."""
    backwards = tuple(replace(each, seconds=change(each.seconds)) for each in script.backwards)
    return ReplayScript(backwards=backwards, rest=change(script.rest))


def as_fast_as_others(script: ReplayScript, place: int, factors: Spent) -> ReplayScript:
    """A change: the rank at ``place`` takes only so much of what it took, phase by phase."""
    factor = factors.get("backward", 1.0)

    def quicker(spent: tuple[Spent, ...]) -> tuple[Spent, ...]:
        mine = {name: seconds * factors.get(name, 1.0) for name, seconds in spent[place].items()}
        return (*spent[:place], mine, *spent[place + 1 :])

    def scaled(values: tuple[float, ...]) -> tuple[float, ...]:
        return (*values[:place], values[place] * factor, *values[place + 1 :])

    def quickened(each: ReplayedBackward) -> ReplayedBackward:
        buckets = (
            bucket if bucket.at_end else replace(bucket, starts=scaled(bucket.starts)) for bucket in each.buckets
        )
        return replace(each, backward=scaled(each.backward), buckets=tuple(buckets))

    script = _spending(script, quicker)
    return replace(script, backwards=tuple(map(quickened, script.backwards)))


def without(script: ReplayScript, name: str) -> ReplayScript:
    """A change: nobody spends time on ``name``, on data that is there when wanted, or a loop that does nothing else."""
    return _spending(script, lambda spent: tuple({**each, name: 0.0} for each in spent))


def synchronized_once(script: ReplayScript) -> ReplayScript:
    """A change: only the last backward of a step synchronizes."""
    *local, last = script.backwards
    none = (0.0,) * len(script.rest)
    return replace(script, backwards=(*(replace(each, buckets=(), tails=none) for each in local), last))


def accumulated(script: ReplayScript, times: int) -> ReplayScript:
    """A change: ``times`` micro-batches a step instead of one, and one synchronization."""
    first, *others = script.backwards
    seconds = []
    for rank, own in enumerate(first.seconds):
        spent: Spent = {}
        for name, value in (item for each in script.backwards for item in each.seconds[rank].items()):
            # What follows the optimizer's step comes once.
            if name != "other":
                spent[name] = spent.get(name, 0.0) + value
        backward = sum(each.backward[rank] for each in script.backwards)
        spent["backward"] = spent.get("backward", 0.0) + backward
        more = {name: (times - 1) * value for name, value in spent.items()}
        seconds.append({name: own.get(name, 0.0) + more.get(name, 0.0) for name in {**own, **more}})
    return replace(script, backwards=(replace(first, seconds=tuple(seconds)), *others))


def in_eight_bits(script: ReplayScript, link: BucketCost) -> ReplayScript:
    """A change: a quarter of the bytes, and the time of making and reading them."""
    backwards = []
    for each in script.backwards:
        coded, buckets = 0.0, []
        for bucket in each.buckets:
            coded += ENCODE * bucket.nbytes
            shifted = bucket.starts if bucket.at_end else tuple(start + coded for start in bucket.starts)
            latency = min(link.latency, bucket.seconds)
            taken = latency + (bucket.seconds - latency) * INT8_SHARE + DECODE * bucket.nbytes
            buckets.append(replace(bucket, seconds=taken, starts=shifted))
        backward = tuple(seconds + coded for seconds in each.backward)
        backwards.append(replace(each, backward=backward, buckets=tuple(buckets)))
    return replace(script, backwards=tuple(backwards))


def next_forward(script: ReplayScript) -> ReplayScript:
    """A change: half of what is communicated goes behind the next forward; a layer waits for what it needs."""
    backwards = []
    for number, each in enumerate(script.backwards):
        halves = tuple(replace(bucket, seconds=bucket.seconds / 2) for bucket in each.buckets)
        seconds = tuple(_awaited(spent, each) for spent in each.seconds) if number == 0 else each.seconds
        backwards.append(replace(each, seconds=seconds, buckets=halves))
    rest = tuple({**spent, "optimizer": spent.get("optimizer", 0.0) / len(script.rest)} for spent in script.rest)
    return ReplayScript(backwards=tuple(backwards), rest=rest)


def _awaited(spent: Spent, backward: ReplayedBackward) -> Spent:
    """A forward whose layers wait for gathers, which have begun when the step ended. What started last is needed first,
    and layers take as long as their bytes have it."""
    forward, before = spent.get("forward", 0.0), sum(spent.get(name, 0.0) for name in ("data", "loop", "other"))
    total = sum(bucket.nbytes for bucket in backward.buckets) or 1
    arrived, now = 0.0, before
    for bucket in reversed(backward.buckets):
        arrived += bucket.seconds / 2
        now = max(now, arrived) + forward * bucket.nbytes / total
    return {**spent, "forward": max(forward, now - before)}


# -- other buckets ----------------------------------------------------------------------------------------------------
#
# They are laid out by the engine's own rule, from the existing parameters. A joined bucket is full when the last of its
# gradients is ready, and a parameter is never split. Fewer buckets save, for each one, the latency, the work that the
# rank does after its backward to finish it, and, where the thread of the backward computes itself, the work to start
# it. A thread that waits for an accelerator has that time to spare.


@dataclass(frozen=True, kw_only=True)
class Regrouped:
    """One bucket of a different layout: full when ``share`` of the recorded bucket ``source``'s gradients is ready."""

    nbytes: int
    source: int
    share: float


def regroup(timeline: MergedRecording, cap: int) -> tuple[Regrouped, ...]:
    """The buckets that a cap of ``cap`` bytes makes."""
    parameters = _parameters(timeline)
    specs = [
        ParameterSpec(name=str(n), shape=(each.nbytes,), stride=(1,), dtype=torch.uint8, device=torch.device("cpu"))
        for n, each in enumerate(parameters)
    ]
    layout = plan_layout(specs, range(len(specs)), BucketCaps.uniform(cap), control=0)
    groups = [[parameters[slot.parameter] for slot in plan.slots] for plan in layout.buckets]
    return tuple(replace(group[-1], nbytes=sum(each.nbytes for each in group)) for group in groups)


def _parameters(timeline: MergedRecording) -> list[Regrouped]:
    """The parameters of the layout, in the order of their buckets, each as a bucket of its own."""
    known = timeline.recordings[0].header.parameters
    parameters = []
    for index, bucket in enumerate(timeline.layout):
        sizes = [int(known.get(name, 0)) for name in bucket.parameters]
        if not all(sizes):
            # Not all sizes are known: it stays in one piece.
            sizes = [bucket.nbytes]
        for place, nbytes in enumerate(sizes):
            share = sum(sizes[: place + 1]) / max(sum(sizes), 1)
            parameters.append(Regrouped(nbytes=nbytes, source=index, share=share))
    return parameters


def other_buckets(script: ReplayScript, layout: Sequence[Regrouped], link: BucketCost) -> ReplayScript:
    """A change: the same step with these buckets."""
    return replace(script, backwards=tuple(_changed(each, layout, link) for each in script.backwards))


def _changed(backward: ReplayedBackward, layout: Sequence[Regrouped], link: BucketCost) -> ReplayedBackward:
    if len(backward.buckets) <= max(each.source for each in layout):
        # Not all buckets were sent here, or none was.
        return backward
    fewer = len(backward.buckets) - len(layout)
    seconds = tuple(_less(each, fewer * link.starting) for each in backward.backward)
    ratios = [new / old if old else 1.0 for new, old in zip(seconds, backward.backward, strict=True)]
    # When each recorded bucket started, in seconds after the backward began.
    starts = [(0.0,) * len(ratios), *(backward.backward if b.at_end else b.starts for b in backward.buckets)]
    buckets = []
    for each in layout:
        # Between the start of the bucket before and that of its own.
        around = zip(starts[each.source], starts[each.source + 1], ratios, strict=True)
        begins = tuple((before + (start - before) * each.share) * ratio for before, start, ratio in around)
        seconds_each = link.seconds(each.nbytes)
        buckets.append(ReplayedBucket(nbytes=each.nbytes, starts=begins, at_end=False, seconds=seconds_each))
    last = backward.buckets[-1]
    # Whatever is in it, the last one starts when the last one did.
    buckets[-1] = replace(buckets[-1], at_end=last.at_end, starts=last.starts)
    tails = tuple(_less(each, fewer * link.finishing) for each in backward.tails)
    return replace(backward, backward=seconds, buckets=tuple(buckets), tails=tails)


def _less(seconds: float, saved: float) -> float:
    return max(seconds - saved, seconds * LEAST)
