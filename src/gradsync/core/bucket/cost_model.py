"""Cost model for the bucket size: fits latency and bandwidth to the group, and computes the best size.

Reducing S bytes in buckets of b bytes costs about ``S/b · latency`` for starting them and, after backward has ended,
``b / bandwidth`` for the last one, which nothing hides. The sum is smallest at ``b = sqrt(S · latency · bandwidth)``.

This holds where the transport needs no cores. Where ranks use all cores of a machine and communicate through its
memory, moving bytes takes time from the cores that compute. Overlap then gains nothing, and only the number of buckets
counts. ``hidden`` is the share of a transfer during which the cores are free.
"""

import math
import os
import statistics
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from gradsync.communicator import Communicator, ProcessGroupCommunicator
from gradsync.core.bucket.layout import BucketCaps

__all__ = ["LinkCost", "auto_caps", "known_link", "measure_link"]

SMALL_BYTES = 4 * 1024
LARGE_BYTES = 4 * 1024 * 1024
REPEATS = 5
SMALL_REPEATS = 20
MIN_BUCKET_BYTES = 256 * 1024
MAX_BUCKET_BYTES = 64 * 1024 * 1024
MIN_HIDDEN = 0.02
WORTH_OVERLAPPING = 0.5

# The engine's own work for a bucket (gathering, starting, finishing) is latency too.
HOST_SECONDS_PER_BUCKET = 100e-6


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """An all-reduce of n bytes takes ``latency + n · seconds_per_byte``; compute can hide a share of it."""

    latency: float
    seconds_per_byte: float
    hidden: float = 1.0

    @property
    def overlaps(self) -> bool:
        """Whether reducing buckets during backward gains anything."""
        return self.hidden >= WORTH_OVERLAPPING

    def best_bucket_bytes(self, total_bytes: int) -> int:
        latency = self.latency + HOST_SECONDS_PER_BUCKET
        best = math.sqrt(max(total_bytes, 1) * latency / (self.seconds_per_byte * self.hidden))
        return int(min(max(best, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES))


# The measurements, by the process group (or communicator) they were made on.
_measured: "weakref.WeakKeyDictionary[Any, LinkCost]" = weakref.WeakKeyDictionary()


def auto_caps(cost: LinkCost, total_bytes: int) -> BucketCaps:
    """Caps by the cost model: the best size, with smaller buckets at the end, where nothing hides them."""
    best = cost.best_bucket_bytes(total_bytes)
    if not cost.overlaps:
        return BucketCaps.uniform(best)
    return BucketCaps.tapered(best, least=MIN_BUCKET_BYTES // 4)


def measure_link(communicator: Communicator, device: torch.device) -> LinkCost:
    """Fit the cost by timing a few all-reduces. Collective; the slowest rank's times count, so all ranks agree."""
    key, cost = _key(communicator), known_link(communicator)
    if cost is None:
        _time_all_reduce(communicator, device, LARGE_BYTES)
        # The minimum: many things can delay a short message, and buckets in flight hide each other's waiting.
        small = min(_time_all_reduce(communicator, device, SMALL_BYTES)[0] for _ in range(SMALL_REPEATS))
        large, busy = _median_times(communicator, device, LARGE_BYTES)
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
    """The earlier measurement, if there is one."""
    return _measured.get(_key(communicator))


def _key(communicator: Communicator) -> Any:
    # A new object for the same group each time; all others are kept alive by their users.
    return communicator.group if isinstance(communicator, ProcessGroupCommunicator) else communicator


def _median_times(communicator: Communicator, device: torch.device, nbytes: int) -> tuple[float, float]:
    readings = [_time_all_reduce(communicator, device, nbytes) for _ in range(REPEATS)]
    return statistics.median(wall for wall, _ in readings), statistics.median(busy for _, busy in readings)


def _share_of_compute(communicator: Communicator, device: torch.device, busy: float) -> float:
    """The share of a transfer that takes time from computing cores. ``busy``: this process's share of a core."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", communicator.world_size))
    spare_cores = len(os.sched_getaffinity(0)) > ranks_here * torch.get_num_threads()
    if device.type != "cpu" or spare_cores:
        return 0.0
    # If all ranks are on this machine, a waiting rank waits for one that uses the same cores.
    return 1.0 if ranks_here >= communicator.world_size else min(busy, 1.0)


def _time_all_reduce(communicator: Communicator, device: torch.device, nbytes: int) -> tuple[float, float]:
    """Seconds on the clock, and seconds of processor time this process spent."""
    tensor = communicator.allocate(nbytes // 4, torch.float32, device)
    _wait_for_device(device)
    started, busy = time.perf_counter(), time.process_time()
    communicator.all_reduce(tensor).wait()
    _wait_for_device(device)
    times = time.perf_counter() - started, time.process_time() - busy
    # Gloo's threads hold a tensor until their next collective; its memory need not wait that long.
    storage = tensor.untyped_storage()
    if storage.resizable():
        storage.resize_(0)
    return times


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
