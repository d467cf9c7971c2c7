"""The device of a cell's ranks, CPU or GPU: when a step has ended there, and how its parts and memory are measured.

A GPU works asynchronously, so times are read from events, and only after :meth:`Device.finish`.
"""

import os
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.cuda import nccl

from gradsync.tools.bench.memory import PeakMemory, memory_unreadable
from gradsync.tools.lab.emulated import EmulatedGpuModel, EmulatedModel, Profile

__all__ = ["CPU", "DEVICES", "Cpu", "Cuda", "Device"]


class MemoryMeter(Protocol):
    """Reads the most memory that was used since it was asked last, beyond what was used before it was opened."""

    def take(self) -> int: ...


class Device(ABC):
    """One rank's device. It is opened in the rank, before the process group is made."""

    name: str
    backend: str
    torch_device: torch.device
    # A cell may take this many times as long as it should, and some seconds more, before it counts as hung.
    patience: tuple[float, float] = (5.0, 120.0)

    @abstractmethod
    def open(self) -> dict[str, str]:
        """Make it the device of this process; what a reader of the results has to know of it."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until everything that was started is done."""

    @abstractmethod
    def mark(self) -> Any:
        """This moment of the work."""

    @abstractmethod
    def seconds(self, began: Any, ended: Any) -> float:
        """Between two marks."""

    @abstractmethod
    def emulated(self, profile: Profile) -> nn.Module:
        """A model that takes the time of the profile, and leaves the device to others meanwhile."""

    @abstractmethod
    def memory(self) -> AbstractContextManager[MemoryMeter]: ...

    def memory_unreadable(self) -> str | None:
        """Why memory cannot be measured, or None."""
        return None


class Cpu(Device):
    """Ranks over Gloo. Work is done when the host has done it."""

    name, backend, torch_device = "cpu", "gloo", torch.device("cpu")

    def open(self) -> dict[str, str]:
        return {}

    def finish(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, began: Any, ended: Any) -> float:
        return float(ended - began)

    def emulated(self, profile: Profile) -> nn.Module:
        return EmulatedModel(profile)

    def memory(self) -> AbstractContextManager[MemoryMeter]:
        return PeakMemory()

    def memory_unreadable(self) -> str | None:
        return memory_unreadable()


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

    def memory(self) -> AbstractContextManager[MemoryMeter]:
        return _AllocatedPeak()


class _AllocatedPeak:
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


CPU = Cpu()
# Made where they are used: a rank opens its own.
DEVICES: dict[str, type[Device]] = {each.name: each for each in (Cpu, Cuda)}
