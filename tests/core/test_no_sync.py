"""Contract points 3 and 4 where several models meet: each has its own `no_sync`, also one inside another.

`test_contract.py` has the laws for one model. Here two or three models share one loss, one process group and one
backward, and are compared with plain copies whose gradients `average_gradients` averages.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from gradsync import DistributedDataParallel, average_gradients, synchronize_gradients
from gradsync.communicator import choose_communicator
from tests.core.common import TINY, filled, on
from tests.core.test_misuse import batch, loss_of
from tests.ranks import Ranks

pytestmark = pytest.mark.timeout(60)

WIDTH = 4

in_threads_and_processes = on(("threads", 1), ("threads", 3), ("processes", 2))

# By name of a parameter, per window.
Windows = list[dict[str, torch.Tensor | None]]


class Net(nn.Module):
    """Layers of which a forward may leave some out."""

    def __init__(self, seed: int, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(layers))
        filled(self, seed)

    def forward(self, x: torch.Tensor, left_out: Sequence[int] = ()) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number not in left_out:
                x = torch.tanh(layer(x))
        return x


def train(
    wrap: Callable[[list[Net]], list[nn.Module]],
    window: Callable[[Sequence[Any], int, int], None],
    *,
    models: int = 2,
    steps: int = 6,
) -> tuple[Windows, Windows]:
    """Gradients of the wrapped models and of plain ones, window by window."""
    rank = choose_communicator().rank
    wrapped_nets, plain_nets = ([Net(seed) for seed in range(models)] for _ in range(2))
    wrapped = wrap(wrapped_nets)
    came: Windows = []
    expected: Windows = []
    for nets, called, windows in ((wrapped_nets, wrapped, came), (plain_nets, plain_nets, expected)):
        optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.05)
        for step in range(steps):
            optimizer.zero_grad()
            window(called, step, rank)
            if nets is plain_nets:
                average_gradients([p for net in nets for p in net.parameters()])
            windows.append(
                {
                    f"{number}.{name}": None if p.grad is None else p.grad.detach().clone()
                    for number, net in enumerate(nets)
                    for name, p in net.named_parameters()
                }
            )
            optimizer.step()
    return came, expected


def check(results: list[tuple[Windows, Windows]]) -> None:
    for rank, (came, expected) in enumerate(results):
        assert len(came) == len(expected) > 1
        for step, (ours, theirs) in enumerate(zip(came, expected, strict=True)):
            for name, mean in theirs.items():
                gradient, elsewhere = ours[name], results[0][0][step][name]
                where = f"rank {rank}, window {step}, {name}"
                assert (gradient is None) == (mean is None), where
                if gradient is None or mean is None or elsewhere is None:
                    continue
                error = float((gradient - mean).abs().max() / mean.abs().max().clamp(min=1e-30))
                assert error <= 1e-12, f"{where}: relative error {error:.3g}"
                assert torch.equal(gradient, elsewhere), f"{where}: not the bits of rank 0"


def wrap_each(nets: list[Net]) -> list[nn.Module]:
    return [DistributedDataParallel(net, bucket_cap_mb=TINY) for net in nets]


@contextlib.contextmanager
def no_sync(*models: nn.Module) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for model in models:
            if isinstance(model, DistributedDataParallel):
                stack.enter_context(model.no_sync())
        yield


# -- two models in one loss ---------------------------------------------------------------------------------------


def one_after_the_other(models: Sequence[Any], step: int, rank: int) -> None:
    first, second = models
    loss_of(second(first(batch(step, rank)))).backward()


def side_by_side(models: Sequence[Any], step: int, rank: int) -> None:
    first, second = models
    (loss_of(first(batch(step, rank))) + 2 * loss_of(second(batch(step, rank, 1)))).backward()


def both_accumulate(models: Sequence[Any], step: int, rank: int) -> None:
    first, second = models
    with no_sync(first, second):
        loss_of(second(first(batch(step, rank, 1)))).backward()
    loss_of(second(first(batch(step, rank)))).backward()


def first_accumulates(models: Sequence[Any], step: int, rank: int) -> None:
    """The second model synchronizes in both backwards, the first one only in the last."""
    first, second = models
    with no_sync(first):
        loss_of(second(first(batch(step, rank, 1)))).backward()
    loss_of(second(first(batch(step, rank)))).backward()


def they_take_turns(models: Sequence[Any], step: int, rank: int) -> None:
    first, second = models if step % 2 else reversed(models)
    with no_sync(first):
        loss_of(second(first(batch(step, rank, 1)))).backward()
    with no_sync(second):
        loss_of(first(second(batch(step, rank, 2)))).backward()
    loss_of(second(first(batch(step, rank)))).backward()


def forward_inside_backward_outside(models: Sequence[Any], step: int, rank: int) -> None:
    """As under torch's wrapper: such a backward does not synchronize, and what it leaves waits for the next."""
    first, second = models
    with no_sync(first, second):
        output = second(first(batch(step, rank, 1)))
    loss_of(output).backward()
    loss_of(second(first(batch(step, rank)))).backward()


def adversaries(models: Sequence[Any], step: int, rank: int) -> None:
    """A generator and a discriminator, each frozen or detached where the other one learns."""
    generator, discriminator = models
    noise, real = batch(step, rank, 1), batch(step, rank, 2)
    loss_of(discriminator(real)).backward()
    (-loss_of(discriminator(generator(noise).detach()))).backward()
    discriminator.requires_grad_(False)
    loss_of(discriminator(generator(noise))).backward()
    discriminator.requires_grad_(True)


def adversaries_accumulate(models: Sequence[Any], step: int, rank: int) -> None:
    with no_sync(*models):
        adversaries(models, step, rank + 50)
    adversaries(models, step, rank)


TOGETHER = [
    one_after_the_other,
    side_by_side,
    both_accumulate,
    first_accumulates,
    they_take_turns,
    forward_inside_backward_outside,
    adversaries,
    adversaries_accumulate,
]


@in_threads_and_processes
@pytest.mark.parametrize("window", TOGETHER, ids=lambda window: window.__name__)
def test_two_models_in_one_loss_are_each_averaged(ranks: Ranks, window: Callable[..., None]) -> None:
    """Contract points 1, 3 and 4: a no_sync() holds for its own model."""
    check(ranks.run(train, wrap_each, window, steps=9))


def unused_by_some(models: Sequence[Any], step: int, rank: int) -> None:
    """One rank skips a layer of the model whose gradients come first, so its bucket fills only when backward ends."""
    first, second = models
    left_out = [step % 3] if rank == step % 2 else []
    loss_of(second(first(batch(step, rank)), left_out)).backward()


@on(("threads", 1), ("threads", 2))
def test_two_models_in_one_loss_may_have_unused_parameters(ranks: Ranks) -> None:
    """Contract points 5 and 6: buckets of both models start in the same order on all ranks."""
    check(ranks.run(train, wrap_each, unused_by_some))


# -- one model inside another -------------------------------------------------------------------------------------


class Outer(nn.Module):
    """A part that is wrapped by itself, between two that are not."""

    def __init__(self, before: nn.Module, inner: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = before, inner, after

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(self.inner(self.before(x)))


def wrap_nested(nets: list[Net]) -> list[nn.Module]:
    before, inner, after = nets
    return [
        DistributedDataParallel(
            Outer(before, DistributedDataParallel(inner, bucket_cap_mb=TINY), after), bucket_cap_mb=TINY
        )
    ]


def call_nested(models: Sequence[Any], step: int, rank: int) -> None:
    model = models[0] if len(models) == 1 else Outer(*models)
    loss_of(model(batch(step, rank))).backward()


def call_nested_accumulating(models: Sequence[Any], step: int, rank: int) -> None:
    model = models[0] if len(models) == 1 else Outer(*models)
    inside = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    with no_sync(*inside):
        loss_of(model(batch(step, rank, 1))).backward()
    loss_of(model(batch(step, rank))).backward()


@in_threads_and_processes
@pytest.mark.parametrize("window", [call_nested, call_nested_accumulating], ids=lambda window: window.__name__)
def test_a_wrapped_model_inside_a_wrapped_model_is_averaged_once(ranks: Ranks, window: Callable[..., None]) -> None:
    """Contract point 1: parameters that two wrappers hold have one mean."""
    check(ranks.run(train, wrap_nested, window, models=3))


def wrap_again(nets: list[Net]) -> list[nn.Module]:
    """The first wrapper still lives when the second is made, as in `model = DistributedDataParallel(model.module)`."""
    first = [DistributedDataParallel(net, bucket_cap_mb=TINY) for net in nets]
    second: list[nn.Module] = [DistributedDataParallel(net.module, bucket_cap_mb=TINY) for net in first]
    second[0].former = first  # type: ignore[assignment]
    return second


def wrap_in_place(nets: list[Net]) -> list[nn.Module]:
    """As above, with handles: the later one holds."""
    for net in nets:
        net.handles = [synchronize_gradients(net, bucket_cap_mb=TINY) for _ in range(2)]  # type: ignore[assignment]
    return list(nets)


@in_threads_and_processes
@pytest.mark.parametrize("wrap", [wrap_again, wrap_in_place], ids=lambda wrap: wrap.__name__)
def test_a_model_that_is_wrapped_again_is_averaged_once(ranks: Ranks, wrap: Callable[..., Any]) -> None:
    """Contract point 1: the later wrapper takes over."""
    check(ranks.run(train, wrap, one_after_the_other))
