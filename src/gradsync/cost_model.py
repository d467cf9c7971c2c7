"""How large a bucket should be: a latency and a bandwidth fitted to the group, and the size they call for.

Reducing S bytes in buckets of b bytes costs about ``S/b · latency`` for starting them and, after backward has ended,
``b / bandwidth`` for the last one, which nothing hides. The sum is smallest at ``b = sqrt(S · latency · bandwidth)``.
"""

import math
import statistics
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from gradsync.bucket_layout import BucketCaps
from gradsync.communicator import Communicator

__all__ = ["LinkCost", "auto_caps", "measure_link"]

SMALL_BYTES = 4 * 1024
LARGE_BYTES = 4 * 1024 * 1024
REPEATS = 5
MIN_BUCKET_BYTES = 256 * 1024
MAX_BUCKET_BYTES = 64 * 1024 * 1024

# The engine's own work for a bucket (gathering, starting, finishing) is latency too.
HOST_SECONDS_PER_BUCKET = 100e-6


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """An all-reduce of n bytes takes ``latency + n · seconds_per_byte``."""

    latency: float
    seconds_per_byte: float

    def best_bucket_bytes(self, total_bytes: int) -> int:
        latency = self.latency + HOST_SECONDS_PER_BUCKET
        best = math.sqrt(max(total_bytes, 1) * latency / self.seconds_per_byte)
        return int(min(max(best, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES))


# What was measured, by the process group (or communicator) it was measured on.
_measured: "weakref.WeakKeyDictionary[Any, LinkCost]" = weakref.WeakKeyDictionary()


def auto_caps(communicator: Communicator, device: torch.device, total_bytes: int) -> BucketCaps:
    """Caps by the cost model: the best size, with smaller buckets at the end, where nothing hides them."""
    best = measure_link(communicator, device).best_bucket_bytes(total_bytes)
    return BucketCaps(caps=(max(best // 4, MIN_BUCKET_BYTES // 4), max(best // 2, 1), best), from_the_end=True)


def measure_link(communicator: Communicator, device: torch.device) -> LinkCost:
    """Fit the cost by timing a few all-reduces. Collective; the slowest rank's times count, so all ranks agree."""
    key = getattr(communicator, "group", communicator)
    cost = _measured.get(key)
    if cost is None:
        _time_all_reduce(communicator, device, LARGE_BYTES)
        small = statistics.median(_time_all_reduce(communicator, device, SMALL_BYTES) for _ in range(REPEATS))
        large = statistics.median(_time_all_reduce(communicator, device, LARGE_BYTES) for _ in range(REPEATS))
        times = torch.tensor([small, large], dtype=torch.float64, device=communicator.device)
        communicator.all_reduce(times, "max").wait()
        small, large = times.tolist()
        per_byte = max(large - small, large * 0.05, 1e-9) / (LARGE_BYTES - SMALL_BYTES)
        cost = LinkCost(latency=max(small - SMALL_BYTES * per_byte, 1e-7), seconds_per_byte=per_byte)
        _measured[key] = cost
    return cost


def _time_all_reduce(communicator: Communicator, device: torch.device, nbytes: int) -> float:
    tensor = communicator.allocate(nbytes // 4, torch.float32, device)
    _wait_for_device(device)
    started = time.perf_counter()
    communicator.all_reduce(tensor).wait()
    _wait_for_device(device)
    return time.perf_counter() - started


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
