"""What the tests of wrappers share: data that a rank and a step determine, copies of models, comparisons."""

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from gradsync.communicator import InProcessWorld, choose_communicator


def batch(rank: int, step: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (
        torch.randn(4, 6, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(4, 3, generator=generator, dtype=torch.float64).to(dtype),
    )


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    inputs, targets = batch(rank, step, next(model.parameters()).dtype)
    return mse_loss(model(inputs), targets)


def filled(model: nn.Module, seed: int = 0) -> Any:
    """Values from a generator of their own: ranks that are threads share torch's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def rank_here() -> int:
    return choose_communicator().rank


def alone() -> Any:
    """The only rank of its world."""
    return InProcessWorld(1).communicator(0)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def assert_same(ours: Any, theirs: Any, rtol: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol / 10)


def assert_same_bits(results: Sequence[Any]) -> None:
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


def by_torch_save(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def by_pickle(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


COPIERS: list[Callable[[Any], Any]] = [copy.deepcopy, by_pickle, by_torch_save]
