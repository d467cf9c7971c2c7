"""What to change, ranked by what it would gain: every change is played on the recorded steps first."""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from gradsync.charts.words import count, duration, size
from gradsync.explain import changes
from gradsync.explain.link import Link, fit_link
from gradsync.explain.merging import Timeline
from gradsync.explain.other_buckets import other_buckets, regroup
from gradsync.explain.replay import Script
from gradsync.explain.replay import duration as played
from gradsync.explain.split import Split

__all__ = ["Advice", "advise"]

# What gains less than this share of a step is not worth a line.
WORTH_SAYING = 0.02
# A rank is slow in a phase, or data is, if that costs more than this share of the step; and so is the wire.
SLOW = 0.03
SLOW_WIRE = 0.05
# Changes that leave the training what it is come first, unless others gain more than twice as much.
FREE = 2.0
ACCUMULATED = 4
# The least cap in bytes that is tried; how many times as many buckets make another layout; how much worse is as good.
SMALLEST = 64 * 1024
ANOTHER = 1.2
AS_GOOD = 1.01
# What other buckets gain is off by about a hundredth of a step: less than this is not known to a fifth.
SURE = 0.05
PHASES = ("data", "forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Advice:
    """``cause`` is what is wrong, ``change`` the line to write, ``before`` and ``after`` seconds of a step (of a
    micro-batch, where there would be more of them in a step). ``free`` says that the training stays the same."""

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
    def factor(self) -> float:
        """How many times as fast it would be."""
        return self.before / self.after if self.after > 0 else math.inf


def advise(timeline: Timeline, split: Split) -> list[Advice]:
    """What would gain something, most first; see :data:`FREE`."""
    step = split.mean.step
    base = played(timeline)
    if base <= 0 or step <= 0:
        return []

    def after(change: Callable[[Script], Script]) -> float:
        """By the ratio of two replays, so that what a replay leaves out counts on both sides."""
        return step * played(timeline, change) / base

    link = fit_link(timeline, split)
    found = [
        *(_slow_ranks(split, after) if timeline.is_warm else ()),
        *_slow_data(split, after),
        *_forgotten_no_sync(split, after),
        *(_buckets(timeline, split, link, after) if link is not None else ()),
        *(_slow_link(timeline, split, link, after) if link is not None else ()),
    ]
    worth = [advice for advice in found if advice.gain >= WORTH_SAYING]
    ranked = sorted(worth, key=lambda advice: advice.gain * (FREE if advice.free else 1.0), reverse=True)
    said: set[str] = set()
    for place, advice in enumerate(ranked):
        if advice.cause in said:
            ranked[place] = replace(advice, cause=f"{advice.cause.partition(':')[0]}, as said; or")
        said.add(advice.cause)
    return ranked


# -- who is slow ------------------------------------------------------------------------------------------------------


def _slow_ranks(split: Split, after: Callable[[Callable[[Script], Script]], float]) -> Iterator[Advice]:
    if len(split.ranks) < 2:
        return
    step = split.mean.step
    slow: dict[int, dict[str, tuple[float, float]]] = {}
    for phase in PHASES:
        spent = {rank: float(getattr(parts, phase)) for rank, parts in split.ranks.items()}
        for rank, seconds in spent.items():
            usual = statistics.median(value for other, value in spent.items() if other != rank)
            if seconds - usual > SLOW * step:
                slow.setdefault(rank, {})[phase] = (seconds, usual)
    places = {rank: place for place, rank in enumerate(split.ranks)}
    for rank, phases in slow.items():
        factors = {phase: usual / seconds for phase, (seconds, usual) in phases.items()}
        words = " and ".join(
            f"{seconds / usual - 1:.0%} slower in {phase} ({duration(seconds)} against {duration(usual)})"
            if usual > seconds / 20
            else f"{duration(seconds - usual)} slower in {phase} (against {duration(usual)})"
            for phase, (seconds, usual) in phases.items()
        )
        yield Advice(
            kind="slow rank",
            cause=f"rank {rank} is {words} than the others, who wait for it",
            change=_look_for(rank, phases),
            before=step,
            after=after(changes.as_fast_as_others(places[rank], factors)),
        )


def _look_for(rank: int, phases: dict[str, tuple[float, float]]) -> str:
    if set(phases) == {"data"}:
        return f"look at what rank {rank} reads, and where from: its loader is slower than those of the others"
    if len(phases) > 1 and "forward" in phases and "backward" in phases:
        return (
            f"look at the machine of rank {rank}: other work, fewer cores, a slower clock; or give it smaller batches"
        )
    return f"look at what rank {rank} does in {' and '.join(phases)} that others do not, with a profiler there"


# -- data, windows ----------------------------------------------------------------------------------------------------


def _slow_data(split: Split, after: Callable[[Callable[[Script], Script]], float]) -> Iterator[Advice]:
    mean = split.mean
    # What one rank alone waits for is its own affair, and said above.
    data = min(parts.data for parts in split.ranks.values())
    if data < SLOW * mean.step:
        return
    workers = math.ceil(data / max(mean.step - data, 1e-9)) + 1
    yield Advice(
        kind="slow data",
        cause=f"every rank waits {duration(data)} of a step for data, before its forward",
        change=f"DataLoader(…, num_workers={workers}, persistent_workers=True): batches are made while ranks compute",
        before=mean.step,
        after=after(changes.without_data()),
    )


def _forgotten_no_sync(split: Split, after: Callable[[Callable[[Script], Script]], float]) -> Iterator[Advice]:
    times = round(split.synchronizations)
    if times < 2 or (len(split.ranks) < 2 and split.mean.step <= 0):
        return
    yield Advice(
        kind="forgotten no_sync",
        cause=f"gradients are averaged {times} times in a step of {round(split.micro_batches)} micro-batches, and used "
        f"once: {times - 1} of {times} are for nothing",
        change="for batch in model.accumulate(batches): …; or with model.no_sync(): around all backwards but the last",
        before=split.mean.step,
        after=after(changes.synchronized_once()),
    )


# -- the wire ---------------------------------------------------------------------------------------------------------


def _buckets(
    timeline: Timeline, split: Split, link: Link, after: Callable[[Callable[[Script], Script]], float]
) -> Iterator[Advice]:
    sizes = [bucket.nbytes for bucket in timeline.layout]
    tried: dict[int, tuple[str, float]] = {}
    for cap in _caps(sum(sizes)):
        layout = regroup(timeline, int(float(cap) * 2**20))
        if len(layout) not in tried and not 1 / ANOTHER < len(layout) / len(sizes) < ANOTHER:
            tried[len(layout)] = cap, after(other_buckets(layout, link))
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
    """In MiB, as they would be written: from one bucket for all down to many small ones."""
    cap = total
    while cap >= max(total // 256, SMALLEST):
        mebibytes = cap / 2**20
        yield f"{mebibytes:.2g}" if mebibytes < 10 else f"{mebibytes:.0f}"
        cap //= 2


def _slow_link(
    timeline: Timeline, split: Split, link: Link, after: Callable[[Callable[[Script], Script]], float]
) -> Iterator[Advice]:
    mean = split.mean
    open_wire = mean.exposed + mean.turn
    if open_wire < SLOW_WIRE * mean.step or split.synchronizations > 1.5:
        return
    header = timeline.recordings[0].header
    total = sum(bucket.nbytes for bucket in timeline.layout)
    wire = sum(bucket.wire for bucket in split.buckets)
    ranks = header.world_size
    moved = 2 * (ranks - 1) / ranks * total / wire if wire else 0.0
    cause = (
        f"the wire is slow: {size(total)} of gradients take {duration(wire)} ({size(moved)}/s a rank), and "
        f"{duration(open_wire)} of that nothing hides"
    )
    base = Advice(kind="slow link", cause=cause, change="", before=mean.step, after=mean.step, free=False)
    yield replace(
        base,
        change=f"accumulate {ACCUMULATED} micro-batches a step (larger batches): "
        "for batch in model.accumulate(batches): …",
        after=after(changes.accumulated(ACCUMULATED)) / ACCUMULATED,
    )
    if header.reduction == "Mean()":
        yield replace(
            base,
            change='reduction="int8": a quarter of the bytes (means are rounded to 8 bits)',
            after=after(changes.in_eight_bits(link)),
        )
        if not any(step.gathers for merged in timeline.steps for step in merged.ranks):
            yield replace(
                base,
                change=f"ShardedOptimizer(torch.optim.{header.optimizer or 'AdamW'}, model, …): new parameters cross "
                "the wire behind the next forward (same results)",
                after=after(changes.next_forward()),
                free=True,
            )
