"""What the wire costs, as far as the recording tells: so much a bucket, so much a byte."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gradsync.explain.merging import Timeline
from gradsync.explain.split import Split
from gradsync.recording.steps import Synchronization

__all__ = ["Link", "fit_link"]

# Sizes that are less than this apart do not tell latency and bandwidth apart.
APART = 2.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """A bucket of n bytes keeps the wire busy for ``latency + n · seconds_per_byte``, and its rank for ``host``: what
    it takes to start and finish it."""

    latency: float
    seconds_per_byte: float
    host: float

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes * self.seconds_per_byte


def fit_link(timeline: Timeline, split: Split) -> Link | None:
    """By what the buckets took, large ones and small ones; None where nothing travels."""
    buckets = [bucket for bucket in split.buckets if bucket.nbytes > 0]
    if len(timeline.members) < 2 or not buckets:
        return None
    points = [(bucket.nbytes, bucket.wire) for bucket in buckets]
    latency, per_byte = _line(points)
    if max(nbytes for nbytes, _ in points) < APART * min(nbytes for nbytes, _ in points):
        latency, per_byte = _one_size(timeline, points)
    return Link(latency=latency, seconds_per_byte=per_byte, host=_host(timeline))


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """The straight line through the points, by least squares; neither a negative latency nor a negative slope."""
    sizes, times = [float(nbytes) for nbytes, _ in points], [seconds for _, seconds in points]
    middle, mean = statistics.fmean(sizes), statistics.fmean(times)
    spread = sum((each - middle) ** 2 for each in sizes)
    slope = sum((x - middle) * (y - mean) for x, y in zip(sizes, times, strict=True)) / spread if spread else 0.0
    slope = max(slope, 0.0)
    if mean - slope * middle < 0:
        return 0.0, sum(times) / sum(sizes)
    return mean - slope * middle, slope


def _one_size(timeline: Timeline, points: list[tuple[int, float]]) -> tuple[float, float]:
    """Buckets are alike: then what was measured when the model was wrapped says how much of it is latency."""
    nbytes = statistics.fmean(size for size, _ in points)
    seconds = statistics.fmean(taken for _, taken in points)
    known = timeline.recordings[0].header.link
    if known is None:
        # Nothing is known. What goes fast is mostly latency, what takes long mostly bytes.
        latency = min(seconds, statistics.median(taken for _, taken in points), 500e-6)
    else:
        share = known[0] / (known[0] + nbytes * known[1])
        latency = seconds * share
    return latency, max(seconds - latency, 0.0) / nbytes


def _host(timeline: Timeline) -> float:
    """What a rank does for a bucket besides, however small it is: from ready to started, where its turn had come, and
    from the end of one to the end of the next, where both were there."""
    starting: dict[int, list[float]] = {}
    finishing: dict[int, list[float]] = {}
    for merged in timeline.steps:
        for step in merged.ranks:
            for part in step.synchronizations[-1:]:
                _note_host(part, starting, finishing)
    sizes = [bucket.nbytes for bucket in timeline.layout]
    return sum(_without_bytes(each, sizes) for each in (starting, finishing))


def _note_host(part: Synchronization, starting: dict[int, list[float]], finishing: dict[int, list[float]]) -> None:
    started, finished = float("-inf"), None
    for bucket in part.buckets:
        # The last one is ready when backward has ended, and starts after everything that is left.
        if bucket.ready is not None and bucket is not part.buckets[-1]:
            starting.setdefault(bucket.index, []).append(bucket.start - max(bucket.ready, started))
        finish, reduced = bucket.finish, bucket.reduced
        if finish is not None and reduced is not None and finished is not None and reduced <= finished:
            finishing.setdefault(bucket.index, []).append(finish - finished)
        started, finished = bucket.start, finish


def _without_bytes(seen: dict[int, list[float]], sizes: Sequence[int]) -> float:
    """What would be left of it for a bucket without bytes: copies and codings take as long in one bucket as in two."""
    points = [(sizes[index], statistics.fmean(times)) for index, times in seen.items() if index < len(sizes)]
    if not points:
        return 0.0
    return max(0.0, min(_line(points)[0], statistics.fmean(taken for _, taken in points)))
