"""Measurements: of the link, by a few all-reduces; of each reduction, on one bucket; and of steps as they run."""

import dataclasses
import os
import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsync.communicator import Communicator, ProcessGroupCommunicator
from gradsync.core.bucket import Bucket
from gradsync.core.bucket.sizes import MIN_HIDDEN, LinkCost
from gradsync.core.reduction.base import Reduction

__all__ = ["TRIAL", "Speed", "StepWatch", "known_link", "measure_link", "measure_speed"]

SMALL_BYTES = 4 * 1024
LARGE_BYTES = 4 * 1024 * 1024
LINK_REPEATS = 5
SMALL_REPEATS = 20

# Windows per trial, without the first, whose buckets are new.
TRIAL = 6
# The first run of a reduction allocates, compiles and warms up.
REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of a reduction, for all gradients of the model.

    ``seconds``: on an otherwise idle link, compression included; ``busy``: how long processors of this host work on it.
    """

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
    bucket = _copy_of(largest, communicator)
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


def _copy_of(bucket: Bucket, communicator: Communicator) -> Bucket:
    """A copy of a bucket, for experiments: the model's buckets hold gradients of the running window."""
    slots = tuple(dataclasses.replace(slot, parameter=number) for number, slot in enumerate(bucket.plan.slots))
    return Bucket(dataclasses.replace(bucket.plan, slots=slots), bucket.parameters, bucket.specs, communicator.allocate)


@torch.no_grad()
def _time(
    reduction: Reduction, bucket: Bucket, communicator: Communicator, clock: Callable[[], float]
) -> tuple[float, float]:
    """The seconds on the clock, and of processor time of this process; the minimum of a few tries."""
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
        reduction.window_ended(succeeded=True)
    return min(seconds), min(busy)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(kw_only=True)
class StepWatch:
    """Measures how long windows take, and how much of that comes after backward, when nothing hides communication."""

    clock: Callable[[], float] = time.perf_counter
    steps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    began: float | None = None
    flushed: float | None = None

    def window_began(self) -> None:
        now = self.clock()
        if self.began is not None:
            self.steps.append(now - self.began)
        self.began = now

    def backward_ended(self) -> None:
        """Note that the last bucket starts, as backward has ended."""
        self.flushed = self.clock()

    def window_ended(self) -> None:
        if self.flushed is not None:
            self.waits.append(self.clock() - self.flushed)
        self.flushed = None

    def forget(self, *, began: bool = False) -> None:
        """Discard all measurements so far; and, if ``began``, that of the running window, too."""
        self.steps, self.waits = [], []
        if began:
            self.began = None

    def read(self, communicator: Communicator) -> tuple[float, float]:
        """The seconds per window, and those spent waiting in it, over all ranks. Collective.

        The slowest rank counts: the others wait for it, not for communication.
        """
        steps, waits = self.steps[-TRIAL:], self.waits[-TRIAL:]
        numbers = [statistics.median(steps), -statistics.median(waits or [0.0])]
        message = torch.tensor(numbers, dtype=torch.float64, device=communicator.device)
        communicator.all_reduce(message, "max").wait()
        step, wait = message.tolist()
        self.forget(began=True)
        return step, -wait


# The measurements, by the process group (or communicator) they were made on.
_measured: "weakref.WeakKeyDictionary[Any, LinkCost]" = weakref.WeakKeyDictionary()


def measure_link(communicator: Communicator, device: torch.device) -> LinkCost:
    """Fit the cost of a link by timing a few all-reduces. Collective; the slowest rank counts, so all ranks agree."""
    key, cost = _key(communicator), known_link(communicator)
    if cost is None:
        _time_all_reduce(communicator, device, LARGE_BYTES)
        # The minimum: many things can delay a short message, and buckets in flight hide each other's waiting.
        small = min(_time_all_reduce(communicator, device, SMALL_BYTES)[0] for _ in range(SMALL_REPEATS))
        times = [_time_all_reduce(communicator, device, LARGE_BYTES) for _ in range(LINK_REPEATS)]
        large, busy = (statistics.median(each) for each in zip(*times, strict=True))
        share_busy = _share_of_compute(communicator, device, busy / large)
        readings = torch.tensor([small, large, share_busy], dtype=torch.float64, device=communicator.device)
        communicator.all_reduce(readings, "max").wait()
        small, large, share_busy = readings.tolist()
        per_byte = max(large - small, large * 0.05, 1e-9) / (LARGE_BYTES - SMALL_BYTES)
        cost = LinkCost(
            latency=max(small - SMALL_BYTES * per_byte, 1e-7),
            seconds_per_byte=per_byte,
            hidden=min(max(1.0 - share_busy, MIN_HIDDEN), 1.0),
        )
        _measured[key] = cost
    return cost


def known_link(communicator: Communicator) -> LinkCost | None:
    """The earlier measurement of the communicator's link, if there is one."""
    return _measured.get(_key(communicator))


def _key(communicator: Communicator) -> Any:
    # There is a new communicator object for a process group each time. Other communicators are kept by their users.
    return communicator.group if isinstance(communicator, ProcessGroupCommunicator) else communicator


def _share_of_compute(communicator: Communicator, device: torch.device, busy: float) -> float:
    """The share of a transfer that takes time from computing cores. ``busy``: this process's share of a core."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", communicator.world_size))
    spare_cores = len(os.sched_getaffinity(0)) > ranks_here * torch.get_num_threads()
    if device.type != "cpu" or spare_cores:
        return 0.0
    # If all ranks are on this machine, a waiting rank waits for one that uses the same cores.
    return 1.0 if ranks_here >= communicator.world_size else min(busy, 1.0)


def _time_all_reduce(communicator: Communicator, device: torch.device, nbytes: int) -> tuple[float, float]:
    """The seconds of an all-reduce on the clock, and of processor time that this process spent in it."""
    tensor = communicator.allocate(nbytes // 4, torch.float32, device)
    _wait_for(device)
    started, busy = time.perf_counter(), time.process_time()
    communicator.all_reduce(tensor).wait()
    _wait_for(device)
    times = time.perf_counter() - started, time.process_time() - busy
    # Gloo's threads hold a tensor until their next collective; its memory need not wait that long.
    storage = tensor.untyped_storage()
    if storage.resizable():
        storage.resize_(0)
    return times
