"""The same loops on Accelerate's Accelerator and on ours, in the same processes: the outcome must be the same."""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradsync
from gradsync import GradientAccumulationPlugin
from gradsync.accelerator import DataLoaderConfiguration
from gradsync.errors import MisuseError
from tests.ranks import Ranks, ThreadRanks, pool_of

# One worker imports Accelerate for all of them.
pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("packages")]

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("accelerate.local_sgd")


@contextlib.contextmanager
def theirs() -> Iterator[None]:
    """Accelerate's state, which is one for the whole process, for as long as it is needed."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    states = accelerate.state.AcceleratorState, accelerate.state.GradientState

    def reset() -> None:
        states[0]._reset_state(True)
        states[1]._reset_state()

    with mock.patch.dict(os.environ, {**launched, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}):
        # Ranks live through many tests, and one before may have left something.
        reset()
        try:
            yield
        finally:
            reset()


def accelerator_of(library: str, **options: Any) -> Any:
    return (accelerate if library == "accelerate" else gradsync).Accelerator(cpu=True, **options)


def rows(count: int = 46) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :1] - 2 * inputs[:, 1:2])


def net() -> nn.Linear:
    model = nn.Linear(4, 1, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel(), dtype=torch.float64).view(parameter.shape))
    return model


# -- schedulers ---------------------------------------------------------------------------------------------------


def of_another_optimizer(_: torch.optim.Optimizer, total: int) -> Any:
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(other, 3)
    other.step()  # torch wants to have seen one
    return scheduler


SCHEDULES: dict[str, Any] = {
    "linear": lambda optimizer, total: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0.0, 1 - n / total)),
    "one cycle": lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total),
    "of another optimizer": of_another_optimizer,
}


def rates(library: str, schedule: str, split: bool, steps: int, by_itself: bool) -> list[float]:
    """The learning rate behind every micro-batch of two epochs."""
    module = accelerate.utils if library == "accelerate" else gradsync
    accelerator = accelerator_of(
        library,
        gradient_accumulation_steps=steps,
        step_scheduler_with_optimizer=not by_itself,
        dataloader_config=module.DataLoaderConfiguration(split_batches=split),
    )
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(rows(), 4)
    scheduler = SCHEDULES[schedule](optimizer, 2 * len(loader))
    inner = scheduler.optimizer
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seen = []
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                if not by_itself:
                    scheduler.step()
                optimizer.zero_grad()
            seen.append(inner.param_groups[0]["lr"])
        if by_itself:
            scheduler.step()
    return [*seen, scheduler.get_last_lr()[0]]


def compare_rates() -> dict[str, bool]:
    cases = [("linear", False, 1, False), ("linear", True, 2, False), ("linear", False, 3, False)]
    cases += [("one cycle", False, 1, False), ("one cycle", False, 3, False), ("linear", False, 2, True)]
    cases += [("of another optimizer", False, 3, False)]
    same = {}
    for case in cases:
        with theirs():
            expected = rates("accelerate", *case)
        same[str(case)] = rates("gradsync", *case) == expected
    return same


@pytest.mark.program
def test_learning_rates_are_those_of_accelerate() -> None:
    for same in pool_of(2).run(compare_rates):
        assert len(same) == 7
        assert all(same.values()), same


# -- several models -----------------------------------------------------------------------------------------------


def ends(library: str) -> list[bool]:
    """Where windows end of two models that accumulate in one loop, three micro-batches an iteration."""
    plugin = GradientAccumulationPlugin.like_accelerate(2) if library == "gradsync" else None
    options = {"gradient_accumulation_plugin": plugin} if plugin else {"gradient_accumulation_steps": 2}
    accelerator = accelerator_of(library, **options)
    a, b = accelerator.prepare(net()), accelerator.prepare(net())
    seen = []
    for _ in range(3):
        for model in (a, b, b):
            with accelerator.accumulate(model):
                seen.append(accelerator.sync_gradients)
    return seen


def test_models_may_share_one_count() -> None:
    expected = ends("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    assert ends("gradsync") == expected == [number % 2 == 0 for number in range(1, 10)]


# -- whole trainings ----------------------------------------------------------------------------------------------

TRAININGS: dict[str, dict[str, Any]] = {
    "in order": {},
    "accumulation by 2": {"steps": 2},
    "accumulation by 3": {"steps": 3},
    "accumulation by 4, shuffled": {"steps": 4, "shuffle": True},
    "shuffled": {"shuffle": True},
    "shuffled, with an uneven end": {"shuffle": True, "count": 89},
    "shuffled by a generator, accumulation by 3": {"shuffle": True, "generator": True, "steps": 3},
    "shuffled, after a skip": {"shuffle": True, "skip": 3},
    "split batches": {"shuffle": True, "split_batches": True},
    "read by rank 0": {"shuffle": True, "dispatch_batches": True},
    "read by rank 0, by a generator": {"shuffle": True, "generator": True, "dispatch_batches": True},
    "seedable": {"shuffle": True, "use_seedable_sampler": True, "steps": 3},
    "seedable, by a seed": {"shuffle": True, "generator": True, "use_seedable_sampler": True, "data_seed": 7},
}


class Training(NamedTuple):
    """What came of one: the samples of this rank in their order, parameters, losses, and the random numbers left."""

    samples: list[list[int]]
    parameters: torch.Tensor
    losses: list[float]
    random_state: torch.Tensor


def trained(
    library: str,
    *,
    steps: int = 1,
    count: int = 96,
    shuffle: bool = False,
    generator: bool = False,
    skip: int = 0,
    **configuration: Any,
) -> Training:
    """Three epochs in float32, with dropout: wherever a random number is drawn once more or less, all changes."""
    module = accelerate.utils if library == "accelerate" else gradsync
    accelerator = accelerator_of(
        library,
        gradient_accumulation_steps=steps,
        dataloader_config=module.DataLoaderConfiguration(**configuration),
    )
    torch.manual_seed(42)
    inputs, targets = (tensor.float() for tensor in rows(count).tensors)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    order = torch.Generator().manual_seed(9) if generator else None
    data = TensorDataset(inputs, targets, torch.arange(count))
    loader = DataLoader(data, 4, shuffle=shuffle, generator=order)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    samples, losses = [], []
    for epoch in range(3):
        epochs_loader = accelerator.skip_first_batches(loader, skip) if skip and not epoch else loader
        for batch, wanted, indices in epochs_loader:
            samples.append(indices.tolist())
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(batch), wanted)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    parameters = torch.cat([each.detach().flatten() for each in model.parameters()])
    return Training(samples, parameters, losses, torch.get_rng_state())


def compare_trainings() -> dict[str, str]:
    """What differs, by the name of the training."""
    found = {}
    for name, options in TRAININGS.items():
        with theirs():
            expected = trained("accelerate", **options)
        ours = trained("gradsync", **options)
        pairs = zip(ours, expected, strict=True)
        same = [a.equal(b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs]
        found[name] = ", ".join(field for field, equal in zip(Training._fields, same, strict=True) if not equal)
    return found


@pytest.mark.program
def test_trainings_end_with_the_bits_they_end_with_under_accelerate() -> None:
    """With shuffling and without, whatever the number of micro-batches in a window."""
    for differences in pool_of(2).run(compare_trainings):
        assert differences == dict.fromkeys(TRAININGS, "")


def mixed(case: str) -> tuple[str, bool]:
    """A loss.backward() beside an accelerator.backward() in one window: the error, or whether the mean is right."""
    accelerator = gradsync.Accelerator(gradient_accumulation_steps=3)
    model = accelerator.prepare(net())
    batches = [torch.full((2, 4), 1.0 + i + accelerator.process_index, dtype=torch.float64) for i in range(3)]
    try:
        for number, inputs in enumerate(batches):
            with accelerator.accumulate(model):
                loss = model(inputs).square().mean()
                raw = number > 0 if case == "raw after" else number == 0
                if raw or case == "raw alone":
                    loss.backward()
                else:
                    accelerator.backward(loss)
    except MisuseError as error:
        return str(error), True
    twin = net()
    world = accelerator.num_processes
    losses = [twin(torch.full((2, 4), 1.0 + i + rank, dtype=torch.float64)).square().mean()
              for rank in range(world) for i in range(3)]  # fmt: skip
    torch.stack(losses).mean().backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return "", all(torch.allclose(a.grad, b.grad, rtol=1e-12) for a, b in pairs)


@pytest.mark.parametrize("case", ["raw alone", "raw before", "raw after"])
def test_a_plain_backward_counts_as_much_or_is_refused(thread_ranks: Ranks, case: str) -> None:
    for message, right in thread_ranks.run(mixed, case):
        assert right
        assert ("accelerator.backward(loss)" in message) == (case == "raw after")


# -- settings -----------------------------------------------------------------------------------------------------


def test_plugins_of_accelerate_are_understood() -> None:
    plugin = accelerate.utils.GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    configuration = accelerate.utils.DataLoaderConfiguration(even_batches=False)
    accelerator = gradsync.Accelerator(gradient_accumulation_plugin=plugin, dataloader_config=configuration)
    assert accelerator.windows.plugin == GradientAccumulationPlugin(3, sync_with_dataloader=False)
    assert accelerator.dataloader_config == DataLoaderConfiguration(even_batches=False)


# -- what is said -------------------------------------------------------------------------------------------------


def short_windows(**options: Any) -> None:
    accelerator = gradsync.Accelerator(**options)
    model = net()
    model, loader = accelerator.prepare(model, DataLoader(rows(20 * accelerator.num_processes), 4))
    for _ in range(2):
        for inputs, _ in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).square().mean())
            if accelerator.sync_gradients:
                model.zero_grad()


@pytest.mark.cpu_ranks("reads what its ranks log")
def test_the_division_of_a_short_window_is_mentioned_once(
    thread_ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    """By the main process, where it differs from Accelerate's and nobody has asked for either."""
    caplog.set_level(logging.WARNING, "gradsync")
    thread_ranks.run(short_windows, gradient_accumulation_steps=5)
    thread_ranks.run(short_windows, gradient_accumulation_plugin=GradientAccumulationPlugin.like_accelerate(2))
    assert caplog.messages == []
    thread_ranks.run(short_windows, gradient_accumulation_steps=2)
    (message,) = caplog.messages
    assert "after 1 of 2 micro-batches" in message
    assert "like_accelerate(2)" in message


class Stream(torch.utils.data.IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, samples: int) -> None:
        self.samples = rows(samples)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter([self.samples[place] for place in range(len(self.samples))])


def read_a_stream(samples: int, dispatch: bool | None) -> None:
    accelerator = gradsync.Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    loader = accelerator.prepare(DataLoader(Stream(samples), 4))
    for _ in range(2):
        for _ in loader:
            pass


@pytest.mark.cpu_ranks("reads what its ranks log")
def test_the_end_of_a_stream_that_accelerate_would_dispatch_is_mentioned_once(
    thread_ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the last batches are completed by other samples than Accelerate's, and nobody has asked for either."""
    caplog.set_level(logging.WARNING, "gradsync")
    size = thread_ranks.world_size
    thread_ranks.run(read_a_stream, 8 * size, None)
    thread_ranks.run(read_a_stream, 8 * size + 1, True)
    thread_ranks.run(read_a_stream, 8 * size + 1, False)
    assert caplog.messages == []
    thread_ranks.run(read_a_stream, 8 * size + 1, None)
    assert len(caplog.messages) == (size > 1)
    assert all("dispatch_batches=True" in message for message in caplog.messages)


# -- local SGD ----------------------------------------------------------------------------------------------------


def local_sgd(library: str, steps: int, clip: bool = False) -> tuple[list[torch.Tensor], int, float]:
    """The loop of Accelerate's guide, with its LocalSGD. Returns parameters, steps taken and the last rate."""
    accelerator = accelerator_of(library, gradient_accumulation_steps=steps)
    model, taken = net(), []
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    inner.register_step_post_hook(lambda *_: taken.append(1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda n: 1 / (1 + n))
    model, optimizer, loader, scheduler = accelerator.prepare(model, inner, DataLoader(rows(48), 4), scheduler)
    with accelerate.local_sgd.LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as averaging:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                averaging.step()
    return [each.detach().clone() for each in model.parameters()], len(taken), scheduler.get_last_lr()[0]


def compare_local_sgd(*case: Any) -> tuple[bool, list[torch.Tensor], bool]:
    with theirs():
        expected = local_sgd("accelerate", *case)
    parameters, *numbers = local_sgd("gradsync", *case)
    return numbers == list(expected[1:]), parameters, all(map(torch.allclose, parameters, expected[0]))


@pytest.mark.program
@pytest.mark.parametrize(("steps", "clip"), [(1, False), (2, True)])
def test_local_sgd_of_accelerate_trains_as_there(steps: int, clip: bool) -> None:
    results = pool_of(2).run(compare_local_sgd, steps, clip)
    for numbers_agree, parameters, parameters_agree in results:
        assert numbers_agree
        assert parameters_agree
        assert all(map(torch.equal, parameters, results[0][1]))


def step_alone(case: str) -> tuple[str, bool]:
    """A step on gradients of this rank alone which nobody has asked for; and whether training goes on after it."""
    accelerator = gradsync.Accelerator(gradient_accumulation_steps=2)
    model = net()
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, raw)
    inputs = torch.full((2, 4), 1.0 + accelerator.process_index, dtype=torch.float64)
    around = accelerator.no_sync(model) if case == "accelerator.no_sync" else model.no_sync()
    message = "nothing"
    try:
        with around:
            accelerator.backward(model(inputs).square().mean())
            (raw if case == "a raw optimizer" else optimizer).step()
            if case == "one parameter is averaged":
                parameter = next(iter(model.parameters()))
                parameter.data = accelerator.reduce(parameter.data, "mean")
            elif case == "averaged":
                for parameter in model.parameters():
                    parameter.data = accelerator.reduce(parameter.data, "mean")
            optimizer.zero_grad()
    except MisuseError as error:
        message = str(error)
    model.discard()
    for parameter in model.parameters():
        parameter.data = accelerator.reduce(parameter.data, "mean")
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return message, bool((accelerator.gather(values[None]) == values).all())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("accelerator.no_sync", "gradients that only this rank has"),
        ("a raw optimizer", "gradients that only this rank has"),
        ("nothing is averaged", "2 parameters were not averaged"),
        ("one parameter is averaged", "1 parameters were not averaged"),
        ("averaged", "nothing"),
    ],
)
def test_local_steps_that_nobody_averages_are_refused(case: str, words: str) -> None:
    for message, replicas_agree in ThreadRanks(3).run(step_alone, case):
        assert words in message
        assert replicas_agree
