"""Bucket sizes from what was measured in the first windows of a training.

The cost model guesses from a few all-reduces on an idle wire; see :mod:`gradsync.cost_model`. The tuner watches real
windows: when gradients become ready, and how long buckets of which size travel while backward runs. From both it
computes when the last bucket would arrive with buckets of other sizes::

    gradients ready   ━━━━━━┳━━━━━━━━━━┳━━━━━━━━━┳━━━━━┓ backward ends
    bucket 0                ┗━━ travels ━━┓      ┃     ┃
    bucket 1                           ┗━ waits ━┻━ travels ━┓
    bucket 2                                           ┗━ waits ━┻━ travels ━┓ the end

and takes the sizes with the earliest end. It does so after 4, 8 and 16 windows, at the meetings where ranks agree on
the order of gradients anyway, and then never again. Ranks share what they have measured, the slowest counting, and
compute alike, so they need not agree on the outcome.

On accelerators the host does not see when buckets travel, and the sizes of the cost model stay.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from gradsync.bucket import Bucket
from gradsync.bucket_layout import BucketCaps
from gradsync.communicator import Communicator, Handle, when_done
from gradsync.cost_model import MAX_BUCKET_BYTES, MIN_BUCKET_BYTES, LinkCost

__all__ = ["BucketTuner", "Course", "arrival"]

TUNED_AFTER = (4, 8, 16)
# The curve of ready gradients, as times at which this many equal shares of the bytes are ready.
POINTS = 32
# A new layout costs the memory of the old one for a moment; less than this is not worth it.
WORTH_CHANGING = 0.01
STEPS_PER_OCTAVE = 2
# Copying a byte in and out of a bucket and starting it, beside what the wire takes.
HOST_SECONDS_PER_BUCKET = 150e-6


@dataclass(frozen=True, kw_only=True)
class Course:
    """What a window is like: when shares of the gradients are ready, and what buckets cost on the wire."""

    ready: tuple[float, ...]
    latency: float
    seconds_per_byte: float

    def ready_at(self, share: float) -> float:
        """Seconds after backward began at which ``share`` (0 to 1) of the bytes are ready."""
        place = share * (len(self.ready) - 1)
        below = min(int(place), len(self.ready) - 2)
        return self.ready[below] + (place - below) * (self.ready[below + 1] - self.ready[below])


def arrival(course: Course, sizes: Sequence[int]) -> float:
    """When the last of buckets of ``sizes`` bytes arrives. The last one starts when backward has ended."""
    total, landed, free = sum(sizes), 0, 0.0
    for number, size in enumerate(sizes, start=1):
        landed += size
        # The work of earlier buckets delays backward.
        ready = course.ready_at(1.0 if number == len(sizes) else landed / total) + number * HOST_SECONDS_PER_BUCKET
        free = max(free, ready) + course.latency + size * course.seconds_per_byte
    return free


@dataclass(kw_only=True)
class _Trip:
    """One bucket in one window."""

    nbytes: int
    ready: float | None = None
    started: float | None = None
    arrived: float | None = None


@dataclass(kw_only=True)
class _WindowTimes:
    began: float
    trips: dict[int, _Trip] = field(default_factory=dict)
    ended: float | None = None


class BucketTuner:
    """An observer of the engine that proposes bucket sizes. ``cost`` is what was measured before training."""

    def __init__(self, cost: LinkCost) -> None:
        self._cost = cost
        self.rounds = 0
        self._windows: list[_WindowTimes] = []
        self._now: _WindowTimes | None = None

    @property
    def finished(self) -> bool:
        return self.rounds == len(TUNED_AFTER)

    # -- watching --------------------------------------------------------------------------------------------------

    def backward_began(self, *, synchronizes: bool) -> None:
        self._now = _WindowTimes(began=time.perf_counter())

    def bucket_ready(self, bucket: Bucket) -> None:
        self._trip(bucket).ready = time.perf_counter()

    def bucket_started(self, bucket: Bucket, handle: Handle) -> None:
        trip = self._trip(bucket)
        trip.started = time.perf_counter()
        when_done(handle, lambda: setattr(trip, "arrived", time.perf_counter()))

    def backward_ended(self) -> None:
        if self._now is not None:
            self._now.ended = time.perf_counter()

    def bucket_finished(self, bucket: Bucket) -> None:
        trip = self._trip(bucket)
        trip.arrived = trip.arrived or time.perf_counter()

    def synchronization_finished(self) -> None:
        if self._now is not None and self._now.ended is not None:
            self._windows.append(self._now)
        self._now = None

    def _trip(self, bucket: Bucket) -> _Trip:
        if self._now is None:
            self._now = _WindowTimes(began=time.perf_counter())
        nbytes = bucket.buffer.nbytes
        return self._now.trips.setdefault(bucket.index, _Trip(nbytes=nbytes))

    # -- proposing -------------------------------------------------------------------------------------------------

    def due(self, windows: int) -> bool:
        """Whether ranks tune after this many windows: the same answer on all ranks."""
        return not self.finished and windows == TUNED_AFTER[self.rounds]

    def forget(self) -> None:
        """Buckets were made anew: what was seen of the old ones is of no use."""
        self._windows.clear()
        self._now = None

    def propose(
        self, communicator: Communicator, caps: BucketCaps, sizes: Callable[[BucketCaps], list[int]]
    ) -> BucketCaps:
        """The caps to go on with; ``sizes`` tells which buckets caps would make. Collective."""
        self.rounds += 1
        course = self._shared(communicator)
        self.forget()
        if course is None:
            return caps
        current = arrival(course, sizes(caps))
        best, earliest = caps, current * (1 - WORTH_CHANGING)
        for candidate in _candidates(sum(sizes(caps))):
            end = arrival(course, sizes(candidate))
            if end < earliest:
                best, earliest = candidate, end
        return best

    def _shared(self, communicator: Communicator) -> Course | None:
        """The course of the slowest rank in every point. None if a rank has seen no window from begin to end."""
        mine = _course_of(self._windows, self._cost)
        numbers = [0.0] * (POINTS + 1 + 3) if mine is None else [1.0, mine.latency, mine.seconds_per_byte, *mine.ready]
        # One number for "how many have seen nothing": the largest over ranks of what is missing.
        message = torch.tensor([1.0 - numbers[0], *numbers[1:]], dtype=torch.float64, device=communicator.device)
        communicator.all_reduce(message, "max").wait()
        missing, latency, per_byte, *ready = message.tolist()
        return None if missing else Course(ready=tuple(ready), latency=latency, seconds_per_byte=per_byte)


def _candidates(total: int) -> list[BucketCaps]:
    """Sizes in geometric steps: all alike, or smaller towards the end, where nothing hides them. Large ones first."""
    smallest, largest = MIN_BUCKET_BYTES // 4, min(max(total, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES)
    steps = math.ceil(math.log2(largest / smallest) * STEPS_PER_OCTAVE)
    caps = [int(largest * 2 ** (-step / STEPS_PER_OCTAVE)) for step in range(steps + 1)]
    shapes = [(cap,) for cap in caps] + [(max(cap // 4, 1), max(cap // 2, 1), cap) for cap in caps]
    return [BucketCaps(caps=shape, from_the_end=len(shape) > 1) for shape in shapes]


def _course_of(windows: Sequence[_WindowTimes], cost: LinkCost) -> Course | None:
    """What the windows have in common: medians, so that one disturbed window does no harm."""
    curves = [curve for window in windows if (curve := _curve(window)) is not None]
    if not curves:
        return None
    ready = tuple(statistics.median(times) for times in zip(*curves, strict=True))
    latency, per_byte = _fit([trip for window in windows for trip in _travels(window)], cost)
    return Course(ready=ready, latency=latency, seconds_per_byte=per_byte)


def _curve(window: _WindowTimes) -> list[float] | None:
    """When each of POINTS equal shares of the bytes was ready, between the buckets by straight lines."""
    trips = [window.trips[index] for index in sorted(window.trips)]
    if window.ended is None or not trips:
        return None
    total = sum(trip.nbytes for trip in trips)
    known = [(0.0, 0.0)]
    landed = 0
    for trip in trips[:-1]:
        landed += trip.nbytes
        if trip.ready is not None:
            known.append((landed / total, max(trip.ready - window.began, known[-1][1])))
    known.append((1.0, max(window.ended - window.began, known[-1][1])))
    curve = []
    for point in range(POINTS + 1):
        share = point / POINTS
        after = next(number for number in range(1, len(known)) if share <= known[number][0] + 1e-12)
        (left, early), (right, late) = known[after - 1], known[after]
        curve.append(early + (late - early) * ((share - left) / (right - left) if right > left else 1.0))
    return curve


def _travels(window: _WindowTimes) -> list[tuple[int, float]]:
    """Bytes and seconds on the wire of each bucket: from when it started, or the one before it had arrived."""
    travels = []
    free = 0.0
    for index in sorted(window.trips):
        trip = window.trips[index]
        if trip.started is not None and trip.arrived is not None:
            travels.append((trip.nbytes, trip.arrived - max(trip.started, free)))
            free = max(free, trip.arrived)
    return [(nbytes, seconds) for nbytes, seconds in travels if seconds > 0]


def _fit(travels: Sequence[tuple[int, float]], cost: LinkCost) -> tuple[float, float]:
    """Latency and seconds per byte: a line through the travels, kept near what was measured on the idle wire.

    Buckets of one size say nothing about latency by themselves, and a short one may have been held up by anything. So
    only the slope is fitted, through the latency that is known.
    """
    slopes = [max(seconds - cost.latency, 0.0) / nbytes for nbytes, seconds in travels if nbytes >= MIN_BUCKET_BYTES]
    if not slopes:
        return cost.latency, cost.seconds_per_byte
    per_byte = statistics.median(slopes)
    return cost.latency, min(max(per_byte, cost.seconds_per_byte / 4), cost.seconds_per_byte * 16)
