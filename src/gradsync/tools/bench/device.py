"""Where the ranks of a cell run, and their device: when a step has ended there, how parts and memory are measured.

A GPU works asynchronously, so times are read from events, and only after :meth:`Device.finish`.

Memory that ranks share is counted once. Linux's proportional set size divides every page by the number of processes
that have it mapped, so the sum over ranks is the memory really in use. It has no high-water mark: a thread reads it
again and again, which is possible while torch computes, and keeps the largest value.
"""

import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.cuda import nccl

from gradsync.base.errors import ConfigurationError
from gradsync.tools.bench.record import Cell
from gradsync.tools.lab.emulated import EmulatedGpuModel, EmulatedModel, Profile
from gradsync.tools.lab.gpu import SharedGpu, SharedGpuPlan
from gradsync.tools.lab.lab import Lab, LabPlan, Rate

__all__ = [
    "CPU",
    "DEVICES",
    "Cuda",
    "Device",
    "GpuSharing",
    "PeakMemory",
    "place_of",
    "used_bytes",
]

# Named, so that what a killed run has left is found and removed by the next.
LAB_NAME = "bench"
# Of NCCL, where ranks share a GPU: more leave less of it to compute.
CHANNELS = 4
ROLLUP = Path("/proc/self/smaps_rollup")
PAUSE_SECONDS = 0.002


def used_bytes() -> int:
    """The proportional set size of this process."""
    for line in ROLLUP.read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ConfigurationError(f"expected a line with Pss in {ROLLUP}, found none. Run on Linux 4.14 or later")


class PeakMemory:
    """The most memory that this process had while the context was open, beyond what it had before."""

    def __init__(self) -> None:
        self.before = 0
        self.peak = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak memory", daemon=True)

    def take(self) -> int:
        """The growth since the last call; the next begins from what is used now."""
        self._see()
        with self._lock:
            growth, self.peak = self.peak - self.before, 0
        return growth

    def __enter__(self) -> Self:
        self.before = self.peak = used_bytes()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._see()

    def _watch(self) -> None:
        while not self._stop.wait(PAUSE_SECONDS):
            self._see()

    def _see(self) -> None:
        # What was read before a call of take() must not be noted after it.
        with self._lock:
            self.peak = max(self.peak, used_bytes())


class AllocatedPeak:
    """What torch's allocator has handed out. Memory that NCCL takes for itself is not in it."""

    def __init__(self) -> None:
        self._before = 0

    def take(self) -> int:
        peak = torch.cuda.max_memory_allocated() - self._before
        torch.cuda.reset_peak_memory_stats()
        return peak

    def __enter__(self) -> Self:
        torch.cuda.synchronize()
        self._before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class Device:
    """One rank's device: here the CPU, over Gloo. It is opened in the rank, before the process group is made."""

    name, backend, torch_device = "cpu", "gloo", torch.device("cpu")
    # A cell may take this many times as long as it should, and some seconds more, before it counts as hung.
    patience: tuple[float, float] = (5.0, 120.0)

    def open(self) -> dict[str, str]:
        """Make it the device of this process; what a reader of the results has to know of it."""
        return {}

    def finish(self) -> None:
        """Wait until everything that was started is done: on the CPU, it is."""

    def mark(self) -> Any:
        """A mark of this moment of the work."""
        return time.perf_counter()

    def seconds(self, began: Any, ended: Any) -> float:
        """The seconds between two marks."""
        return float(ended - began)

    def emulated(self, profile: Profile) -> nn.Module:
        """A model that takes the time of the profile, and leaves the device to others meanwhile."""
        return EmulatedModel(profile)

    def memory(self) -> "AbstractContextManager[PeakMemory | AllocatedPeak]":
        """Reads the most memory that was used since it was asked last, beyond what was used before it was opened."""
        return PeakMemory()

    def memory_unreadable(self) -> str | None:
        """Why memory cannot be measured, or None."""
        return None if ROLLUP.exists() else "this system does not tell the memory of a process"


class Cuda(Device):
    """Ranks over NCCL, each on the GPU of its local rank."""

    name, backend, torch_device = "cuda", "nccl", torch.device("cuda")
    # Nothing else slows a GPU down, as it does cores.
    patience = (2.0, 60.0)

    def open(self) -> dict[str, str]:
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        self.torch_device = torch.device("cuda", local)
        version = ".".join(map(str, nccl.version()))
        return {"gpu": torch.cuda.get_device_name(), "NCCL": version, "CUDA": str(torch.version.cuda)}

    def finish(self) -> None:
        torch.cuda.synchronize()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) / 1e3

    def emulated(self, profile: Profile) -> nn.Module:
        return EmulatedGpuModel(profile)

    def memory(self) -> "AbstractContextManager[PeakMemory | AllocatedPeak]":
        return AllocatedPeak()

    def memory_unreadable(self) -> str | None:
        return None


CPU = Device()
# Made where they are used: a rank opens its own.
DEVICES: dict[str, type[Device]] = {each.name: each for each in (Device, Cuda)}


class GpuSharing(StrEnum):
    """How the ranks of a cell have their GPUs, as the report says it."""

    OWN = "one GPU per rank"
    MPS = "ranks share one GPU under MPS"
    SLICES = "ranks share one GPU by time slices"


def place_of(cell: Cell) -> "AbstractContextManager[Lab | SharedGpu | None]":
    """The place where the ranks of a cell run while it is open: hosts, a shared GPU, or None for this machine alone."""
    if cell.hosts is not None:
        rate = None if cell.rate is None else Rate.parse(cell.rate)
        return Lab(LabPlan(name=LAB_NAME, hosts=cell.hosts, rate=rate))
    if cell.sharing in (GpuSharing.MPS, GpuSharing.SLICES):
        return SharedGpu(SharedGpuPlan(ranks=cell.ranks, mps=cell.sharing == GpuSharing.MPS, channels=CHANNELS))
    return nullcontext()
