"""Where the ranks of a cell run: on hosts of a lab, on this machine, on one GPU each, or on a shared one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from gradsync.tools.bench.record import Cell
from gradsync.tools.lab import Lab, LabPlan, Rate, SharedGpu, SharedGpuPlan, fork_gpu_ranks
from gradsync.tools.lab.lab import fork_ranks

__all__ = ["CellRanks", "Sharing", "ranks_of"]

# Named, so that what a killed run has left is found and removed by the next.
LAB_NAME = "bench"
# Of NCCL, where ranks share a GPU: more leave less of it to compute.
CHANNELS = 4


class Sharing(StrEnum):
    """How the ranks of a cell have their GPUs, as the report says it."""

    OWN = "one GPU per rank"
    MPS = "ranks share one GPU under MPS"
    SLICES = "ranks share one GPU by time slices"


@dataclass(frozen=True, kw_only=True)
class CellRanks:
    """The ranks of a cell on the hosts of ``lab``, or on this machine."""

    lab: Lab | None = None

    def fork(self, cell: Cell, function: Callable[[], object], *, timeout: float) -> None:
        """``function()`` in every rank."""
        fork_ranks(self.lab, function, ranks_per_host=cell.ranks_per_host, timeout=timeout)


@dataclass(frozen=True, kw_only=True)
class SharedGpuRanks(CellRanks):
    """The ranks of a cell on one GPU."""

    gpu: SharedGpu

    def fork(self, cell: Cell, function: Callable[[], object], *, timeout: float) -> None:
        fork_gpu_ranks(self.gpu, function, timeout=timeout)


@contextmanager
def ranks_of(cell: Cell) -> Iterator[CellRanks]:
    """What the ranks of a cell need, as long as the context lasts."""
    if cell.hosts is not None:
        rate = None if cell.rate is None else Rate.parse(cell.rate)
        with Lab(LabPlan(name=LAB_NAME, hosts=cell.hosts, rate=rate)) as lab:
            yield CellRanks(lab=lab)
    elif cell.sharing in (Sharing.MPS, Sharing.SLICES):
        plan = SharedGpuPlan(ranks=cell.ranks, mps=cell.sharing == Sharing.MPS, channels=CHANNELS)
        with SharedGpu(plan) as gpu:
            yield SharedGpuRanks(gpu=gpu)
    else:
        yield CellRanks()
