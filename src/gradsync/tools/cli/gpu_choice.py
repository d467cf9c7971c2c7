"""Which GPUs the ranks of a command have: one each, or one that all of them share on request (``--one-gpu``).

What the options mean, how many ranks there are without ``--nproc``, and what is refused is the same for all commands.
"""

from dataclasses import dataclass

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.tools.cli.launching import usable_cores
from gradsync.tools.cli.options import refusing
from gradsync.tools.lab import SharedGpuPlan

__all__ = ["MPS_HELP", "ONE_GPU_HELP", "GpuChoice"]

MOST_CPU_RANKS = 4
ONE_GPU_HELP = "Several NCCL ranks on one GPU, in turns: to try what is for several."
MPS_HELP = "With --one-gpu: side by side, under a private MPS daemon."


@dataclass(frozen=True, kw_only=True)
class GpuChoice:
    """What a user has asked for."""

    one_gpu: bool = False
    mps: bool = False
    cpu: bool = False

    def __post_init__(self) -> None:
        if self.mps and not self.one_gpu:
            raise ConfigurationError("--mps says how ranks share a GPU: give --one-gpu, too")
        if self.one_gpu and self.cpu:
            raise ConfigurationError("--one-gpu puts all ranks on a GPU, and --cpu none: choose one of them")

    @property
    def default_ranks(self) -> int:
        if self.one_gpu:
            return SharedGpuPlan().ranks
        gpus = 0 if self.cpu else torch.cuda.device_count()
        return gpus or min(usable_cores(), MOST_CPU_RANKS)

    def sharing(self, ranks: int) -> SharedGpuPlan | None:
        """How so many ranks share a GPU; None if they do not."""
        if not self.one_gpu:
            return None
        if torch.cuda.device_count() == 0:
            raise ConfigurationError("--one-gpu needs a GPU, and torch sees none here")
        with refusing("--nproc"):
            return SharedGpuPlan(ranks=ranks, mps=self.mps)

    def too_many(self, ranks: int) -> str:
        """What to say of more ranks than GPUs; empty if there are enough, or none is wanted."""
        gpus = 0 if self.cpu or self.one_gpu else torch.cuda.device_count()
        if not 0 < gpus < ranks:
            return ""
        there = "there is 1" if gpus == 1 else f"there are {gpus}"
        return f"{ranks} ranks need {ranks} GPUs, and {there}: say --one-gpu to share one"
