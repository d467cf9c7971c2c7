"""Error messages that name the option a user typed, where the library knows its values by other names."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.tools.cli.launching import usable_cores
from gradsync.tools.lab.gpu import SharedGpuPlan

__all__ = ["MPS_HELP", "ONE_GPU_HELP", "OPTION", "GpuChoice", "refusing"]

# As it is typed: not inside of a word, and not what somebody gave as a value, such as '--foo' or -inf.
OPTION = re.compile(r"(?<![\w'\"-])--[a-z][a-z-]*\b")


@contextmanager
def refusing(option: str) -> Iterator[None]:
    """Put ``option`` in front of a :class:`~gradsync.base.errors.ConfigurationError` that names no option."""
    try:
        yield
    except ConfigurationError as error:
        if OPTION.search(str(error)):
            raise
        raise ConfigurationError(f"{option}: {error}") from error


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
