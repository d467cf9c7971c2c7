"""What the tests of sharded and overlapped optimizers train, and how they compare it with a plain optimizer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from gradsync import DistributedDataParallel
from gradsync.communicator import choose_communicator
from gradsync.optim.sharded import ShardedOptimizer
from tests.ranks import Ranks

in_threads_and_processes = pytest.mark.parametrize(
    "ranks", [("threads", 3), ("processes", 2)], indirect=True, ids="{0[0]}-{0[1]}".format
)

# Some 2000 bytes: a bucket has a layer or two, and shares end in the middle of parameters.
TINY = 2e-3


def filled(module: nn.Module) -> nn.Module:
    """With numbers that do not hang on torch's generator, which ranks that are threads would share."""
    for number, parameter in enumerate(module.parameters()):
        values = torch.arange(parameter.numel(), dtype=torch.float64).add(number).mul(1.7).sin().mul(0.5)
        parameter.data.copy_(values.view(parameter.shape))
    return module


def net() -> nn.Module:
    layers = nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 11), nn.Tanh(), nn.Linear(11, 3)
    return filled(nn.Sequential(*layers).double())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-2},
    ]


def batch(rank: int, step: int, micro: int = 0, width: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(97 * step + 10 * micro + rank)
    return torch.randn(4, width, dtype=torch.float64, generator=generator)


def make(kind: str, optimizer_class: Any, model: DistributedDataParallel, params: Any = None, **options: Any) -> Any:
    optimizer = optimizer_class(list(model.parameters()) if params is None else params, **options)
    return ShardedOptimizer(optimizer, model) if kind == "sharded" else optimizer


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(ours: Sequence[list[torch.Tensor]], theirs: list[torch.Tensor]) -> None:
    for mine in ours:
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
        assert all(map(torch.equal, mine, ours[0]))


def assert_as_plain(ranks: Ranks, train: Callable[..., list[torch.Tensor]], *args: Any, kind: str = "sharded") -> None:
    """``train(kind, *args)`` ends with the parameters of ``train("plain", *args)``, the same bits on all ranks."""
    theirs = ranks.run(train, "plain", *args)[0]
    assert_same(ranks.run(train, kind, *args), theirs)


def train_step(model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def take_steps(model: nn.Module, optimizer: Any, steps: Iterable[int], width: int = 7) -> None:
    """Train on this rank's batches."""
    for step in steps:
        train_step(model, optimizer, batch(choose_communicator().rank, step, width=width))
