"""gradsync's class in the place of torch's, for libraries that wrap models themselves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradsync import DistributedDataParallel
from tests.ranks import pool_of
from tests.scripts import run_scripts

TorchDDP = nn.parallel.DistributedDataParallel
SCRIPT = Path(__file__).parents[1] / "replaced_class.py"


@pytest.mark.program
@pytest.mark.timeout(170)
def test_trainer_and_fabric_train_to_the_bits_they_train_to_over_torch(tmp_path: Path) -> None:
    """All variants in one start of two processes, whose imports take longer than the trainings."""
    # Not Lightning itself, which would stay in the zygote with torch's class, but what it takes its time for.
    libraries = ("transformers.trainer", "torchmetrics", "accelerate", "torch._dynamo")
    ran = run_scripts([SCRIPT], ranks=2, folder=tmp_path, timeout=150, preload=libraries)[SCRIPT]
    assert ran.error is None
    told = [json.loads(line) for line in ran.output.splitlines() if line.startswith('{"')]
    ways = {f"{way}, accumulation {n}": "" for way in ("by_transformers", "by_fabric") for n in (1, 4)}
    assert told == [{"2": {**ways, "ignored names": ""}, "1": {**ways, "ignored names": ""}}] * 2


class Watching(nn.Module):
    """Notes which wrapper the compiler would find during the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.found: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found = [each._get_active_ddp_module() for each in (TorchDDP, DistributedDataParallel)]
        output: torch.Tensor = self.layer(x)
        return output


class Derived(DistributedDataParallel):
    """A user's own class."""


def who_is_active(torchs: bool) -> list[bool]:
    """Whether both classes name the wrapper, during the forward and after one that raised."""
    wrapper = Derived(Watching())
    if torchs:  # composable `replicate` sets the attribute on the class it has by that name
        DistributedDataParallel._active_ddp_module = None
    wrapper(torch.ones(1, 2))
    told = [each is wrapper for each in wrapper.module.found]
    with pytest.raises(TypeError):
        wrapper(1, 2, 3)
    told += [each._get_active_ddp_module() is None for each in (TorchDDP, DistributedDataParallel)]  # type: ignore[attr-defined]
    return told


@pytest.mark.parametrize("torchs", [False, True])
def test_the_compiler_finds_the_running_wrapper_by_either_class(torchs: bool) -> None:
    assert pool_of(2).run(who_is_active, torchs) == [[True] * 4] * 2
