"""The Accelerator: loops as Accelerate's documentation writes them, against one process that runs everything."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, count, cycle, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gradsync import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin
from gradsync.accelerator import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs
from gradsync.errors import ConfigurationError, GradsyncError
from tests.ranks import RankPool, Ranks, ThreadRanks, pool_of
from tests.scripts import run_scripts

pytestmark = pytest.mark.timeout(120)

WIDTH = 4
EXACT = 1e-12
Parameters = list[torch.Tensor]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.5),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Net(nn.Module):
    """Two layers with parameters that depend on the seed alone. Notes the dtype it computes in."""

    def __init__(self, seed: int = 0, outputs: int = 1, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 3, dtype=dtype)
        self.last = nn.Linear(3, outputs, dtype=dtype)
        self.computed_in = dtype
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        self.computed_in = hidden.dtype
        return self.last(torch.tanh(hidden))


def rows(*key: int, count: int = 2, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(key) & 0xFFFF_FFFF)
    return torch.randn(count, width, generator=generator, dtype=torch.float64).to(dtype)


def dataset(samples: int) -> TensorDataset:
    """Inputs, targets, and how many tokens a sample stands for."""
    return TensorDataset(rows(1, count=samples), rows(2, count=samples, width=1), torch.arange(samples) * 7 % 5 + 1.0)


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter([dataset(self.samples)[number] for number in range(self.samples)])


def values(*models: nn.Module) -> Parameters:
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def assert_close(ours: Parameters, theirs: Parameters, tolerance: float = EXACT) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The error of a rank, as text; nothing else may be raised."""
    try:
        function(*args, **kwargs)
    except GradsyncError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def begin(steps: int = 1, *, lr: float = 0.1, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """An accelerator with a model and its optimizer."""
    accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
    model = Net(dtype=dtype)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))


def loss_of(model: nn.Module, *keys: tuple[int, ...]) -> torch.Tensor:
    """The mean over equally many rows a key."""
    dtype = next(model.parameters()).dtype
    return model(torch.cat([rows(*key, dtype=dtype) for key in keys])).square().mean()


def follow(model: Net, *windows: list[tuple[int, ...]], lr: float = 0.1) -> Net:
    """Plain torch: a step for every window of keys."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for keys in windows:
        optimizer.zero_grad()
        loss_of(model, *keys).backward()
        optimizer.step()
    return model


# -- the loop of the documentation --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A training. ``sizes`` are the batches where they have no common size; ``weights``: "samples" or "tokens"."""

    samples: int = 24
    batch: int = 2
    sizes: tuple[int, ...] = ()
    steps: int = 2
    epochs: int = 1
    even: bool = True
    weights: str = ""
    optimizer: str = "sgd"
    stream: bool = False
    clip: float = 0.0
    zero_first: bool = True
    plugin: dict[str, Any] = field(default_factory=dict)

    def loader(self) -> DataLoader:
        if self.stream:
            return DataLoader(Stream(self.samples), self.batch)
        if self.sizes:
            return DataLoader(dataset(self.samples), batch_sampler=self.batches(1))  # type: ignore[arg-type]
        return DataLoader(dataset(self.samples), self.batch)

    def batches(self, world: int) -> list[list[int]]:
        row = list(range(self.samples))
        if self.even and world > 1:
            row += islice(cycle(row[: world * self.batch]), -len(row) % (world * self.batch) if row else 0)
        ends = [*accumulate(self.sizes)] if self.sizes else [*range(self.batch, len(row), self.batch), len(row)]
        return [row[start:end] for start, end in pairwise([0, *ends]) if start < end]

    def windows(self, world: int) -> list[list[list[int]]]:
        """The micro-batches of all ranks. The last window begins where every rank has a batch left, if any has."""
        batches = self.batches(world)
        size = world * self.steps
        if not self.plugin.get("sync_with_dataloader", True):
            batches *= self.epochs
            return [batches[start : start + size] for start in range(0, len(batches) - size + 1, size)]
        starts = range(0, max(len(batches) // world * world, 1), size)
        return [batches[a:b] for a, b in pairwise([*starts, len(batches)]) if batches] * self.epochs

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        """The loss, a mean over what the weight counts, and the weight."""
        inputs, targets, tokens = batch
        tokens = tokens if self.weights == "tokens" else torch.ones_like(tokens)
        errors = (model(inputs) - targets).square().squeeze(1)
        return (errors * tokens).sum() / tokens.sum(), tokens.sum() if self.weights else None


def train(plan: Plan) -> tuple[Parameters, int, list[bool]]:
    """Parameters, steps that took place, and ``sync_gradients`` of every micro-batch."""
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(plan.steps, **plan.plugin), even_batches=plan.even
    )
    model, steps, flags = Net(), [], []
    inner = OPTIMIZERS[plan.optimizer](model.parameters())
    inner.register_step_post_hook(lambda *_: steps.append(1))
    model, optimizer, loader = accelerator.prepare(model, inner, plan.loader())
    for _ in range(plan.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                if plan.zero_first:
                    optimizer.zero_grad()
                loss, weight = plan.loss(model, batch)
                accelerator.backward(loss, weight=weight)
                if plan.clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), plan.clip)
                optimizer.step()
                optimizer.zero_grad()
                flags.append(accelerator.sync_gradients)
    return values(model), len(steps), flags


def alone(plan: Plan, world: int) -> tuple[Parameters, int]:
    """Plain torch over everything."""
    model, data, windows = Net(), dataset(plan.samples), plan.windows(world)
    optimizer = OPTIMIZERS[plan.optimizer](model.parameters())
    for window in windows:
        losses = [plan.loss(model, data[batch]) for batch in window]
        weights = [1.0 if weight is None else float(weight) for _, weight in losses]
        total = world * plan.steps if plan.plugin.get("divide_by") == "num_steps" else sum(weights)
        sum(loss * weight / total for (loss, _), weight in zip(losses, weights, strict=True)).backward()
        if plan.clip:
            nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimizer.step()
        optimizer.zero_grad()
    return values(model), len(windows)


def check(ranks: Ranks, plan: Plan) -> list[list[bool]]:
    results = ranks.run(train, plan)
    expected, steps = alone(plan, ranks.world_size)
    for parameters, taken, _ in results:
        assert taken == steps
        assert all(map(torch.equal, parameters, results[0][0]))
        assert_close(parameters, expected)
    return [flags for _, _, flags in results]


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_documented_loop_trains_as_one_process(ranks: Ranks, optimizer: str, steps: int) -> None:
    plan = Plan(8 * 2 * ranks.world_size, steps=steps, optimizer=optimizer)
    expected = [number % steps == 0 for number in range(1, 9)]
    assert check(ranks, plan) == [expected] * ranks.world_size


@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize("divide_by", ["window", "num_steps"])
def test_a_short_last_window(ranks: Ranks, divide_by: str, zero_first: bool) -> None:
    """Two epochs of 4 + 1 batches: the mean over what there is, or Accelerate's division by 4."""
    plan = Plan(10 * ranks.world_size, steps=4, epochs=2, zero_first=zero_first, plugin={"divide_by": divide_by})
    expected = [False, False, False, True, True] * 2
    assert check(ranks, plan) == [expected] * ranks.world_size


def test_dividing_by_num_steps_is_what_accelerate_does() -> None:
    accelerate = pytest.importorskip("accelerate")
    theirs = accelerate.Accelerator(gradient_accumulation_steps=4, cpu=True)
    plan = Plan(10, steps=4, epochs=2, zero_first=False, plugin={"divide_by": "num_steps"})
    model = Net()
    model, optimizer, loader = theirs.prepare(model, OPTIMIZERS["sgd"](model.parameters()), plan.loader())
    for _ in range(2):
        for batch in loader:
            with theirs.accumulate(model):
                theirs.backward(plan.loss(model, batch)[0])
                optimizer.step()
                optimizer.zero_grad()
    accelerate.state.AcceleratorState._reset_state(True)
    assert_close(train(plan)[0], values(model))


@pytest.mark.parametrize("weights", ["", "samples", "tokens"])
@pytest.mark.parametrize("steps", [1, 2])
def test_batches_of_any_size(ranks: Ranks, weights: str, steps: int) -> None:
    """From a batch sampler. Without weights every micro-batch counts the same."""
    check(ranks, Plan(17, sizes=(1, 3, 2, 5, 1, 4, 1), steps=steps, even=False, weights=weights))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@given(data=st.data())
def test_law_of_training(world_size: int, data: st.DataObject) -> None:
    plan = Plan(
        samples=data.draw(st.integers(0, 25)),
        batch=data.draw(st.integers(1, 3)),
        steps=data.draw(st.integers(1, 4)),
        epochs=data.draw(st.integers(1, 2)),
        even=data.draw(st.booleans()),
        weights=data.draw(st.sampled_from(["", "samples", "tokens"])),
        stream=data.draw(st.booleans()),
        clip=data.draw(st.sampled_from([0.0, 0.1])),
    )
    check(ThreadRanks(world_size), plan)


@pytest.mark.parametrize("even", [True, False])
def test_tokens_and_clipping_over_processes(process_ranks: RankPool, even: bool) -> None:
    check(process_ranks, Plan(21, steps=3, even=even, weights="tokens", clip=0.05))


@pytest.mark.parametrize(("weights", "even"), [("", True), ("samples", True), ("tokens", True), ("", False)])
def test_synchronizing_every_batch_changes_nothing(ranks: Ranks, weights: str, even: bool) -> None:
    """Nor where ranks have more or fewer batches."""
    samples = 21 if even else 4 * ranks.world_size + 1
    check(ranks, Plan(samples, steps=3, epochs=2, even=even, weights=weights, plugin={"sync_each_batch": True}))


def test_windows_may_go_beyond_the_loader(ranks: Ranks) -> None:
    """Without `sync_with_dataloader` 3 epochs of 3 batches are 4 windows of 2, and a batch that is left over."""
    plan = Plan(6 * ranks.world_size, epochs=3, plugin={"sync_with_dataloader": False})
    assert check(ranks, plan) == [[False, True] * 4 + [False]] * ranks.world_size


def change_steps() -> tuple[Parameters, list[bool], int]:
    accelerator, model, optimizer = begin(2)
    flags = []
    for number in range(5):
        accelerator.gradient_accumulation_steps = 2 if number < 2 else 3
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, (number, accelerator.process_index)))
            optimizer.step()
            optimizer.zero_grad()
            flags.append(accelerator.sync_gradients)
    return values(model), flags, accelerator.gradient_accumulation_steps


def test_the_number_of_steps_may_change_between_windows(ranks: Ranks) -> None:
    windows = [
        [(number, rank) for number in window for rank in range(ranks.world_size)] for window in ([0, 1], [2, 3, 4])
    ]
    expected = follow(Net(), *windows)
    for parameters, flags, steps in ranks.run(change_steps):
        assert_close(parameters, values(expected))
        assert flags == [False, True, False, False, True]
        assert steps == 3


# -- several models -----------------------------------------------------------------------------------------------


def train_two(case: str, world: int = 0) -> Parameters:
    """With an accelerator, or over ``world`` ranks' inputs by plain torch."""
    accelerator = Accelerator(gradient_accumulation_steps=3)
    a, b = Net(1, WIDTH), Net(2)
    separate = case != "one optimizer"
    optimizers = [torch.optim.SGD(a.parameters(), lr=0.1), torch.optim.SGD(b.parameters(), lr=0.1)]
    optimizers = optimizers if separate else [torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)]
    if not world:
        a, b, *optimizers = accelerator.prepare(a, b, *optimizers)
    ranks = list(range(world)) or [accelerator.process_index]
    counts = {"a": 0, "b": 0, "ab": 0}

    def micro_batch(name: str, models: list[nn.Module], loss: Callable[[int], torch.Tensor]) -> None:
        stepping = optimizers if len(models) == 2 or not separate else [optimizers["ab".index(name)]]
        counts[name] += 1
        if not world:
            with accelerator.accumulate(*models):
                weight = 1.0 + ranks[0] if case == "one optimizer" else None
                accelerator.backward(loss(ranks[0]), weight=weight)
                for optimizer in stepping:
                    optimizer.step()
                    optimizer.zero_grad()
            return
        weights = [1.0 + rank if case == "one optimizer" else 1.0 for rank in ranks]
        (sum(loss(rank) * weight for rank, weight in zip(ranks, weights, strict=True)) / sum(weights) / 3).backward()
        if counts[name] % 3 == 0:
            for optimizer in stepping:
                optimizer.step()
                optimizer.zero_grad()

    for number in range(6):
        if case == "generator and discriminator":
            for call in range(2):
                micro_batch("b", [b], lambda rank, key=(number, call): b(rows(*key, rank)).square().mean())
            b.requires_grad_(False)
            micro_batch("a", [a], lambda rank, key=number: b(a(rows(key, 9, rank))).square().mean())
            b.requires_grad_(True)
        else:
            micro_batch("ab", [a, b], lambda rank, key=number: b(a(rows(key, rank))).square().mean())
    return values(a, b)


@pytest.mark.parametrize("case", ["generator and discriminator", "one optimizer", "two optimizers"])
def test_several_models(ranks: Ranks, case: str) -> None:
    """Each has its own window, whatever the number of its micro-batches an iteration; `accumulate(a, b)` is one."""
    expected = train_two(case, world=ranks.world_size)
    for parameters in ranks.run(train_two, case):
        assert_close(parameters, expected)


def absent(case: str) -> Any:
    """Two models. In the last micro-batch the last rank has no backward, or raises."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    a, b = Net(1, WIDTH), Net(2)
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    a, b, optimizer = accelerator.prepare(a, b, optimizer)

    def window() -> None:
        for number in range(2):
            with accelerator.accumulate(a, b):
                if number == 0 or not accelerator.is_last_process:
                    accelerator.backward(b(a(rows(number, accelerator.process_index))).square().mean())
                elif case == "raises":
                    raise ConfigurationError("its own")
                optimizer.step()
                optimizer.zero_grad()

    return error_of(window), values(a, b)


def test_a_rank_has_nothing_for_several_models(thread_ranks: Ranks) -> None:
    a, b, world = Net(1, WIDTH), Net(2), thread_ranks.world_size
    keys = [(number, rank) for number in range(2) for rank in range(world)][:-1]
    b(a(torch.cat([rows(*key) for key in keys]))).square().mean().backward()
    torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1).step()
    for message, parameters in thread_ranks.run(absent, "nothing"):
        assert message == "nothing"
        assert_close(parameters, values(a, b))


@pytest.mark.cpu_ranks("on a GPU the others hear of it a window later: test_gpu.py")
def test_a_rank_fails_with_several_models(thread_ranks: Ranks) -> None:
    *others, last = thread_ranks.run(absent, "raises")
    assert last[0] == "ConfigurationError: its own"
    assert all(message.startswith("PeerFailedError") for message, _ in others)


def leak_into_another_window(steps: int) -> tuple[str, Parameters]:
    """The generator's loss reaches the discriminator, whose window is not finished."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    a, b = Net(1, WIDTH), Net(2)
    optimizers = torch.optim.SGD(a.parameters(), lr=0.0), torch.optim.SGD(b.parameters(), lr=0.1)
    a, b, of_a, of_b = accelerator.prepare(a, b, *optimizers)

    def loop() -> None:
        for number in range(2):
            key = (number, accelerator.process_index)
            with accelerator.accumulate(b):
                of_b.zero_grad()
                accelerator.backward(loss_of(b, key))
                of_b.step()
            with accelerator.accumulate(a):
                of_a.zero_grad()
                accelerator.backward(b(a(rows(*key))).mean())
                of_a.step()

    return error_of(loop), values(b)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_loss_through_another_model_loses_none_of_its_micro_batches(thread_ranks: Ranks, steps: int) -> None:
    """What the generator leaves in the discriminator is zeroed, as ever. The window there is right, or it raises."""
    keys = [[(number, rank) for rank in range(thread_ranks.world_size)] for number in range(2)]
    expected = follow(Net(2), *(keys if steps == 1 else [keys[0] + keys[1]]))
    for message, parameters in thread_ranks.run(leak_into_another_window, steps):
        if not message.startswith("MisuseError"):
            assert message == "nothing"
            assert_close(parameters, values(expected))


# -- synchronization by hand --------------------------------------------------------------------------------------


def by_hand(case: str) -> tuple[Parameters, Parameters]:
    """Two windows of 3 backwards. Also returns what this rank had before the first synchronization."""
    accelerator, model, optimizer = begin(3)
    named = accelerator.unwrap_model(model) if case == "no_sync of the unwrapped model" else model
    before: Parameters = []
    for window in range(2):
        keys = [(window, number, accelerator.process_index) for number in range(3)]
        if case.startswith("no_sync"):
            for number in range(3):
                with accelerator.no_sync(named) if number < 2 else contextlib.nullcontext():
                    accelerator.backward(loss_of(model, keys[number]))
                before = before or [parameter.grad.clone() for parameter in model.parameters()]
        else:
            with accelerator.no_sync(model):
                losses = [loss_of(model, key) for key in keys]
            accelerator.backward(losses[0])
            before = before or [parameter.grad.clone() for parameter in model.parameters()]
            accelerator.backward(losses[1])
            with accelerator.trigger_sync_in_backward(named):
                accelerator.backward(losses[2])
        optimizer.step()
        optimizer.zero_grad()
    return values(model), before


@pytest.mark.parametrize("case", ["no_sync", "no_sync of the unwrapped model", "trigger_sync_in_backward"])
def test_synchronization_by_hand(ranks: Ranks, case: str) -> None:
    world = ranks.world_size
    keys = [[(window, number, rank) for number in range(3) for rank in range(world)] for window in range(2)]
    expected = follow(Net(), *keys)
    results = ranks.run(by_hand, case)
    for parameters, _ in results:
        assert_close(parameters, values(expected))
    if world > 1:
        assert not torch.equal(results[0][1][0], results[1][1][0])


# -- schedulers ---------------------------------------------------------------------------------------------------


def schedule(case: str) -> list[float]:
    """The learning rate behind every micro-batch: 2 epochs of 3 batches, 2 of them a window."""
    options: dict[str, Any] = {"gradient_accumulation_plugin": GradientAccumulationPlugin(2, scheduler_steps="once")}
    if case == "by itself":
        options["step_scheduler_with_optimizer"] = False
    if case == "skipped":
        options |= {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=4.0)]}
    accelerator = Accelerator(**options)
    model = Net(dtype=torch.float32)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    if case == "of a prepared optimizer":
        model, optimizer = accelerator.prepare(model, optimizer)
    metric = case == "plateau"
    if metric:
        scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    else:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + step)
    # In any order.
    scheduler, loader, optimizer, model = accelerator.prepare(
        scheduler, DataLoader(rows(1, count=6 * accelerator.num_processes), 2), optimizer, model
    )
    rates, number = [], 0
    for _ in range(2):
        for inputs in loader:
            with accelerator.accumulate(model):
                loss = model(inputs.float()).square().mean()
                accelerator.backward(loss * torch.inf if case == "skipped" and number == 1 else loss)
                optimizer.step()
                if case != "by itself":
                    scheduler.step(*[1.0] * metric)
                optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
            number += 1
        if case == "by itself":
            scheduler.step()
    if not metric:
        assert scheduler.get_last_lr() == [rates[-1]] or case == "by itself"
    return rates


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("once", [1, 2, 3, 3, 4, 5]),
        ("of a prepared optimizer", [1, 2, 3, 3, 4, 5]),
        ("skipped", [1, 1, 2, 2, 3, 4]),
        ("by itself", [1, 1, 1, 2, 2, 2]),
        ("plateau", [1, 1, 0.5, 0.5, 0.25, 0.125]),
    ],
)
def test_schedulers_may_move_once_a_window(ranks: Ranks, case: str, expected: list[float]) -> None:
    assert ranks.run(schedule, case) == [expected] * ranks.world_size


# -- mixed precision ----------------------------------------------------------------------------------------------


def low_precision(name: str) -> list[Any]:
    accelerator = Accelerator(mixed_precision=name)
    raw, inputs = Net(dtype=torch.float32), rows(0, dtype=torch.float32)
    model = accelerator.prepare(raw)
    seen = [model(inputs).dtype, {parameter.dtype for parameter in model.parameters()}, raw.computed_in]
    with accelerator.autocast():
        seen.append((inputs @ inputs.T).dtype)
    for keep in (True, False):
        unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=keep)
        unwrapped(inputs)
        seen += [unwrapped is raw, raw.computed_in]
    return [*seen, accelerator.scaler is not None, accelerator.mixed_precision]


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("no", torch.float32)])
def test_forwards_run_in_lower_precision(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    """Parameters and outputs are float32. The unwrapped model computes so too, unless it is to keep the autocast."""
    full = torch.float32
    expected = [full, {full}, dtype, dtype, True, dtype, True, full, name == "fp16", name]
    assert ranks.run(low_precision, name) == [expected] * ranks.world_size


SCALED = {
    "mixed_precision": "fp16",
    "kwargs_handlers": [GradScalerKwargs(init_scale=8.0)],
    "dtype": torch.float32,
}


def scaled(windows: list[int], infinite: int) -> tuple[Parameters, list[tuple[bool, bool, float]]]:
    """Windows of 2; in the ``infinite`` one the last rank's first loss is not finite."""
    accelerator, model, optimizer = begin(2, **SCALED)
    seen = []
    for window in windows:
        before = values(model)
        for number in range(2):
            with accelerator.accumulate(model):
                loss = loss_of(model, (window, number, accelerator.process_index))
                bad = window == infinite and number == 0 and accelerator.is_last_process
                accelerator.backward(loss * torch.inf if bad else loss)
                optimizer.step()
                optimizer.zero_grad()
        same = all(map(torch.equal, before, values(model)))
        seen.append((accelerator.optimizer_step_was_skipped, same, accelerator.scaler.get_scale()))
    return values(model), seen


def test_a_step_that_is_not_finite_is_skipped_everywhere(ranks: Ranks) -> None:
    results, expected = ranks.run(scaled, [0, 1, 2], 1), ranks.run(scaled, [0, 2], -1)
    for (parameters, seen), (without, _) in zip(results, expected, strict=True):
        assert seen == [(False, False, 8.0), (True, True, 4.0), (False, False, 4.0)]
        assert_close(parameters, without, 1e-3)


def clip_scaled(how: str) -> tuple[float, float, float, Parameters]:
    accelerator, model, optimizer = begin(2, lr=1.0, **SCALED)
    before, norm, again = values(model), 0.0, 0.0
    for number in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, (number, accelerator.process_index)))
            if accelerator.sync_gradients:
                if how == "norm":
                    norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.01))
                    again = float(accelerator.clip_grad_norm_(model.parameters(), 0.01))
                elif how == "value":
                    accelerator.clip_grad_value_(model.parameters(), 0.01)
                else:
                    accelerator.unscale_gradients()
                    accelerator.unscale_gradients(optimizer)
            optimizer.step()
            optimizer.zero_grad()
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, values(model), strict=True)])
    return norm, again, float(moved.norm()), [moved]


@pytest.mark.parametrize("how", ["norm", "value", "unscale"])
def test_scaled_gradients_are_unscaled_once_before_they_are_clipped(ranks: Ranks, how: str) -> None:
    model = follow(
        Net(dtype=torch.float32), [(number, rank) for number in range(2) for rank in range(ranks.world_size)]
    )
    true = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    for norm, again, moved, change in ranks.run(clip_scaled, how):
        if how == "norm":
            assert norm == pytest.approx(float(true.norm()), rel=1e-2)
            assert again == pytest.approx(0.01, rel=1e-3)
            assert moved == pytest.approx(0.01, rel=1e-3)
        else:
            expected = true.clamp(-0.01, 0.01) if how == "value" else true
            assert_close(change, [expected], 5e-3 if how == "unscale" else 1e-4)


def unscale_too_early(how: str) -> tuple[str, Parameters]:
    accelerator, model, optimizer = begin(2, lr=1.0, **SCALED)
    messages = []

    def window() -> None:
        for number in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, (number, accelerator.process_index)))
                if how == "unscale":
                    accelerator.unscale_gradients()
                elif number == 0:
                    messages.append(error_of(accelerator.clip_grad_norm_, model.parameters(), 1e3))
                optimizer.step()
                optimizer.zero_grad()

    message = error_of(window)
    assert how == "unscale" or messages[0].startswith("MisuseError")
    return message, values(model)


@pytest.mark.parametrize("how", ["unscale", "clip"])
def test_unscaling_inside_an_unfinished_window_is_never_silent(thread_ranks: Ranks, how: str) -> None:
    """It raises, or the window is right all the same."""
    keys = [(number, rank) for number in range(2) for rank in range(thread_ranks.world_size)]
    expected = follow(Net(dtype=torch.float32), keys, lr=1.0)
    for message, parameters in thread_ranks.run(unscale_too_early, how):
        if not message.startswith("MisuseError"):
            assert message == "nothing"
            assert_close(parameters, values(expected), 1e-2)


def two_scaled_optimizers(clip: bool, infinite: bool) -> tuple[list[bool], Parameters]:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    a, b = Net(1, dtype=torch.float32), Net(2, dtype=torch.float32)
    optimizers = torch.optim.SGD(a.parameters(), lr=1.0), torch.optim.SGD(b.parameters(), lr=1.0)
    a, b, of_a, of_b = accelerator.prepare(a, b, *optimizers)
    key = (accelerator.process_index,)
    with accelerator.accumulate(a, b):
        accelerator.backward(loss_of(a, key) * (torch.inf if infinite else 1.0))
        accelerator.backward(loss_of(b, key))
        if clip:
            accelerator.clip_grad_norm_(a.parameters(), 1e3)
            accelerator.clip_grad_norm_(b.parameters(), 1e3)
        of_a.step()
        of_b.step()
        of_a.zero_grad()
        of_b.zero_grad()
    return [of_a.step_was_skipped, of_b.step_was_skipped], values(b)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("infinite", [False, True])
def test_a_scaler_with_two_optimizers(thread_ranks: Ranks, clip: bool, infinite: bool) -> None:
    """The first one's step must not change how the second one's gradients, which are there already, are unscaled."""
    model = follow(Net(2, dtype=torch.float32), [(rank,) for rank in range(thread_ranks.world_size)], lr=1.0)
    for skipped, parameters in thread_ranks.run(two_scaled_optimizers, clip, infinite):
        assert skipped == [infinite, False]
        assert_close(parameters, values(model), 1e-2)


# -- clipping -----------------------------------------------------------------------------------------------------


def clip(how: str, max_norm: float) -> tuple[str, float, Parameters]:
    """One window of 2. The last rank has no backward in its last micro-batch, unless it is alone."""
    accelerator, model, optimizer = begin(2, lr=0.0)
    message, norm = "", 0.0

    def clip_now() -> float:
        if how == "value":
            accelerator.clip_grad_value_(model.parameters(), max_norm)
            return 0.0
        return float(accelerator.clip_grad_norm_(model.parameters(), max_norm, norm_type=float(how)))

    for number in range(2):
        with accelerator.accumulate(model):
            silent = number == 1 and accelerator.is_last_process and accelerator.num_processes > 1
            if not silent:
                accelerator.backward(loss_of(model, (number, accelerator.process_index)))
            if number == 0:
                message = error_of(clip_now)
            else:
                norm = clip_now()
            optimizer.step()
    return message, norm, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("how", ["2", "1", "inf", "value"])
@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_clipping_acts_on_the_mean_of_the_window(ranks: Ranks, how: str, max_norm: float) -> None:
    model, world = Net(), ranks.world_size
    keys = [(number, rank) for number in range(2) for rank in range(world)]
    loss_of(model, *(keys[:-1] if world > 1 else keys)).backward()
    expected = 0.0
    if how == "value":
        nn.utils.clip_grad_value_(model.parameters(), max_norm)
    else:
        expected = float(nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type=float(how)))
    for message, norm, gradients in ranks.run(clip, how, max_norm):
        assert re.match("MisuseError.*unfinished window", message)
        assert norm == pytest.approx(expected, rel=EXACT)
        assert_close(gradients, [parameter.grad for parameter in model.parameters()])  # type: ignore[misc]


# -- tensors over processes ---------------------------------------------------------------------------------------


def collect(samples: int, even: bool, objects: bool) -> tuple[list[int], list[int]]:
    accelerator = Accelerator(even_batches=even)
    loader = accelerator.prepare(DataLoader(range(samples), 2))  # type: ignore[arg-type]
    seen: list[int] = []
    for batch in loader:
        if objects:
            seen += [int(text) for text in accelerator.gather_for_metrics([str(n) for n in batch.tolist()])]
            # Tensors of any size, where each is said to be a sample.
            of_any_size = accelerator.gather_for_metrics([torch.arange(n) for n in batch.tolist()], True)
            assert list(map(len, of_any_size)) == seen[-len(of_any_size) :]
        else:
            gathered = accelerator.gather_for_metrics({"samples": batch, "twice": [batch * 2]})
            assert torch.equal(gathered["samples"] * 2, gathered["twice"][0])
            seen += gathered["samples"].tolist()
    return seen, accelerator.gather_for_metrics(torch.tensor([accelerator.process_index])).tolist()


@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.parametrize("even", [True, False])
def test_metrics_see_every_sample_once(ranks: Ranks, even: bool, objects: bool) -> None:
    """With uneven batches too, where the ranks have equally many; or where one has none at all."""
    world = ranks.world_size
    for samples in (1, 4 * world, 4 * world + 1 if even else 4 * world - 1):
        for seen, outside in ranks.run(collect, samples, even, objects):
            assert seen == list(range(samples))
            assert outside == list(range(world))


def tensors_over_processes() -> list[Any]:
    accelerator = Accelerator()
    rank = accelerator.process_index
    tensor = torch.full((2,), float(rank))
    return [
        accelerator.gather({"a": tensor})["a"].tolist(),
        accelerator.reduce(tensor).tolist(),
        accelerator.reduce(tensor, "mean", scale=2.0).tolist(),
        accelerator.pad_across_processes(torch.ones(rank + 1), pad_index=-1).tolist(),
        (rank, accelerator.num_processes, accelerator.is_main_process, accelerator.is_last_process),
    ]


def test_tensors_over_processes(ranks: Ranks) -> None:
    world = ranks.world_size
    total = float(sum(range(world)))
    for rank, seen in enumerate(ranks.run(tensors_over_processes)):
        assert seen == [
            [float(other) for other in range(world) for _ in range(2)],
            [total] * 2,
            [2 * total / world] * 2,
            [1.0] * (rank + 1) + [-1.0] * (world - rank - 1),
            (rank, world, rank == 0, rank == world - 1),
        ]


# -- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_accumulation_steps": 0}, "^gradient_accumulation_steps must be"),
        ({"gradient_accumulation_steps": "2"}, "^gradient_accumulation_steps must be"),
        ({"gradient_accumulation_steps": True}, "^gradient_accumulation_steps must be"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(3)},
            "pass one of them",
        ),
        ({"mixed_precision": "fp8"}, "no, bf16, fp16"),
        ({"kwargs_handlers": [nn.Linear(1, 1)]}, "kwargs_handlers knows .* got Linear"),
        ({"dataloader_config": DataLoaderConfiguration(), "split_batches": True}, "belong into dataloader_config"),
        ({"dataloader_config": DataLoaderConfiguration(), "even_batches": False}, "belong into dataloader_config"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Accelerator(**options)


def test_steps_are_taken_from_the_plugin() -> None:
    assert Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(3)).gradient_accumulation_steps == 3
    # As in Accelerate: a plugin without a number leaves it to the argument.
    plugin = GradientAccumulationPlugin(sync_each_batch=True)
    assert Accelerator(gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 1
    with pytest.raises(ConfigurationError):
        Accelerator().gradient_accumulation_steps = 0


def misuse(case: str) -> tuple[str, bool]:
    """The error of a rank, and whether the ranks can still train together afterwards."""
    accelerator, model, optimizer = begin(even_batches=False)
    loader = accelerator.prepare(DataLoader(dataset(5), 2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    accelerator.prepare(scheduler)

    def enter(*contexts: Callable[[], Any]) -> None:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())

    def mix() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, (0,)), weight=2)
            accelerator.backward(loss_of(model, (0,)))

    message = error_of(
        {
            "no model": lambda: accelerator.accumulate(),
            "unprepared": lambda: accelerator.accumulate(Net()),
            "no_sync of an unprepared model": lambda: accelerator.no_sync(Net()),
            "raw model again": lambda: accelerator.prepare(accelerator.unwrap_model(model)),
            "raw optimizer again": lambda: accelerator.prepare(optimizer.optimizer),
            "raw scheduler again": lambda: accelerator.prepare(scheduler),
            "nested": lambda: enter(*[lambda: accelerator.accumulate(model)] * 2),
            "joined": lambda: enter(
                lambda: accelerator.join_uneven_inputs([model]), lambda: accelerator.accumulate(model)
            ),
            "joined without a loader": lambda: enter(lambda: Accelerator().join_uneven_inputs([model], False)),
            "weight outside": lambda: accelerator.backward(loss_of(model, (0,)), weight=2),
            "mixture": mix,
            "placement": lambda: accelerator.prepare(Net(), device_placement=[True, True]),
        }[case]
    )
    optimizer.optimizer.zero_grad()
    assert accelerator.prepare(model, optimizer, loader) == (model, optimizer, loader)
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, (accelerator.process_index,)))
    expected = Net()
    loss_of(expected, *[(rank,) for rank in range(accelerator.num_processes)]).backward()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return message, all(torch.allclose(ours.grad, theirs.grad, rtol=EXACT, atol=EXACT) for ours, theirs in pairs)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no model", "ConfigurationError: accumulate.. needs the models"),
        ("unprepared", "ConfigurationError: Net was not prepared"),
        ("no_sync of an unprepared model", "ConfigurationError: Net was not prepared"),
        ("raw model again", "ConfigurationError: this Net has been prepared already"),
        ("raw optimizer again", "ConfigurationError: this SGD has been prepared already"),
        ("raw scheduler again", "ConfigurationError: this StepLR has been prepared already"),
        ("nested", "MisuseError: accumulate.. was entered inside accumulate"),
        ("joined", "MisuseError: accumulate.. inside join_uneven_inputs"),
        ("joined without a loader", "ConfigurationError: even_batches changes prepared loaders"),
        ("weight outside", "MisuseError: accelerator.backward.*needs to know the window"),
        ("mixture", "MisuseError: some backwards of this window have a weight"),
        ("placement", "ConfigurationError: device_placement has 2 entries for 1"),
    ],
)
def test_misuse_raises_on_every_rank(ranks: Ranks, case: str, words: str) -> None:
    if case == "joined" and isinstance(ranks, ThreadRanks):
        pytest.skip("torch's Join needs a process group")
    if case == "raw model again" and ranks.world_size == 1:
        words = "nothing"  # prepare has returned the model itself
    for message, usable in ranks.run(misuse, case):
        assert re.match(words, message), message
        assert usable


def bad_weight(weight: float) -> tuple[str, str]:
    accelerator, model, optimizer = begin(2)

    def window(of_last: float) -> None:
        for number in range(2):
            with accelerator.accumulate(model):
                given_weight = of_last if accelerator.is_last_process and number else 2.0
                accelerator.backward(loss_of(model, (number,)), weight=given_weight)
                optimizer.step()
                optimizer.zero_grad()

    message = error_of(window, weight)
    optimizer.optimizer.zero_grad()
    return message, error_of(window, 1.0)


@pytest.mark.parametrize("weight", [0, float("nan"), -1.0])
@pytest.mark.cpu_ranks("on a GPU the others hear of it a window later: test_gpu.py")
def test_a_bad_weight_on_one_rank_raises_on_all(process_ranks: RankPool, weight: float) -> None:
    *others, last = process_ranks.run(bad_weight, weight)
    assert last[0].startswith("ConfigurationError: a weight must be finite")
    assert all(message.startswith("PeerFailedError") for message, _ in others)
    assert {after for _, after in (*others, last)} == {"nothing"}


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_an_empty_loader_trains_nothing(ranks: Ranks, even: bool, stream: bool) -> None:
    for parameters, steps, flags in ranks.run(train, Plan(0, even=even, stream=stream)):
        assert (steps, flags) == (0, [])
        assert all(map(torch.equal, parameters, values(Net())))


def buckets(source: str) -> tuple[int, bool]:
    if source == "gradsync":
        handlers: list[Any] = [DistributedDataParallelKwargs(bucket_cap_mb=2e-5), AutocastKwargs(enabled=False)]
    else:
        import accelerate

        handlers = [accelerate.DistributedDataParallelKwargs(bucket_cap_mb=2e-5)]
        handlers += [accelerate.utils.AutocastKwargs(enabled=False)]
    raw = Net(dtype=torch.float32)
    accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=handlers)
    model = accelerator.prepare(raw)
    model(rows(0, dtype=torch.float32)).mean().backward()
    handle = accelerator.models.attachment_of(model)
    return len(handle.synchronizer.buckets), raw.computed_in is torch.float32


@pytest.mark.parametrize("source", ["gradsync", "accelerate"])
def test_handlers_of_both_libraries_are_understood(thread_ranks: Ranks, source: str) -> None:
    pytest.importorskip("accelerate")
    for number, without_autocast in thread_ranks.run(buckets, source):
        assert number > 1
        assert without_autocast


# -- join ---------------------------------------------------------------------------------------------------------


def join() -> tuple[Parameters, int]:
    accelerator = Accelerator()
    model = Net()
    data = DataLoader(dataset(2 * accelerator.num_processes + 1), 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    batches = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for inputs, targets, _ in loader:
            accelerator.backward((model(inputs) - targets).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
    assert sum(1 for _ in loader) == 3  # even again
    return values(model), batches


def test_ranks_may_run_out_of_batches(process_ranks: RankPool) -> None:
    """The gradients of ranks that have gone count as zero, as in torch."""
    world = process_ranks.world_size
    model, data = Net(), dataset(2 * world + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for indices in (range(world), range(world, 2 * world), [2 * world]):
        inputs, targets, _ = data[list(indices)]
        ((model(inputs) - targets).square().sum() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank, (parameters, batches) in enumerate(process_ranks.run(join)):
        assert batches == (3 if rank == 0 else 2)
        assert_close(parameters, values(model))


def joins_that_warn() -> list[str]:
    accelerator = Accelerator()
    model = accelerator.prepare(Net())
    stream, listed = (accelerator.prepare(DataLoader(each, 1)) for each in (Endless(), dataset(3)))
    actual = accelerator.distributed_type
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([model], even_batches=False):
            assert not any(loader.configuration.even_batches for loader in (stream, listed))
        accelerator.state.distributed_type = "FSDP"
        assert accelerator.distributed_type == accelerator.state.distributed_type == "FSDP"
        with accelerator.join_uneven_inputs([object()], even_batches=False):
            assert all(loader.configuration.even_batches for loader in (stream, listed))
    accelerator.state.distributed_type = actual
    assert accelerator.distributed_type == actual
    assert {Path(each.filename) for each in seen} == {Path(__file__)}
    return [str(each.message) for each in seen]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return count()


def test_a_join_warns_of_what_differs_from_accelerate() -> None:
    for streams, kind in pool_of(2).run(joins_that_warn):
        assert "only supported for map-style datasets" in streams
        assert "distributed_type is FSDP" in kind
        assert "has no effect" in kind


# -- one process, and the end -------------------------------------------------------------------------------------


def test_a_world_of_one_needs_no_process_group() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    raw = Net()
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    model, prepared = accelerator.prepare(raw, optimizer)
    assert model is raw
    assert prepared.optimizer is optimizer
    for plan in (Plan(11), Plan(11, even=False, weights="tokens", clip=0.05), Plan(5, steps=1, optimizer="adamw")):
        parameters, steps, _ = train(plan)
        expected, number = alone(plan, 1)
        assert steps == number
        assert_close(parameters, expected)
    assert scaled([0, 1], 1)[1] == [(False, False, 8.0), (True, True, 4.0)]
    assert collect(5, True, False) == ([0, 1, 2, 3, 4], [0])
    assert accelerator.gather(torch.ones(2)).tolist() == [1, 1]
    assert (accelerator.num_processes, accelerator.use_distributed, accelerator.is_main_process) == (1, False, True)
    with accelerator.join_uneven_inputs([model]), accelerator.main_process_first():
        accelerator.backward(model(rows(0)).mean())
    assert raw.first.weight.grad is not None
    accelerator.end_training()
    assert not dist.is_initialized()


def free() -> tuple[list[None], str, bool, bool]:
    accelerator, model, optimizer = begin(2)
    raw, key = accelerator.unwrap_model(model), (accelerator.process_index,)
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, key))
    freed = accelerator.free_memory(model, optimizer)
    assert accelerator.sync_gradients
    message = error_of(accelerator.accumulate, raw)
    raw.zero_grad()
    loss_of(raw, key).backward()
    expected = Net()
    loss_of(expected, key).backward()
    is_local = torch.equal(raw.first.weight.grad, expected.first.weight.grad)
    # And it may be prepared once more, beginning with a new window.
    raw.zero_grad()
    model = accelerator.prepare(raw)
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, key))
    accelerator.end_training()
    return freed, message, is_local, not accelerator.sync_gradients


def test_everything_can_be_let_go(ranks: Ranks) -> None:
    for freed, message, is_local, begins_again in ranks.run(free):
        assert freed == [None, None]
        assert message.startswith("ConfigurationError: Net was not prepared")
        assert is_local
        assert begins_again
    if isinstance(ranks, RankPool):  # the group was there before the accelerator, and is there after it
        assert ranks.run(dist.is_initialized) == [True] * ranks.world_size


def prepared_kinds(again: bool) -> list[str]:
    accelerator = Accelerator()
    frozen, buffers_only = Net(), nn.Identity()
    frozen.requires_grad_(False)
    evaluated = accelerator.prepare_model(Net(2), evaluation_mode=True)
    results = [*accelerator.prepare(Net(1), frozen, buffers_only, "something else"), evaluated]
    if again:
        results.append(accelerator.prepare(evaluated))
    return [type(result).__name__ for result in results]


@pytest.mark.parametrize("again", [False, True])
def test_only_what_is_trained_is_wrapped(thread_ranks: Ranks, again: bool) -> None:
    """Also when a model for evaluation, prepared already, is prepared again."""
    wrapper = "Net" if thread_ranks.world_size == 1 else "PreparedDistributedDataParallel"
    expected = [wrapper, "Net", "Identity", "str", "Net"] + ["Net"] * again
    assert thread_ranks.run(prepared_kinds, again) == [expected] * thread_ranks.world_size


@pytest.mark.program
@pytest.mark.parametrize("processes", [1, 2])
def test_the_script_of_accelerate_passes(processes: int, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = Path(__file__).parents[1] / "accelerate_script.py"
    ran = run_scripts(
        [script], ranks=0 if processes == 1 else processes, folder=tmp_path, preload=("accelerate.test_utils.training",)
    )[script]
    assert ran.error is None, ran.error
    for rank in range(processes):
        assert f"all passed on rank {rank}" in ran.output
