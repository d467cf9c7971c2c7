"""Hooks that remember something by bucket, as torch's PowerSGD does: nothing that it holds back may get lost.

PowerSGD sends an approximation and keeps the rest for the next step. Parameters stand still here, so that the gradients
of every step are known beforehand, and over any number of steps

    sum of what was sent  +  mean over ranks of what is held back  =  sum of the exact means.

A layout that changes under the hook's feet breaks that: what was held back is added to other parameters, or dropped.
"""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from gradsync import DistributedDataParallel
from gradsync.communicator import choose_communicator
from tests.ranks import RankPool, pool_of

pytestmark = pytest.mark.timeout(60)

WIDTH = 12
LAYERS = 4
STEPS = 60
# The order of gradients changes after so many steps, before a check of the order is due.
TURN = 10
# Each layer has a bucket of its own, in MiB.
LAYER = WIDTH * (WIDTH + 1) * 8 / 2**20


@pytest.fixture(scope="module")
def pair() -> RankPool:
    return pool_of(2)


class Branches(nn.Module):
    """Layers whose gradients come in the order in which they are called, last first; their gradients do not depend on
    the order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS))
        for number, layer in enumerate(self.layers):
            generator = torch.Generator().manual_seed(number)
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, x: torch.Tensor, turned: bool) -> torch.Tensor:
        layers = reversed(self.layers) if turned else self.layers
        return torch.stack([layer(x).tanh().square().mean() for layer in layers]).sum()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)


def exact_sum(world_size: int, steps: range) -> list[torch.Tensor]:
    module = Branches()
    for step in steps:
        for rank in range(world_size):
            (module(batch(step, rank), step >= TURN) / world_size).backward()
    return [parameter.grad for parameter in module.parameters()]


def new_state() -> PowerSGDState:
    return PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1, random_seed=7
    )


def held_back(model: DistributedDataParallel, state: PowerSGDState) -> list[torch.Tensor]:
    """By parameter, the mean over ranks."""
    communicator = choose_communicator()
    kept = {id(parameter): torch.zeros_like(parameter) for parameter in model.parameters()}
    for index, error in state.error_dict.items():
        bucket = model.synchronizer.buckets[index]
        for parameter, view in zip(bucket.parameters, bucket.views_of(error), strict=True):
            kept[id(parameter)] = view.clone()
    for error in kept.values():
        communicator.all_reduce(error).wait()
    return [kept[id(parameter)] / communicator.world_size for parameter in model.parameters()]


def run(model: Any, steps: range, sent: list[torch.Tensor]) -> None:
    rank = choose_communicator().rank
    for step in steps:
        model.zero_grad()
        model(batch(step, rank), step >= TURN).backward()
        for total, parameter in zip(sent, model.parameters(), strict=True):
            total += parameter.grad


def nothing_sent(model: nn.Module) -> list[torch.Tensor]:
    return [torch.zeros_like(parameter) for parameter in model.parameters()]


def conserve(cap: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    model = DistributedDataParallel(Branches(), bucket_cap_mb=cap)
    state = new_state()
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    sent = nothing_sent(model)
    run(model, range(STEPS), sent)
    return sent, held_back(model, state), len(model.synchronizer.buckets)


@pytest.mark.breadth
@pytest.mark.parametrize("cap", [None, LAYER, 4 * LAYER])
def test_what_was_sent_and_what_is_held_back_are_all_there_was(pair: RankPool, cap: Any) -> None:
    """With the tuner on, which is the default, with a bucket for each layer, and with one for all; the order of
    gradients changes midway."""
    expected = exact_sum(2, range(STEPS))
    for sent, kept, buckets in pair.run(conserve, cap):
        assert buckets == (LAYERS if cap == LAYER else buckets)
        assert any(rest.abs().max() > 1e-3 for rest in kept)
        for there, rest, exact in zip(sent, kept, expected, strict=True):
            torch.testing.assert_close(there + rest, exact, rtol=1e-9, atol=1e-9)


def follow_torch(torchs: bool) -> list[torch.Tensor]:
    """One bucket, and one order, as torch's wrapper does not learn another."""
    module = Branches()
    wrap: Any = nn.parallel.DistributedDataParallel if torchs else DistributedDataParallel
    model = wrap(module, bucket_cap_mb=100)
    model.register_comm_hook(new_state(), powerSGD_hook.powerSGD_hook)
    sent = nothing_sent(model)
    rank = choose_communicator().rank
    for step in range(STEPS):
        model.zero_grad()
        model(batch(step, rank), False).backward()
        for total, parameter in zip(sent, model.parameters(), strict=True):
            total += parameter.grad
    return sent


def test_sixty_steps_are_those_of_torchs_wrapper(pair: RankPool) -> None:
    for ours, theirs in zip(pair.run(follow_torch, False), pair.run(follow_torch, True), strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)


def go_on_after_saving() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The hook's state is pickled in the middle, as torch's is meant to be, with the layout it belongs to."""
    model = DistributedDataParallel(Branches(), bucket_cap_mb=LAYER)
    state = new_state()
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    sent = nothing_sent(model)
    run(model, range(TURN + 5), sent)
    file = io.BytesIO()
    torch.save(state, file)
    layout = copy.deepcopy(model.synchronizer.state_dict())

    file.seek(0)
    later = DistributedDataParallel(Branches(), bucket_cap_mb=LAYER)
    state = torch.load(file, weights_only=False)
    later.synchronizer.load_state_dict(layout)
    later.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    run(later, range(TURN + 5, STEPS), sent)
    return sent, held_back(later, state)


@pytest.mark.breadth
@pytest.mark.filterwarnings("ignore")
def test_a_saved_state_goes_on_in_the_layout_it_belongs_to(pair: RankPool) -> None:
    expected = exact_sum(2, range(STEPS))
    for sent, kept in pair.run(go_on_after_saving):
        for there, rest, exact in zip(sent, kept, expected, strict=True):
            torch.testing.assert_close(there + rest, exact, rtol=1e-9, atol=1e-9)
