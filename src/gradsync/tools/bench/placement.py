"""Which cells a scenario has on this machine: those with CPU ranks, or those over NCCL, on the GPUs that exist."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gradsync.base.errors import ConfigurationError, GradsyncError
from gradsync.tools.bench.device import GpuSharing
from gradsync.tools.bench.record import Cell
from gradsync.tools.bench.scenario import Scenario
from gradsync.tools.lab.gpu import SharedGpu, SharedGpuPlan

__all__ = ["OnGpu", "Placement", "find_placement"]

# With it torch counts GPUs without starting CUDA in this process, whose forks could not start it any more.
COUNT_ONLY = "PYTORCH_NVML_BASED_CUDA_CHECK"
# In the names of cells, tables and panels.
SHORT = {GpuSharing.OWN: "one GPU per rank", GpuSharing.MPS: "one GPU, MPS", GpuSharing.SLICES: "one GPU, time slices"}


class Placement:
    """CPU ranks over Gloo, on hosts of the lab where a cell wants some. ``notes`` are said before the first cell."""

    device = "cpu"
    notes: Sequence[str] = ()

    def cells(self, scenario: Scenario, *, quick: bool) -> list[Cell]:
        return scenario.cells(quick=quick)

    def without(self, case: str) -> str:
        """Why a case may be missing here."""
        return ""

    def scenarios(self, asked: Sequence[Scenario], *, all_of_them: bool) -> Sequence[Scenario]:
        """Those that have cells here; one that was asked for by its name must."""
        return asked


@dataclass(frozen=True, kw_only=True)
class OnGpu(Placement):
    """NCCL ranks: one per GPU where there are enough, else all on one GPU."""

    gpus: int
    # How they share it.
    sharing: GpuSharing
    notes: Sequence[str] = ()
    device = "cuda"

    @classmethod
    def find(cls) -> "OnGpu":
        os.environ.setdefault(COUNT_ONLY, "1")
        gpus = torch.cuda.device_count()
        if gpus == 0:
            raise ConfigurationError("--device cuda needs a GPU, and torch sees none here. Leave it out for CPU ranks")
        try:
            with SharedGpu(SharedGpuPlan(mps=True)):
                return cls(gpus=gpus, sharing=GpuSharing.MPS, notes=[])
        except GradsyncError as error:
            note = f"MPS is not used, so ranks that share a GPU take turns on it (time slices): {error}"
            return cls(gpus=gpus, sharing=GpuSharing.SLICES, notes=[note])

    def cells(self, scenario: Scenario, *, quick: bool) -> list[Cell]:
        return [self._placed(cell) for cell in scenario.gpu_cells(quick=quick)]

    def scenarios(self, asked: Sequence[Scenario], *, all_of_them: bool) -> Sequence[Scenario]:
        found = [each for each in asked if each.gpu_cells(quick=True)]
        if not all_of_them and len(found) < len(asked):
            raise ConfigurationError(f"{asked[0].name} runs on CPU ranks only: leave --device cuda out")
        return found

    def without(self, case: str) -> str:
        hosts = "host" in case or "bit/s" in case
        return " with --device cuda: hosts and links are those of CPU ranks" if hosts else " with --device cuda"

    def _placed(self, cell: Cell) -> Cell:
        sharing = GpuSharing.OWN if cell.ranks <= self.gpus else self.sharing
        return replace(cell, name=f"{cell.name}, {SHORT[sharing]}", sharing=str(sharing))


def find_placement(device: str) -> Placement:
    """By the name of the device."""
    if device not in ("cpu", "cuda"):
        raise ConfigurationError(f"--device is cpu or cuda, got {device!r}")
    return OnGpu.find() if device == "cuda" else Placement()
