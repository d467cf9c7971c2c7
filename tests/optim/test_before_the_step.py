"""What comes between a backward and ``step()``: a sharded optimizer makes of it what a plain one does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradsync import DistributedDataParallel
from gradsync.communicator import choose_communicator
from gradsync.optim.sharded import ShardedOptimizer
from tests.optim.training import (
    assert_as_plain,
    batch,
    filled,
    groups_of,
    in_threads_and_processes,
    make,
    parameters_of,
)
from tests.ranks import Ranks

pytestmark = pytest.mark.timeout(120)


# A layer is a bucket.
TINY = 7e-4


class Branches(nn.Module):
    """A chain of layers, of which the middle one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(7))
        self.skipped: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != self.skipped:
                x = torch.tanh(layer(x))
        return x


def wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(filled(Branches().double()), bucket_cap_mb=TINY, find_unused_parameters=True)


Disturb = Callable[[DistributedDataParallel, Any, int, int], None]


def train(kind: str, disturb: Disturb) -> list[torch.Tensor]:
    """Parameters after some steps, of which every second is disturbed."""
    rank = choose_communicator().rank
    model = wrapped()
    optimizer = make(kind, torch.optim.AdamW, model, groups_of(model), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    for step in range(12):
        model(batch(rank, step, width=9)).square().mean().backward()
        if step % 2:
            disturb(model, optimizer, rank, step)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return parameters_of(model)


def train_scaled(kind: str) -> list[torch.Tensor]:
    rank, model, scaler = choose_communicator().rank, wrapped(), torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = make(kind, torch.optim.AdamW, model, groups_of(model), lr=1e-2)
    for step in range(6):
        scaler.scale(model(batch(rank, step, width=9)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return parameters_of(model)


def train_with_late_weights(kind: str) -> list[torch.Tensor]:
    rank, model = choose_communicator().rank, wrapped()
    optimizer = make(kind, torch.optim.AdamW, model, groups_of(model), lr=1e-2)
    for step in range(8):
        x = batch(rank, step, width=9)
        for micro in model.accumulate(range(2)):
            model.backward(model(x * (1 + micro)).square().sum(), weight=1.0 + (rank + step + micro) % 3)
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model)


def change_options(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.7


def clip_values(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def clip_norms(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def clip_our_norms(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    model.clip_grad_norm_(1e-2)


def change_parameters(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    for parameter in model.parameters():
        # Which no version tells of.
        parameter.data.mul_(0.9)


def replace_gradients(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    parameter = list(model.parameters())[step % 14]
    parameter.grad = torch.full_like(parameter, 0.1)


def zero_gradients(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)


def drop_gradients(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()


def drop_one_gradient(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    list(model.parameters())[step % 14].grad = None


def add_a_backward(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    model(batch(rank, 100 + step, width=9)).square().mean().backward()


def skip_a_step(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    drop_gradients(model, optimizer, rank, step)
    add_a_backward(model, optimizer, rank, step)


def skip_a_layer(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    """In the next window, on all ranks."""
    model.module.skipped = step % 7


def consolidate(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.consolidate()
        optimizer.load_state_dict(optimizer.state_dict())


def look_alone(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    """One rank does something that changes no number, but might have."""
    if rank == step // 2 % 2:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1.0)


@pytest.mark.parametrize("train", [train_scaled, train_with_late_weights])
@in_threads_and_processes
def test_neither_scales_nor_late_weights_are_what_a_step_uses(ranks: Ranks, train: Callable[..., Any]) -> None:
    assert_as_plain(ranks, train)


@pytest.mark.breadth
@pytest.mark.parametrize(
    "disturb",
    [
        *(change_options, clip_values, clip_norms, clip_our_norms, change_parameters, replace_gradients),
        *(zero_gradients, drop_gradients, drop_one_gradient, add_a_backward, skip_a_step, skip_a_layer),
        *(consolidate, look_alone),
    ],
    ids=lambda disturb: disturb.__name__,
)
@in_threads_and_processes
def test_what_comes_between_backward_and_step_counts(ranks: Ranks, disturb: Disturb) -> None:
    assert_as_plain(ranks, train, disturb)
