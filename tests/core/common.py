"""What tests of the engine share: the ranks they run on, and a model whose means can be told in the head."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.fuse import Fuse

__all__ = [
    "TINY",
    "Line",
    "filled",
    "gradients",
    "in_processes",
    "in_threads",
    "in_threads_and_processes",
    "on",
    "still",
]

# About 100 bytes: nearly every parameter has a bucket of its own.
TINY = 1e-4


def on(*kinds: tuple[str, int]) -> pytest.MarkDecorator:
    """Run a test on these ranks, its fixture ``ranks``: threads or processes, and how many."""
    return pytest.mark.parametrize("ranks", list(kinds), indirect=True, ids="{0[0]}-{0[1]}".format)


in_threads = on(("threads", 2))
in_processes = on(("processes", 2))
in_threads_and_processes = on(("threads", 3), ("processes", 2))


def filled(module: nn.Module, seed: int = 0) -> Any:
    """The same values on every rank. Ranks may be threads, which share torch's own random numbers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 2)
    return module


class Line(nn.Module):
    """Layers of one number each, whose gradients are ``x``, ``x + 1`` and so on; that of the second gets ``poison``.

    It may count its forwards in a buffer. Where it is lit, all gradients but one have come before its backward fails.
    """

    def __init__(self, layers: int = 3, dtype: torch.dtype = torch.float64, *, counts: bool = False) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones((), dtype=dtype)) for _ in range(layers))
        if counts:
            self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: float, poison: float = 0.0, *, fails: bool = False, lit: bool = False) -> torch.Tensor:
        for count in self.buffers():
            count += 1
        if fails:
            raise torch.OutOfMemoryError("in forward")
        terms = [scale * (x + number + (poison if number == 1 else 0.0)) for number, scale in enumerate(self.scales)]
        return Fuse.apply(torch.stack(terms[:-1]).sum(), lit) + terms[-1]


def gradients(model: nn.Module) -> list[Any]:
    """Those of parameters of one number each, or None."""
    return [None if parameter.grad is None else float(parameter.grad) for parameter in model.parameters()]


def still(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose steps end windows, and change nothing."""
    return torch.optim.SGD(model.parameters(), lr=0.0)
