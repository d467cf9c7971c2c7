"""``optimizer.step(closure)``: the backward that ends a window may run inside the step, as Lightning has it."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync import MisuseError
from gradsync.communicator import choose_communicator
from tests.core.common import on
from tests.ranks import Ranks

pytestmark = pytest.mark.timeout(120)

STEPS = 4


def make_model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def run_steps(model: Any, micro_batches: int, ranks: Sequence[int], how: str) -> list[torch.Tensor]:
    """All micro-batches of these ranks, those but the last under no_sync(), the last inside step()."""
    optimizer = make_optimizer(model.parameters())
    for step in range(STEPS):

        def backward(micro: int, step: int = step) -> torch.Tensor:
            losses = [model(batch(step, micro, rank)).square().mean() for rank in ranks]
            loss = torch.stack(losses).mean() / micro_batches
            if micro == 0:
                optimizer.zero_grad()
            loss.backward()
            return loss

        for micro in range(micro_batches - 1):
            with model.no_sync() if how != "alone" else nullcontext():
                backward(micro)

        def closure(backward: Any = backward) -> torch.Tensor:
            loss: torch.Tensor = backward(micro_batches - 1)
            return loss

        if how == "by name":
            optimizer.step(closure=closure)
        else:
            optimizer.step(closure)
    return [parameter.detach().clone() for parameter in model.parameters()]


def train(micro_batches: int, how: str) -> list[torch.Tensor]:
    model = gradsync.DistributedDataParallel(make_model(), bucket_cap_mb=1e-4)
    return run_steps(model, micro_batches, [choose_communicator().rank], how)


@pytest.mark.parametrize("how", ["by place", "by name"])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_the_last_micro_batch_may_run_inside_the_step(ranks: Ranks, micro_batches: int, how: str) -> None:
    expected = run_steps(make_model(), micro_batches, range(ranks.world_size), "alone")
    for ours in ranks.run(train, micro_batches, how):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_a_closure_may_be_called_several_times(ranks: Ranks) -> None:
    """As those of LBFGS are, which chooses its steps by losses that each rank has alone."""
    for first, second, expected in ranks.run(call_twice):
        torch.testing.assert_close(first, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(second, expected, rtol=1e-12, atol=1e-12)


class CallsTwice(torch.optim.Optimizer):
    """Computes gradients twice, and notes them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.seen: list[list[torch.Tensor]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _ in range(2):
            with torch.enable_grad():
                closure()
            self.seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])


def call_twice() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    communicator = choose_communicator()
    plain = make_model()
    twin = copy.deepcopy(plain)
    model: Any = gradsync.DistributedDataParallel(plain, bucket_cap_mb=1e-4)
    optimizer = CallsTwice(model.parameters())

    def closure() -> None:
        optimizer.zero_grad()
        model(batch(0, 0, communicator.rank)).square().mean().backward()

    optimizer.step(closure)
    twin(batch(0, 0, communicator.rank)).square().mean().backward()
    gradsync.average_gradients(twin)
    return *optimizer.seen, [parameter.grad for parameter in twin.parameters()]  # type: ignore[return-value]


def step_without_a_loss() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inside the step only rank 0 has a backward."""
    communicator = choose_communicator()
    plain = make_model()
    twin = copy.deepcopy(plain)
    model: Any = gradsync.DistributedDataParallel(plain, bucket_cap_mb=1e-4)
    optimizer = make_optimizer(model.parameters())

    def closure() -> None:
        optimizer.zero_grad()
        loss = model(batch(0, 0, communicator.rank)).square().mean()
        if communicator.rank == 0:
            loss.backward()

    optimizer.step(closure)
    if communicator.rank == 0:
        twin(batch(0, 0, communicator.rank)).square().mean().backward()
    gradsync.average_gradients(twin)
    return [p.grad for p in model.parameters()], [p.grad for p in twin.parameters()]  # type: ignore[misc]


def test_a_rank_without_a_backward_in_its_closure_takes_part(ranks: Ranks) -> None:
    for ours, expected in ranks.run(step_without_a_loss):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def step_on_own(inside: str) -> str:
    """A closure that leaves gradients of this rank alone, and what follows."""
    rank = choose_communicator().rank
    model: Any = gradsync.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with model.no_sync():
        model(batch(0, 0, rank)).square().mean().backward()

    def closure() -> None:
        with model.no_sync() if inside == "no_sync" else nullcontext():
            if inside == "no_sync":
                model(batch(0, 1, rank)).square().mean().backward()

    with pytest.raises(MisuseError, match="gradients that only this rank has") as refused:
        optimizer.step(closure)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    # Nothing is broken by it.
    model(batch(0, 2, rank)).square().mean().backward()
    optimizer.step()
    return str(refused.value)


@pytest.mark.parametrize("inside", ["no_sync", "nothing"])
def test_a_closure_that_does_not_synchronize_is_refused_after_it_has_run(ranks: Ranks, inside: str) -> None:
    assert all("no_sync()" in words for words in ranks.run(step_on_own, inside))


def abstain_after_an_empty_closure() -> list[bool]:
    rank = choose_communicator().rank
    model: Any = gradsync.DistributedDataParallel(make_model(), bucket_cap_mb=1e-4)
    optimizer = gradsync.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
    skipped = []
    for step in range(STEPS):
        if step == 1:
            # No rank has a backward in it.
            optimizer.step(lambda step=step: model(batch(step, 0, rank)).sum().detach())
        elif step == 2 and rank == 1:
            model.abstain("out of memory")
            optimizer.step()
        else:
            model(batch(step, 0, rank)).square().mean().backward()
            optimizer.step()
        skipped.append(model.step_was_skipped)
        model.zero_grad()
    return skipped


@on(("threads", 2), ("processes", 2))
def test_a_closure_that_has_a_forward_alone_ends_its_window(ranks: Ranks) -> None:
    """A rank may abstain from the next one: it is another window, although no gradient was there to be zeroed."""
    assert ranks.run(abstain_after_an_empty_closure) == [[False, False, True, False]] * 2
