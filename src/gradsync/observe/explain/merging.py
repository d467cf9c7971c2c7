"""Merges the recordings of all ranks onto one clock, step by step, with the communication in each step.

A collective begins when the last rank has started it and the previous one is over. So the start times of
all ranks, and the times at which each saw the end, tell which rank waited for others and which for communication.

Clocks of several machines drift apart. The offset measured when the model was wrapped is corrected by the ends of
collectives, which all ranks see at nearly the same time: their times may differ, but the difference must not grow.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradsync.base.errors import ConfigurationError
from gradsync.observe.recording.files import BucketPart, RecordedBucket, Recording, Step, Synchronization

__all__ = ["MergedCollective", "MergedRecording", "MergedStep", "merge", "on_one_clock"]

# Within each block of this many steps the slowest and the fastest tenth are left out as disturbed.
LEFT_OUT = 0.1
# The first steps learn the order of gradients and try bucket sizes.
WARM_UP = 3
# Steps that are looked at: the last ones.
MOST_STEPS = 300
# Drift is told from this many steps on.
ENOUGH_FOR_DRIFT = 20


@dataclass(frozen=True, kw_only=True)
class MergedCollective:
    """The collective of one bucket, as each rank recorded it: ``last`` is the rank that started it last, at ``begin``;
    ``ends`` are when each rank saw its end. ``free`` is when the link was done with the one before, as each rank saw
    it."""

    index: int
    buckets: tuple[RecordedBucket, ...]
    begin: float
    last: int
    ends: tuple[float, ...]
    free: tuple[float, ...]

    def busy(self, rank: int) -> tuple[float, float]:
        """From when to when the link was busy with the collective, as the rank saw it."""
        return max(self.begin, self.free[rank]), self.ends[rank]

    def seconds(self, rank: int) -> float:
        """How long the link was busy with the collective."""
        begin, end = self.busy(rank)
        return max(0.0, end - begin)


@dataclass(frozen=True, kw_only=True)
class MergedStep:
    """One step of all ranks, on rank 0's clock; for each of its synchronizations the collectives, in order."""

    number: int
    ranks: tuple[Step, ...]
    collectives: tuple[tuple[MergedCollective, ...], ...]

    @property
    def seconds(self) -> float:
        return statistics.fmean(step.seconds for step in self.ranks)


@dataclass(frozen=True, kw_only=True)
class MergedRecording:
    """What all ranks did. ``members`` are their numbers: all of them, or the one that was asked alone. ``recorded`` are
    the steps that all of them have, ``steps`` the usual ones of these."""

    recordings: tuple[Recording, ...]
    members: tuple[int, ...]
    steps: tuple[MergedStep, ...]
    recorded: tuple[MergedStep, ...]
    layout: tuple[BucketPart, ...]

    @property
    def is_whole(self) -> bool:
        """Whether all ranks are in it."""
        return len(self.members) == self.recordings[0].header.world_size


def merge(recordings: Sequence[Recording]) -> MergedRecording:
    """Merge the recordings of one model. ConfigurationError if ranks have no step in common."""
    empty = [each.header.rank for each in recordings if not each.steps]
    if empty:
        raise ConfigurationError(
            f"rank {empty[0]} has recorded no step: a step is over when an optimizer of the model's parameters has "
            "stepped and the next forward begins. Record a few more"
        )
    # All ranks lay out their buckets again at once; a killed rank may not have got that far.
    last = min(len(each.layouts) for each in recordings) - 1
    if last < 0 or len({each.layouts[last] for each in recordings}) != 1:
        raise ConfigurationError(
            "these recordings are of different models, or of different runs: their buckets differ. Record every run "
            "into a folder of its own"
        )
    aligned = [{step.number: step for step in steps} for steps in on_one_clock(recordings)]
    common = sorted(set.intersection(*(set(steps) for steps in aligned)))
    if not common:
        raise ConfigurationError(
            "ranks have recorded no step in common: "
            + ", ".join(f"rank {each.header.rank} has {len(each.steps)} of {each.total}" for each in recordings)
        )
    recorded = []
    for number in common:
        ranks = tuple(steps[number] for steps in aligned)
        # Ranks may differ in how often they have synchronized.
        rounds = zip(*(step.synchronizations for step in ranks), strict=False)
        recorded.append(MergedStep(number=number, ranks=ranks, collectives=tuple(map(_collectives, rounds))))
    return MergedRecording(
        recordings=tuple(recordings),
        members=tuple(each.header.rank for each in recordings),
        steps=tuple(_chosen(recorded, last)),
        recorded=tuple(recorded),
        layout=recordings[0].layouts[last],
    )


def _chosen(steps: list[MergedStep], layout: int) -> list[MergedStep]:
    """The steps that are like each other: in the last layout, with as many synchronizations on all ranks, warm, and
    neither very fast nor very slow."""
    alike = [
        merged
        for merged in steps
        if merged.ranks[0].layout == layout and len({len(step.synchronizations) for step in merged.ranks}) == 1
    ] or steps
    usual = Counter(len(merged.ranks[0].synchronizations) for merged in alike).most_common(1)[0][0]
    alike = [merged for merged in alike if len(merged.ranks[0].synchronizations) == usual]
    alike = [merged for merged in alike if merged.number >= WARM_UP] or alike
    alike = alike[-MOST_STEPS:]
    by_time = sorted(alike, key=lambda merged: max(step.seconds for step in merged.ranks))
    out = int(len(by_time) * LEFT_OUT)
    return sorted(by_time[out : len(by_time) - out], key=lambda merged: merged.number)


def _collectives(parts: Sequence[Synchronization]) -> tuple[MergedCollective, ...]:
    """The buckets that all ranks have started, in their order."""
    by_rank = [{bucket.index: bucket for bucket in part.buckets} for part in parts]
    collectives: list[MergedCollective] = []
    free = tuple(part.begin for part in parts)
    for index in sorted(set.intersection(*(set(buckets) for buckets in by_rank))):
        buckets = tuple(each[index] for each in by_rank)
        starts = [bucket.start for bucket in buckets]
        begin, last = max(starts), starts.index(max(starts))
        ends = tuple(
            max(begin, min(part.end_of(bucket), part.finished)) for bucket, part in zip(buckets, parts, strict=True)
        )
        collectives.append(MergedCollective(index=index, buckets=buckets, begin=begin, last=last, ends=ends, free=free))
        free = tuple(max(before, end) for before, end in zip(free, ends, strict=True))
    return tuple(collectives)


# -- clocks -----------------------------------------------------------------------------------------------------------


def on_one_clock(recordings: Sequence[Recording]) -> list[list[Step]]:
    """The steps of each recording, which must have one, on the clock of the first recording."""
    first, aligned = _ends_of(recordings[0]), []
    for each in recordings:
        clock, since = each.header.clock, each.steps[0].begin
        ends = {number: end + clock.offset for number, end in _ends_of(each).items()}
        # Ranks with the clock of rank 0 have no error.
        drift = _drift(first, ends) if clock.error else 0.0
        aligned.append([step.shifted(clock.offset - drift * (step.begin - since)) for step in each.steps])
    return aligned


def _ends_of(recording: Recording) -> dict[int, float]:
    """The moment at which the rank saw the end of the last collective, by step."""
    return {
        step.number: max(part.end_of(bucket) for bucket in part.buckets)
        for step in recording.steps
        for part in step.synchronizations[-1:]
        if part.buckets
    }


def _drift(first: Mapping[int, float], other: Mapping[int, float]) -> float:
    """How many seconds a second ``other`` goes too fast. By medians, so that a rank that came late now and then does
    not bend it."""
    common = sorted(set(first) & set(other))
    third = len(common) // 3
    if len(common) < ENOUGH_FOR_DRIFT:
        return 0.0
    early, late = common[:third], common[-third:]
    apart = [statistics.median(other[number] - first[number] for number in part) for part in (early, late)]
    when = [statistics.median(first[number] for number in part) for part in (early, late)]
    return (apart[1] - apart[0]) / (when[1] - when[0]) if when[1] > when[0] else 0.0
