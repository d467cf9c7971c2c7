"""gradsync's class in the place of torch's, for libraries that wrap models themselves."""

from typing import Any

import pytest
import torch
from torch import nn

from gradsync import DistributedDataParallel
from tests.ranks import pool_of

TorchDDP = nn.parallel.DistributedDataParallel


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
