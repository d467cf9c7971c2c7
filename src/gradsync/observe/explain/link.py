"""The cost of communication, as far as the recording shows it: a fixed time per bucket and a time per byte."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gradsync.observe.explain.merging import MergedRecording
from gradsync.observe.explain.split import Split
from gradsync.observe.recording.files import Synchronization

__all__ = ["BucketCost", "fit_line", "fit_link"]

# Sizes that are less than this apart do not tell latency and bandwidth apart.
APART = 2.0
# Two collectives may be under way at a time, and the end of one says little of its own bytes: this many neighbours are
# looked at together, if there are enough of them.
TOGETHER = 8
# A backward whose thread is on a core for less than this share of it waits for something else that computes.
COMPUTES = 0.5
# Seconds a byte that copying and starting take at most. Of buckets of nearly one size a line may make anything.
SLOWEST_COPY = 4e-10
# What little bytes take that nobody has told from their latency: as over a link of 10 Mbit/s. The rest is no link's.
SLOWEST_BYTE = 8e-7


@dataclass(frozen=True, kw_only=True)
class BucketCost:
    """A bucket of n bytes keeps the link busy for ``latency + n · seconds_per_byte``. ``starting`` are seconds by which
    it makes the backward of its rank longer, however small it is, and ``finishing`` what it takes after that."""

    latency: float
    seconds_per_byte: float
    starting: float
    finishing: float

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes * self.seconds_per_byte


def fit_link(timeline: MergedRecording, split: Split) -> BucketCost | None:
    """Fit a link to what large and small buckets took, and to what was measured; None where nothing travels."""
    buckets = [bucket for bucket in split.buckets if bucket.nbytes > 0]
    if len(timeline.members) < 2 or not buckets:
        return None
    header = timeline.recordings[0].header
    gathers = any(step.gathers for merged in timeline.steps for step in merged.ranks)
    # What a plain all-reduce was measured to cost, where that is what gradients travel in.
    measured = header.link if header.reduction == "Mean()" and not gathers else None
    latency, per_byte = _fit([(bucket.nbytes, bucket.seconds) for bucket in buckets], measured)
    starting, finishing = _host(timeline)
    return BucketCost(latency=latency, seconds_per_byte=per_byte, starting=starting, finishing=finishing)


def _fit(points: list[tuple[int, float]], measured: tuple[float, float] | None) -> tuple[float, float]:
    nbytes, seconds = (statistics.fmean(column) for column in zip(*points, strict=True))
    if measured is not None:
        # Bytes cost what they were measured to cost. All the rest of what buckets took is theirs, one like the other.
        per_byte = min(measured[1], seconds / nbytes)
        return seconds - nbytes * per_byte, per_byte
    number = max(1, min(TOGETHER, len(points) // 4))
    groups = [_mean_point(points[place : place + number]) for place in range(len(points) - number + 1)]
    if max(size for size, _ in groups) >= APART * min(size for size, _ in groups):
        latency, per_byte = _cost_of(groups)
        if per_byte > 0:
            # Through the mean of all, so that they take together what they took.
            per_byte = min(per_byte, seconds / nbytes)
            return seconds - nbytes * per_byte, per_byte
    # Nothing is known. What goes fast is mostly latency, what takes long mostly bytes.
    latency = min(seconds, statistics.median(taken for _, taken in points), 500e-6)
    per_byte = min((seconds - latency) / nbytes, SLOWEST_BYTE)
    return seconds - nbytes * per_byte, per_byte


def _mean_point(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.fmean(nbytes for nbytes, _ in points), statistics.fmean(seconds for _, seconds in points)


def fit_line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """The straight line through points with weights, by least squares: its slope, and the point in the middle."""
    weight = sum(w for _, _, w in points)
    middle, mean = (sum(point[i] * point[2] for point in points) / weight for i in (0, 1))
    spread = sum(w * (x - middle) ** 2 for x, _, w in points)
    slope = sum(w * (x - middle) * (y - mean) for x, y, w in points) / spread if spread else 0.0
    return slope, middle, mean


def _cost_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency and seconds per byte of the line through the points; neither is negative."""
    slope, nbytes, seconds = fit_line([(*point, 1.0) for point in points])
    slope = max(slope, 0.0)
    if seconds - slope * nbytes < 0:
        return 0.0, seconds / nbytes
    return seconds - slope * nbytes, slope


def _host(timeline: MergedRecording) -> tuple[float, float]:
    """Seconds that a rank spends on a bucket besides, however small it is: from full to started, where its turn had
    come, and from the end of one to the end of the next, where both were there."""
    starting: dict[int, list[float]] = {}
    finishing: dict[int, list[float]] = {}
    for merged in timeline.steps:
        for step in merged.ranks:
            for part in step.synchronizations[-1:]:
                _note_host(part, starting, finishing)
    sizes = [bucket.nbytes for bucket in timeline.layout]
    return (
        _without_bytes(starting, sizes) + _kept_off(timeline) if _computes(timeline) else 0.0,
        _without_bytes(finishing, sizes),
    )


def _kept_off(timeline: MergedRecording) -> float:
    """Seconds a bucket by which the threads that communicate keep that of the backward off its core, or out of the
    interpreter: it computes, and is on none for a while. No longer than the link is busy: there are others, too."""
    seconds = []
    for merged in timeline.steps:
        for place, step in enumerate(merged.ranks):
            # Where ranks differ in how often they have synchronized, only what all did counts.
            for part, collectives in list(zip(step.synchronizations, merged.collectives, strict=False))[-1:]:
                if part.busy is not None and part.buckets:
                    off_core = part.backward_end - part.begin - part.busy
                    in_flight = sum(each.seconds(place) for each in collectives)
                    seconds.append(max(0.0, min(off_core, in_flight)) / len(part.buckets))
    return statistics.median(seconds) if seconds else 0.0


def _computes(timeline: MergedRecording) -> bool:
    """Whether backwards run on the threads that start buckets, and not on something that those wait for."""
    shares = [
        part.busy / (part.backward_end - part.begin)
        for merged in timeline.steps
        for step in merged.ranks
        for part in step.synchronizations[-1:]
        if part.busy is not None and part.backward_end > part.begin
    ]
    if not shares:
        return timeline.recordings[0].header.device.startswith("cpu")
    return statistics.median(shares) >= COMPUTES


def _note_host(part: Synchronization, starting: dict[int, list[float]], finishing: dict[int, list[float]]) -> None:
    started, finished = float("-inf"), None
    for bucket in part.buckets:
        # The last one is ready when backward has ended, and starts after everything that is left.
        if bucket.ready is not None and bucket is not part.buckets[-1]:
            copied = bucket.ready if bucket.full is None else bucket.full
            starting.setdefault(bucket.index, []).append(bucket.start - max(copied, started))
        finish, reduced = bucket.finish, bucket.reduced
        if finish is not None and reduced is not None and finished is not None and reduced <= finished:
            finishing.setdefault(bucket.index, []).append(finish - finished)
        started, finished = bucket.start, finish


def _without_bytes(seen: dict[int, list[float]], sizes: Sequence[int]) -> float:
    """What would be left of it for a bucket without bytes: copies and codings take as long in one bucket as in two."""
    points = [(float(sizes[index]), statistics.fmean(times)) for index, times in seen.items() if index < len(sizes)]
    if not points:
        return 0.0
    nbytes, seconds = _mean_point(points)
    return max(0.0, seconds - nbytes * min(_cost_of(points)[1], SLOWEST_COPY))
