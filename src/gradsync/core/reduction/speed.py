"""Measures how fast reductions are with this model on this transport, by trying each on one bucket."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gradsync.communicator import Communicator
from gradsync.core.bucket import Bucket
from gradsync.core.reduction.base import Reduction

__all__ = ["Speed", "measure_speed"]

# The first run of a reduction allocates, compiles and warms up.
REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Speed:
    """For all gradients of the model: ``seconds`` on an otherwise idle link, compression included, and how long
    processors of this host are ``busy`` with it."""

    seconds: float
    busy: float


def measure_speed(
    reductions: Mapping[str, Callable[[], Reduction]],
    buckets: Sequence[Bucket],
    communicator: Communicator,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Speed]:
    """Time each of ``reductions`` on a bucket like the largest one. Collective; the slowest rank counts."""
    largest = max(buckets, key=lambda bucket: bucket.payload.numel())
    bucket = _twin(largest, communicator)
    parts = sum(each.payload.numel() for each in buckets) / max(largest.payload.numel(), 1)
    readings = torch.tensor(
        [_time(make(), bucket, communicator, clock) for make in reductions.values()],
        dtype=torch.float64,
        device=communicator.device,
    )
    communicator.all_reduce(readings.view(-1), "max").wait()
    return {
        name: Speed(seconds=seconds * parts, busy=busy * parts)
        for name, (seconds, busy) in zip(reductions, readings.tolist(), strict=True)
    }


def _twin(bucket: Bucket, communicator: Communicator) -> Bucket:
    """A bucket like this one, for experiments: the model's buckets hold gradients of the running window."""
    slots = tuple(dataclasses.replace(slot, parameter=number) for number, slot in enumerate(bucket.plan.slots))
    return Bucket(dataclasses.replace(bucket.plan, slots=slots), bucket.parameters, bucket.specs, communicator)


@torch.no_grad()
def _time(
    reduction: Reduction, bucket: Bucket, communicator: Communicator, clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds on the clock, and of processor time of this process; the minimum of a few tries."""
    seconds, busy = [], []
    for _ in range(REPEATS):
        bucket.payload.normal_(std=1e-3)
        # Ranks start together: one that came early would include waiting for the others.
        communicator.all_reduce(torch.zeros(1, device=communicator.device)).wait()
        _wait_for(bucket.plan.device)
        began, began_busy = clock(), time.process_time()
        reduction.start(bucket, communicator, float(communicator.world_size)).wait()
        _wait_for(bucket.plan.device)
        seconds.append(clock() - began)
        busy.append(time.process_time() - began_busy)
        reduction.ended(well=True)
    return min(seconds), min(busy)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
