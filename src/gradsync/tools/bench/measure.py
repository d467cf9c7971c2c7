"""Inside a rank: times variants of a step in interleaved rounds, with their bytes, on the CPU or a GPU.

Every round runs each variant once, in an order that changes from round to round and is the same on all ranks. A step is
timed between two points at which all ranks synchronize, on a separate group: what the variants send does not interfere
with it. A step ends when the device has finished it: a GPU works asynchronously, so times of parts are read from
events, and only after :meth:`Device.finish`. A cell may time blocks of several steps together, as on GPUs: nothing is
waited for between the steps of a block. The slowest rank's time counts. The bytes are those of the interface's counters
between the two points; the second synchronization itself is among them (some hundred bytes), and nothing is subtracted.

Memory that ranks share is counted once. Linux's proportional set size divides every page by the number of processes
that have it mapped, so the sum over ranks is the memory really in use. It has no high-water mark: a thread reads it
again and again, which is possible while torch computes, and keeps the largest value.
"""

import json
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.cuda import nccl

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator, InProcessWorld, ProcessGroupCommunicator
from gradsync.communicator.agreement import gather_bytes
from gradsync.tools.bench.record import LIMITS, Cell, RowFile, Sample
from gradsync.tools.lab.emulated import EmulatedGpuModel, EmulatedModel, Profile

__all__ = ["CPU", "DEVICES", "CellRounds", "Cuda", "Device", "LateParts", "Parts", "Progress", "Steady", "Step"]

ROLLUP = Path("/proc/self/smaps_rollup")
PAUSE_SECONDS = 0.002
ORDER_SEED = 0
# How many of several settings are tried again before one is called the best.
FINALISTS = 2


# -- memory and devices -----------------------------------------------------------------------------------------------


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


# -- rounds -----------------------------------------------------------------------------------------------------------

Parts = Mapping[str, float]
# Tells the seconds of parts of a step, once the device is done with it.
LateParts = Callable[[], Parts]
# Runs one step, and may return the seconds of parts of it.
Step = Callable[[], Parts | LateParts | None]


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Several steps in a row as one :data:`Step`, for what goes on from one into the next.

    ``step`` is run once before the clock starts, and ``flush`` after it has stopped; the time is that of one step.
    """

    step: Step
    flush: Callable[[], object]
    times: int

    def __call__(self) -> None:
        for _ in range(self.times):
            self.step()


# Reads how many bytes have left the interface.
Meter = Callable[[], int]
# Is returned on rank 0, between rounds, how many of how many are done.
Progress = Callable[[int, int], object]


class CellRounds:
    """What a scenario measures with, inside every rank of a cell."""

    def __init__(
        self,
        cell: Cell,
        rows: RowFile,
        *,
        progress: Progress = lambda done, total: None,
        meter: Meter = lambda: 0,
        device: Device = CPU,
    ) -> None:
        self.cell = cell
        self.device = device
        # A process may measure alone, without any group.
        self._control: Communicator = InProcessWorld(1).communicator(0)
        if dist.is_initialized():
            self._control = ProcessGroupCommunicator(dist.new_group(backend="gloo"))
        self.rank, self.world_size = self._control.rank, self._control.world_size
        self._rows = rows
        self._progress = progress
        self._meter = meter
        self._order = random.Random(ORDER_SEED)

    def fact(self, name: str, value: object) -> None:
        """Note something that a reader of the results has to know, as rank 0 sees it."""
        if self.rank == 0:
            self._rows.fact(name, value)

    def limits(self, *, compute: str, communication: Mapping[str, float]) -> None:
        """What bounds the variants: the one that only computes, and seconds of sending by variant, or as ``*``."""
        self.fact(LIMITS, {"compute": compute, "wire": dict(communication)})

    def absent(self, variant: str, reason: str) -> None:
        """A variant that does not run here."""
        if self.rank == 0:
            self._rows.write("absent", variant=variant, reason=reason)

    def run(self, variants: Mapping[str, Step]) -> None:
        """Run all rounds of the cell; the samples go to the raw file after each."""
        total = self.cell.warmup + self.cell.rounds
        for number in range(total):
            timings = self._round(variants)
            if self.rank == 0:
                if number >= self.cell.warmup:
                    self._write(number - self.cell.warmup, timings)
                self._progress(number + 1, total)

    def best(self, variants: Mapping[str, Step], *, warmup: int = 3, rounds: int = 5) -> str:
        """The fastest of some settings, from rounds that are not recorded; the same answer on all ranks.

        A few rounds with all of them tell the two fastest, and twice as many tell which of these it is.
        """
        if not variants:
            raise ConfigurationError("the best of no variants was asked for; give at least one")
        # A block has several steps.
        warmup, rounds = (-(-count // self.cell.block) for count in (warmup, rounds))
        for _ in range(warmup):
            self._round(variants)
        seconds: dict[str, list[float]] = {name: [] for name in variants}

        def fastest_first(names: Iterable[str], rounds: int) -> list[str]:
            tried = {name: variants[name] for name in names}
            for _ in range(rounds):
                for name, ranks in self._round(tried).items():
                    seconds[name].append(max(timing.seconds for timing in ranks))
            return sorted(tried, key=lambda name: statistics.median(seconds[name]))

        finalists = fastest_first(variants, rounds)[:FINALISTS]
        return fastest_first(finalists, 2 * rounds)[0] if len(finalists) > 1 else finalists[0]

    def _round(self, variants: Mapping[str, Step]) -> dict[str, list[Sample]]:
        own = {name: self._time(variants[name]) for name in self._order.sample(list(variants), len(variants))}
        return self._share({name: own[name] for name in variants})

    def mean(self, value: float) -> float:
        """The mean of the values of all ranks. Collective."""
        return statistics.fmean(json.loads(each) for each in gather_bytes(self._control, json.dumps(value).encode()))

    def _time(self, step: Step) -> Sample:
        self.device.finish()
        self.meet()
        steady = step if isinstance(step, Steady) else None
        before = self._meter()
        if steady is not None:
            steady.step()
        began = time.perf_counter()
        returned = [step() for _ in range(self.cell.block)]
        self.device.finish()
        seconds = time.perf_counter() - began
        if steady is not None:
            steady.flush()
        # A rank that is done first would otherwise miss what still passes through its interface.
        self.meet()
        times = self.cell.block * (1 if steady is None else steady.times)
        # Bytes of all steps: what the one before the clock left under way is among them.
        steps = times if steady is None else times + 1
        return Sample(seconds=seconds / times, sent=(self._meter() - before) // steps, parts=_mean_parts(returned))

    def meet(self) -> None:
        """Wait for all ranks, on a group that no variant uses."""
        if isinstance(self._control, ProcessGroupCommunicator):
            dist.barrier(group=self._control.group)

    def _share(self, own: Mapping[str, Sample]) -> dict[str, list[Sample]]:
        """Every rank's timings of a round, by variant."""
        text = json.dumps({name: asdict(timing) for name, timing in own.items()})
        everybody = [json.loads(answer) for answer in gather_bytes(self._control, text.encode())]
        return {name: [Sample(**rank[name]) for rank in everybody] for name in own}

    def _write(self, number: int, timings: Mapping[str, Sequence[Sample]]) -> None:
        for name, ranks in timings.items():
            slowest = max(ranks, key=lambda timing: timing.seconds)
            everyone = {"ranks": [timing.seconds for timing in ranks], "sent": max(timing.sent for timing in ranks)}
            self._rows.write("sample", variant=name, round=number, **asdict(slowest) | everyone)


def _mean_parts(returned: Sequence[Parts | LateParts | None]) -> Parts:
    """The mean of the parts over the steps of a block."""
    known = [each() if callable(each) else each for each in returned if each is not None]
    return {name: statistics.fmean(each[name] for each in known) for name in (known[0] if known else {})}
