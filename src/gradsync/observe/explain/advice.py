"""Advice on what to change, ranked by gain: every change is first replayed on the recorded steps."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gradsync.observe.charts.numbers import count, duration, size
from gradsync.observe.explain import replay
from gradsync.observe.explain.link import BucketCost, fit_link
from gradsync.observe.explain.merging import MergedRecording
from gradsync.observe.explain.replay import regroup
from gradsync.observe.explain.split import SLOW, SlowRank, Split, missing_evidence

__all__ = ["Advice", "advise"]

# What gains less than this share of a step is not worth a line; nor are so few seconds, which waking a thread, or
# handing a batch from one process to another, takes by itself: no change could be sure to gain them.
WORTH_SAYING = 0.02
LEAST_SAVED = 2e-4
# Every loop has a scheduler, a log and gradients to zero: only a tenth of a step is worth a look.
SLOW_LOOP = 0.1
# The link is slow if that costs more than this share of the step.
SLOW_LINK = 0.05
# Changes that leave the training what it is come first, unless others gain more than twice as much.
FREE = 2.0
ACCUMULATED = 4
# The least cap in bytes that is tried; how many times as many buckets make another layout; how much worse is as good.
SMALLEST = 64 * 1024
ANOTHER = 1.2
AS_GOOD = 1.01
# What other buckets gain is off by about a hundredth of a step: less than this is not known to a fifth.
SURE = 0.05

# Seconds of a step with a change of :mod:`replay`, and its details.
After = Callable[..., float]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One advice: ``cause`` is what is wrong, ``change`` the line to write. ``before`` and ``after`` are seconds for
    the samples of one recorded step: where a step would have more of them, ``after`` is the share of it that these
    take. ``free`` says that the training stays the same."""

    kind: str
    cause: str
    change: str
    before: float
    after: float
    free: bool = True

    @property
    def gain(self) -> float:
        """The share of the time that would be saved."""
        return 1.0 - self.after / self.before if self.before > 0 else 0.0

    @property
    def saved(self) -> float:
        """The seconds of a step that would be saved."""
        return self.before - self.after


def advise(timeline: MergedRecording, split: Split, stragglers: Sequence[SlowRank]) -> list[Advice]:
    """Changes that would gain something, most first; see :data:`FREE`. None without enough evidence."""
    step = split.mean.step
    base = replay.duration(timeline)
    if base <= 0 or missing_evidence(timeline, split):
        return []

    def after(change: replay.Change, *details: object) -> float:
        """The seconds of a step after ``change``, by the ratio of two replays: what they leave out is in both."""
        return step * replay.duration(timeline, change, *details) / base

    link = fit_link(timeline, split)
    found = [
        *(_slow_rank(each, split, after) for each in stragglers),
        *_slow_data(split, after),
        *_slow_loop(split, after),
        *_forgotten_no_sync(split, after),
        *(_buckets(timeline, split, link, after) if link is not None else ()),
        *(_slow_link(timeline, split, link, after) if link is not None else ()),
    ]
    worth = [advice for advice in found if advice.gain >= WORTH_SAYING and advice.saved >= LEAST_SAVED]
    ranked = sorted(worth, key=lambda advice: advice.gain * (FREE if advice.free else 1.0), reverse=True)
    causes: set[str] = set()
    for place, advice in enumerate(ranked):
        if advice.cause in causes:
            ranked[place] = replace(advice, cause=f"{advice.cause.partition(':')[0]}, as said; or")
        causes.add(advice.cause)
    return ranked


# -- slow ranks -------------------------------------------------------------------------------------------------------


def _slow_rank(straggler: SlowRank, split: Split, after: After) -> Advice:
    factors = {phase: usual / own for phase, (own, usual) in straggler.phases.items() if own > 0}
    place = list(split.ranks).index(straggler.rank)
    return Advice(
        kind="slow rank",
        cause=straggler.cause,
        change=straggler.remedy,
        before=split.mean.step,
        after=after(replay.as_fast_as_others, place, factors),
    )


# -- data, windows ----------------------------------------------------------------------------------------------------


def _slow_data(split: Split, after: After) -> Iterator[Advice]:
    mean = split.mean
    # What one rank alone waits for is reported as a slow rank.
    data = min(parts.data for parts in split.ranks.values())
    if data < SLOW * mean.step:
        return
    workers = math.ceil(data / max(mean.step - data, 1e-9)) + 1
    yield Advice(
        kind="slow data",
        cause=f"every rank waits {duration(data)} of a step for its data loader",
        change=f"DataLoader(…, num_workers={workers}, persistent_workers=True): batches are made while ranks compute",
        before=mean.step,
        after=after(replay.without, "data"),
    )


def _slow_loop(split: Split, after: After) -> Iterator[Advice]:
    mean = split.mean
    loop = min(parts.loop for parts in split.ranks.values())
    if loop < SLOW_LOOP * mean.step:
        return
    yield Advice(
        kind="slow loop",
        cause=f"every rank spends {duration(loop)} of a step in the loop's own code, before its forward: not in the "
        "model, the optimizer or a DataLoader",
        change="look at that code with a profiler. Batches that it makes can come from a DataLoader with workers, and "
        "losses need not be read in every step",
        before=mean.step,
        after=after(replay.without, "loop"),
    )


def _forgotten_no_sync(split: Split, after: After) -> Iterator[Advice]:
    times = round(split.synchronizations)
    if times < 2 or (len(split.ranks) < 2 and split.mean.step <= 0):
        return
    yield Advice(
        kind="forgotten no_sync",
        cause=f"gradients are averaged {times} times in a step of {round(split.micro_batches)} micro-batches, and used "
        f"once: {times - 1} of {times} are for nothing",
        change="for batch in model.accumulate(batches): …; or with model.no_sync(): around all backwards but the last",
        before=split.mean.step,
        after=after(replay.synchronized_once),
    )


# -- the link ---------------------------------------------------------------------------------------------------------


def _buckets(timeline: MergedRecording, split: Split, link: BucketCost, after: After) -> Iterator[Advice]:
    sizes = [bucket.nbytes for bucket in timeline.layout]
    tried: dict[int, tuple[str, float]] = {}
    for cap in _caps(sum(sizes)):
        layout = regroup(timeline, int(float(cap) * 2**20))
        if len(layout) not in tried and not 1 / ANOTHER < len(layout) / len(sizes) < ANOTHER:
            tried[len(layout)] = cap, after(replay.other_buckets, layout, link)
    if not tried:
        return
    # Of sizes that are as good as each other the one nearest to what was recorded: the further, the less is known.
    least = min(seconds for _, seconds in tried.values())
    good = [number for number, (_, seconds) in tried.items() if seconds <= least * AS_GOOD]
    number = min(good, key=lambda number: abs(math.log(number / len(sizes))))
    cap, seconds = tried[number]
    if seconds > (1 - SURE) * split.mean.step:
        return
    yield Advice(
        kind="bucket size",
        cause=f"buckets are too {'small' if number < len(sizes) else 'large'}: {count(len(sizes), 'bucket')} of "
        f"{size(sum(sizes) / len(sizes))}, and each costs {duration(link.latency + link.starting + link.finishing)} "
        "by itself",
        change=f"bucket_cap_mb={cap} ({count(number, 'bucket')})"
        + (", or leave bucket_cap_mb out" if timeline.recordings[0].header.caps_chosen else ""),
        before=split.mean.step,
        after=seconds,
    )


def _caps(total: int) -> Iterator[str]:
    """Bucket caps in MiB, as they would be written: from one bucket for all down to many small ones."""
    cap = total
    while cap >= max(total // 256, SMALLEST):
        yield f"{cap / 2**20:{'.2g' if cap < 10 * 2**20 else '.0f'}}"
        cap //= 2


def _slow_link(timeline: MergedRecording, split: Split, link: BucketCost, after: After) -> Iterator[Advice]:
    mean = split.mean
    exposed = mean.exposed + mean.turn
    if exposed < SLOW_LINK * mean.step or split.synchronizations > 1.5:
        return
    header = timeline.recordings[0].header
    total = sum(bucket.nbytes for bucket in timeline.layout)
    busy = sum(bucket.seconds for bucket in split.buckets)
    ranks = header.world_size
    moved = 2 * (ranks - 1) / ranks * total / busy if busy else 0.0
    cause = (
        f"the link is slow: {size(total)} of gradients take {duration(busy)} ({size(moved)}/s per rank), and "
        f"{duration(exposed)} of that nothing hides"
    )
    base = Advice(kind="slow link", cause=cause, change="", before=mean.step, after=mean.step, free=False)
    words = "micro-batches a step (larger batches): for batch in model.accumulate(batches): …"
    seconds = after(replay.accumulated, ACCUMULATED) / ACCUMULATED
    yield replace(base, change=f"accumulate {ACCUMULATED} {words}", after=seconds)
    if header.reduction == "Mean()":
        words = 'reduction="int8": a quarter of the bytes (means are rounded to 8 bits)'
        yield replace(base, change=words, after=after(replay.in_eight_bits, link))
        if not any(step.gathers for merged in timeline.steps for step in merged.ranks):
            words = "ShardedOptimizer(optimizer, model): new parameters are gathered behind the next forward"
            yield replace(base, change=f"{words} (same results)", after=after(replay.next_forward), free=True)
