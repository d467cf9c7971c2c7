"""The contract of DESIGN.md section 3, points 1, 2, 3, 5 and 6: a law a test, on threads and on processes.

Points 1 and 2 hold in every test here: gradients are compared over ranks bit by bit, and with three references. *Alone*
is one process on the concatenated batch, *plain* is `average_gradients` after a backward without the engine, and
*torch* is torch's own DistributedDataParallel (processes only).
"""

import contextlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradsync
import gradsync.core.bucket.bucket
from gradsync.communicator import Communicator, choose_communicator
from tests.laws import costly
from tests.ranks import RankPool, Ranks, ThreadRanks, pool_of

pytestmark = pytest.mark.timeout(120)

WIDTH = 8
BATCH = 3
EXACT = 1e-12
SCHEDULES = ("overlapped", "bucketed", "naive")

# What every rank returns of a step, and of a training: gradients by name.
Gradients = dict[str, torch.Tensor | None]


# -- the models ---------------------------------------------------------------------------------------------------


class Conv(nn.Module):
    """Sees its input as a small image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.conv(hidden.reshape(-1, 2, 2, 2)).flatten(1)


class Lookup(nn.Module):
    """Adds a row per id, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


class Layers(nn.Sequential):
    """Plain layers that take no ids."""

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Layers(nn.Linear(WIDTH, WIDTH)),
    "wide": lambda: Layers(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH, bias=False)),
    # Its gradients are larger than a chunk, each.
    "huge": lambda: Layers(nn.Linear(WIDTH, 4500), nn.Tanh(), nn.Linear(4500, WIDTH, bias=False)),
    "norm": lambda: Layers(nn.LayerNorm(WIDTH)),
    "conv": Conv,
    "lookup": Lookup,
}


class Net(nn.Module):
    """Residual blocks, of which a sample runs through those that `runs` says, in the order that `order` says.

    A block named "again" is the one before it once more. The head is always used.
    """

    def __init__(self, blocks: Sequence[str], seed: int = 0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for block in blocks:
            layers.append(layers[-1] if block == "again" else BLOCKS[block]())
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 2)
        self.double()
        # torch's own random numbers are shared by ranks that are threads.
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                fan_in = parameter[0].numel() if parameter.dim() > 1 else WIDTH
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(values * fan_in**-0.5)

    def forward(
        self, hidden: torch.Tensor, ids: torch.Tensor, runs: torch.Tensor, order: Sequence[int] | None = None
    ) -> torch.Tensor:
        for number in range(len(self.blocks)) if order is None else order:
            share = runs[:, number : number + 1]
            if share.any():
                hidden = hidden + share * torch.tanh(self.blocks[number](hidden, ids))
        return self.head(hidden)


@dataclass(frozen=True)
class Batch:
    """One rank's share of a step: inputs, and which blocks they run through."""

    inputs: torch.Tensor
    ids: torch.Tensor
    runs: torch.Tensor

    @classmethod
    def draw(cls, blocks: int, dropped: frozenset[int] = frozenset(), *key: int) -> "Batch":
        generator = torch.Generator().manual_seed(hash(key) & 0xFFFF_FFFF)
        runs = torch.ones(BATCH, blocks, dtype=torch.bool)
        runs[:, sorted(dropped)] = False
        inputs = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
        return cls(inputs, torch.randint(5, (BATCH,), generator=generator), runs)

    @classmethod
    def join(cls, batches: Sequence["Batch"]) -> "Batch":
        return cls(
            torch.cat([batch.inputs for batch in batches]),
            torch.cat([batch.ids for batch in batches]),
            torch.cat([batch.runs for batch in batches]),
        )

    def loss(self, model: nn.Module, order: Sequence[int] | None = None) -> torch.Tensor:
        """A mean over the samples, so that ranks' losses average to the loss of the joined batch."""
        return model(self.inputs, self.ids, self.runs, order).square().sum(1).mean()


def gradients_of(model: nn.Module) -> Gradients:
    """Copies: what the engine leaves is overwritten by the next step."""
    return {
        name.removeprefix("module."): None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def assert_close(actual: Gradients, expected: Gradients) -> None:
    """Equal up to 1e-12 of each gradient's largest element, and None in the same places."""
    assert {n for n, gradient in actual.items() if gradient is None} == {
        n for n, gradient in expected.items() if gradient is None
    }
    assert list(actual) == list(expected)
    for name, theirs in expected.items():
        ours = actual[name]
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=0.0, atol=EXACT * float(theirs.abs().max()), msg=name)


def assert_same_bits(per_rank: Sequence[Gradients]) -> None:
    for rank, gradients in enumerate(per_rank[1:], 1):
        for name, first in per_rank[0].items():
            other = gradients[name]
            assert (first is None) == (other is None), f"{name} is None on only one of the ranks 0 and {rank}"
            assert first is None or torch.equal(first, other), f"ranks 0 and {rank} differ in {name}"


def cut_chunks(nbytes: int) -> int:
    previous, gradsync.core.bucket.bucket.CHUNK_BYTES = gradsync.core.bucket.bucket.CHUNK_BYTES, nbytes
    return previous


@contextlib.contextmanager
def chunks_of(ranks: Ranks, nbytes: int) -> Iterator[None]:
    """On all ranks: buckets take gradients in by chunks that suit models as small as these."""
    previous = ranks.run(cut_chunks, nbytes)[0]
    try:
        yield
    finally:
        ranks.run(cut_chunks, previous)


class Recorder:
    """A communicator that writes down every collective it is asked for."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def all_reduce(self, tensor: torch.Tensor, *args: Any) -> Any:
        return self._record("all_reduce", tensor, *args)

    def broadcast(self, tensor: torch.Tensor, *args: Any) -> Any:
        return self._record("broadcast", tensor, *args)

    def all_gather(self, output: torch.Tensor, *args: Any) -> Any:
        return self._record("all_gather", output, *args)

    def reduce_scatter(self, output: torch.Tensor, *args: Any) -> Any:
        return self._record("reduce_scatter", output, *args)

    def _record(self, collective: str, tensor: torch.Tensor, *args: Any) -> Any:
        self.calls.append((collective, tensor.numel()))
        return getattr(self._communicator, collective)(tensor, *args)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[tuple[str, int]]]:
        """The calls that are made inside."""
        before, inside = len(self.calls), []
        yield inside
        inside += self.calls[before:]


# -- points 1 and 2: any model, any buckets ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A model, data and settings. `dropped[step][rank]` are the blocks that this rank leaves out."""

    blocks: tuple[str, ...]
    dropped: tuple[tuple[frozenset[int], ...], ...]
    seed: int = 0
    schedule: str = "overlapped"
    bucket_cap_mb: float | tuple[float, ...] | None = 0.001
    set_to_none: bool = True

    def batch(self, step: int, rank: int) -> Batch:
        return Batch.draw(len(self.blocks), self.dropped[step][rank], self.seed, step, rank)


@st.composite
def plans(draw: st.DrawFn, world_size: int, steps: int = 3) -> Plan:
    first = draw(st.sampled_from(sorted(BLOCKS)))
    blocks = (first, *draw(st.lists(st.sampled_from([*sorted(BLOCKS), "again"]), max_size=4)))
    none_or_some = st.just(frozenset()) | st.frozensets(st.integers(0, len(blocks) - 1), max_size=2)
    return Plan(
        blocks=blocks,
        dropped=tuple(tuple(draw(none_or_some) for _ in range(world_size)) for _ in range(steps)),
        seed=draw(st.integers(0, 2**16)),
        schedule=draw(st.sampled_from(SCHEDULES)),
        # A byte-sized cap gives every parameter its bucket; 1 MiB holds everything.
        bucket_cap_mb=draw(st.sampled_from([1e-5, 2e-4, 5e-4, 0.002, (1e-4, 0.001), 1.0, None])),
        set_to_none=draw(st.booleans()),
    )


def train(plan: Plan, batches: Callable[[int], Batch], wrap: Callable[[Net], nn.Module], after: Any = None) -> Any:
    """The gradients of every step, and the parameters at the end."""
    model = wrap(Net(plan.blocks, plan.seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    gradients = []
    for step in range(len(plan.dropped)):
        optimizer.zero_grad(set_to_none=plan.set_to_none)
        batches(step).loss(model).backward()
        if after is not None:
            after(model)
        gradients.append(gradients_of(model))
        optimizer.step()
    parameters = {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}
    return gradients, parameters


def train_with_every_engine(plan: Plan, *, torch_too: bool) -> dict[str, Any]:
    """On one rank: the engine under test and its references, each from the same start."""
    rank = choose_communicator().rank

    def batches(step: int) -> Batch:
        return plan.batch(step, rank)

    def wrap(model: Net) -> nn.Module:
        return gradsync.DistributedDataParallel(model, bucket_cap_mb=plan.bucket_cap_mb, schedule=plan.schedule)

    results = {
        "gradsync": train(plan, batches, wrap),
        "plain": train(plan, batches, lambda model: model, gradsync.average_gradients),
    }
    if torch_too:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a rank has no unused parameters
            results["torch"] = train(
                plan, batches, lambda model: nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
            )
    return results


def train_alone(plan: Plan, world_size: int) -> Any:
    def batches(step: int) -> Batch:
        return Batch.join([plan.batch(step, rank) for rank in range(world_size)])

    return train(plan, batches, lambda model: model)


@given(data=st.data())
def test_gradients_are_those_of_one_process_and_the_same_bits_everywhere(ranks: Ranks, data: st.DataObject) -> None:
    """Points 1, 2 and 5: for any model, unused parameters, bucket size, schedule and kind of zero_grad."""
    plan = data.draw(plans(ranks.world_size))
    results = ranks.run(train_with_every_engine, plan, torch_too=isinstance(ranks, RankPool))
    gradients, parameters = train_alone(plan, ranks.world_size)
    for step, expected in enumerate(gradients):
        ours = [result["gradsync"][0][step] for result in results]
        assert_same_bits(ours)
        assert_close(ours[0], expected)
        for reference in results[0].keys() - {"gradsync"}:
            assert_close(ours[0], results[0][reference][0][step])
    assert_same_bits([result["gradsync"][1] for result in results])
    assert_close(results[0]["gradsync"][1], parameters)


def train_long(steps: int) -> list[Gradients]:
    """Parameters after every step, from different starting points on the ranks."""
    rank = choose_communicator().rank
    model = gradsync.DistributedDataParallel(Net(("linear", "conv", "wide"), seed=rank), bucket_cap_mb=5e-4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    history = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    for step in range(steps):
        optimizer.zero_grad()
        Batch.draw(3, frozenset(), step, rank).loss(model).backward()
        optimizer.step()
        history.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return history


def test_parameters_stay_bit_identical(ranks: Ranks) -> None:
    """Point 2: from wrapping on, which takes rank 0's values, and after every optimizer step."""
    histories = ranks.run(train_long, 12)
    for moment in zip(*histories, strict=True):
        assert_same_bits(moment)
    first, last = histories[0][0], histories[0][-1]
    assert not any(torch.equal(first[name], last[name]) for name in first)


# -- point 3: decided at backward -----------------------------------------------------------------------------------


def backward_without_sync(
    model: gradsync.DistributedDataParallel, batch: Batch, form: str, order: Sequence[int] | None = None
) -> None:
    if form == "around backward":
        loss = batch.loss(model, order)
        with model.no_sync():
            loss.backward()
    elif form == "around both":
        with model.no_sync():
            batch.loss(model, order).backward()
    else:
        with model.no_sync():
            loss = batch.loss(model, order)
        loss.backward()


@dataclass
class Accumulation:
    """What one rank saw of a window: collectives in its parts, and gradients before and after synchronization."""

    ordinary: list[tuple[str, int]]
    local: list[tuple[str, int]]
    closing: list[tuple[str, int]]
    accumulated: Gradients
    accumulated_plainly: Gradients
    synchronized: Gradients
    synchronized_plainly: Gradients
    buckets: int


def accumulate(
    form: str, schedule: str, micro_batches: int, warm_up: int = 3, set_to_none: bool = True
) -> Accumulation:
    """Some ordinary steps, then `micro_batches` backwards without synchronization and one with it."""
    communicator = Recorder(choose_communicator())
    blocks = ("linear", "conv", "lookup")
    model = gradsync.DistributedDataParallel(
        Net(blocks),
        communicator=communicator,
        schedule=schedule,
        bucket_cap_mb=5e-4,  # type: ignore[arg-type]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = (Batch.draw(len(blocks), frozenset(), number, communicator.rank) for number in itertools.count())
    ordinary: list[tuple[str, int]] = []
    for _ in range(warm_up):
        model.zero_grad(set_to_none=set_to_none)
        with communicator.recording() as calls:
            next(batches).loss(model).backward()
        ordinary = calls
        optimizer.step()
    model.zero_grad(set_to_none=set_to_none)
    twin = Net(blocks)
    twin.load_state_dict(model.module.state_dict())
    if not set_to_none:
        for parameter in twin.parameters():
            parameter.grad = torch.zeros_like(parameter)
    with communicator.recording() as local:
        for batch in itertools.islice(batches, micro_batches):
            backward_without_sync(model, batch, form)
            batch.loss(twin).backward()
    accumulated, accumulated_plainly = gradients_of(model), gradients_of(twin)
    batch = next(batches)
    with communicator.recording() as closing:
        batch.loss(model).backward()
    batch.loss(twin).backward()
    gradsync.average_gradients(twin)
    return Accumulation(
        ordinary=ordinary,
        local=local,
        closing=closing,
        accumulated=accumulated,
        accumulated_plainly=accumulated_plainly,
        synchronized=gradients_of(model),
        synchronized_plainly=gradients_of(twin),
        buckets=len(model.synchronizer.buckets),
    )


FORMS = ("around backward", "around both", "forward inside, backward outside")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("form", FORMS)
def test_no_sync_sends_nothing(ranks: Ranks, form: str, schedule: str) -> None:
    """Point 3, also in the form that costs a synchronization every time under torch's DDP."""
    for seen in ranks.run(accumulate, form, schedule, 3):
        assert len(seen.ordinary) >= seen.buckets > 1, "a recorder that sees nothing proves nothing"
        assert seen.local == []
        for name, gradient in seen.accumulated_plainly.items():
            assert torch.equal(gradient, seen.accumulated[name]), f"{name} was changed by a local backward"


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to_none", "to_zero"])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_window_is_the_mean_over_ranks_of_accumulated_sums(
    ranks: Ranks, schedule: str, micro_batches: int, set_to_none: bool
) -> None:
    """Points 1 and 3: with one reduction's traffic, whatever the number of micro-batches."""
    results = ranks.run(accumulate, "around both", schedule, micro_batches, 3, set_to_none)
    assert_same_bits([seen.synchronized for seen in results])
    for seen in results:
        assert_close(seen.synchronized, seen.synchronized_plainly)
        assert [call for call, _ in seen.closing] == ["all_reduce"] * seen.buckets


@pytest.mark.parametrize("form", FORMS)
def test_a_window_may_come_before_anything_is_learned(ranks: Ranks, form: str) -> None:
    """Points 1 and 3: the first backwards of all are local ones."""
    results = ranks.run(accumulate, form, "overlapped", 2, warm_up=0)
    assert_same_bits([seen.synchronized for seen in results])
    for seen in results:
        assert seen.local == []
        assert_close(seen.synchronized, seen.synchronized_plainly)


class Expected(Exception):  # noqa: N818 (an exception that is no error)
    pass


def nest_and_fail() -> list[tuple[bool, int]]:
    """After each step into or out of `no_sync`: whether it says that backwards synchronize, and whether one does."""
    communicator = Recorder(choose_communicator())
    model = gradsync.DistributedDataParallel(Net(("linear",)), communicator=communicator, bucket_cap_mb=1.0)
    seen: list[tuple[bool, int]] = []

    def look() -> None:
        model.zero_grad()
        with communicator.recording() as calls:
            Batch.draw(1, frozenset(), len(seen), communicator.rank).loss(model).backward()
        seen.append((model.require_backward_grad_sync, len(calls) > 0))

    look()
    with model.no_sync():
        look()
        with model.no_sync():
            look()
        look()
        with contextlib.suppress(Expected), model.no_sync():
            raise Expected
        look()
    look()
    with contextlib.suppress(Expected), model.no_sync(), model.no_sync():
        look()
        raise Expected
    look()
    return seen


def test_no_sync_restores_what_was(ranks: Ranks) -> None:
    """Point 3: nesting restores the previous state, also after an exception."""
    synchronizes = [True, False, False, False, False, True, False, True]
    for seen in ranks.run(nest_and_fail):
        assert seen == [(wanted, wanted) for wanted in synchronizes]


# -- points 5 and 6: unused parameters, any order -------------------------------------------------------------------


@dataclass(frozen=True)
class Course:
    """Steps in which every rank runs its own blocks in its own order: `orders[step][rank]`."""

    blocks: int
    orders: tuple[tuple[tuple[int, ...], ...], ...]
    schedule: str = "overlapped"
    bucket_cap_mb: float = 1e-5

    def batch(self, step: int, rank: int) -> Batch:
        dropped = frozenset(range(self.blocks)) - set(self.orders[step][rank])
        return Batch.draw(self.blocks, dropped, self.blocks, step, rank)


@dataclass
class Passage:
    """What one rank saw of a course, step by step."""

    gradients: list[Gradients]
    plain: list[Gradients]
    calls: list[list[tuple[str, int]]]
    ready: list[list[int]]
    planned: list[list[int]]
    buckets: list[int]


def follow(course: Course) -> Passage:
    communicator = Recorder(choose_communicator())
    model = gradsync.DistributedDataParallel(
        Net(["linear"] * course.blocks),
        communicator=communicator,
        schedule=course.schedule,  # type: ignore[arg-type]
        bucket_cap_mb=course.bucket_cap_mb,
    )
    twin = Net(["linear"] * course.blocks)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.02) for net in (model, twin)]
    ready: list[int] = []
    for index, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: ready.append(index))
    passage = Passage([], [], [], [], [], [])
    for step, orders in enumerate(course.orders):
        batch, order = course.batch(step, communicator.rank), orders[communicator.rank]
        for optimizer in optimizers:
            optimizer.zero_grad()
        ready.clear()
        with communicator.recording() as calls:
            batch.loss(model, order).backward()
        batch.loss(twin, order).backward()
        gradsync.average_gradients(twin)
        passage.gradients.append(gradients_of(model))
        passage.plain.append(gradients_of(twin))
        passage.calls.append(calls)
        passage.ready.append(list(ready))
        passage.planned.append(list(model.synchronizer.layout.parameters))
        passage.buckets.append(len(model.synchronizer.buckets))
        for optimizer in optimizers:
            optimizer.step()
    return passage


def assert_exact(passages: Sequence[Passage]) -> None:
    """Every step: the same bits, the same collectives in the same order, and the mean."""
    for gradients in zip(*(passage.gradients for passage in passages), strict=True):
        assert_same_bits(gradients)
    for passage in passages:
        assert passage.calls == passages[0].calls
        for ours, plain in zip(passage.gradients, passage.plain, strict=True):
            assert_close(ours, plain)


def has_gradient(passage: Passage, block: int) -> list[bool]:
    return [step[f"blocks.{block}.0.weight"] is not None for step in passage.gradients]


@pytest.mark.parametrize("bucket_cap_mb", [1e-5, 0.001, 1.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_unused_parameters(ranks: Ranks, schedule: str, bucket_cap_mb: float) -> None:
    """Point 5: unused here, zeros contribute; unused everywhere, None stays None; used later, the mean again."""
    first, last = 0, ranks.world_size - 1

    def on(rank: int) -> tuple[tuple[int, ...], ...]:
        """Block 0 everywhere, block 1 on one rank, block 2 nowhere."""
        return tuple((0, 1) if here == rank else (0,) for here in range(ranks.world_size))

    everywhere = tuple((0, 1, 2) for _ in range(ranks.world_size))
    nowhere = tuple((0,) for _ in range(ranks.world_size))
    orders = (on(first), on(last), nowhere, everywhere, on(last), nowhere, everywhere, on(first), nowhere)
    course = Course(3, orders, schedule=schedule, bucket_cap_mb=bucket_cap_mb)
    passages = ranks.run(follow, course)
    assert_exact(passages)
    for passage in passages:
        assert has_gradient(passage, 0) == [True] * len(orders)
        assert has_gradient(passage, 1) == [any(1 in order for order in orders[step]) for step in range(len(orders))]
        assert has_gradient(passage, 2) == [any(2 in order for order in orders[step]) for step in range(len(orders))]


def test_a_locally_unused_parameter_gets_the_share_of_the_others(ranks: Ranks) -> None:
    """Point 5, by hand: used on rank 0 alone, the mean is 1/N of the gradient there."""
    only_rank_0 = tuple((0, 1) if rank == 0 else (0,) for rank in range(ranks.world_size))
    course = Course(2, (only_rank_0,) * 3)
    gradients = [passage.gradients[0] for passage in ranks.run(follow, course)]
    alone = Net(["linear"] * 2)
    course.batch(0, 0).loss(alone, (0, 1)).backward()
    name = "blocks.1.0.weight"
    expected = {name: gradients_of(alone)[name] / ranks.world_size}
    for mine in gradients:
        assert_close({name: mine[name]}, expected)


def test_unused_parameters_cost_no_collective(ranks: Ranks) -> None:
    """Point 5: between the checks of the order a window is one all-reduce a bucket, unused parameters or not."""
    everywhere = tuple((0, 1, 2) for _ in range(ranks.world_size))
    differing = tuple((0, 1) if rank == 0 else (0, 2) for rank in range(ranks.world_size))
    # Windows 1, 2, 4, 8 are looked at, so the ranks meet before windows 2, 3, 5 and 9.
    orders = (everywhere,) * 5 + (differing, everywhere, differing)
    for passage in ranks.run(follow, Course(3, orders, bucket_cap_mb=5e-4)):
        assert passage.buckets[-1] > 1
        for step in (3, 5, 6, 7):
            assert [call for call, _ in passage.calls[step]] == ["all_reduce"] * passage.buckets[step]


def stale_gradients(value: float) -> list[float]:
    """A parameter nobody uses, whose gradient holds something from before."""
    model = gradsync.DistributedDataParallel(Net(["linear"] * 2), bucket_cap_mb=1e-5)
    rank = choose_communicator().rank
    unused = model.module.blocks[1][0].bias
    seen = []
    for step in range(4):
        model.zero_grad()
        unused.grad = torch.full_like(unused, value)
        Batch.draw(2, frozenset({1}), step, rank).loss(model, (0,)).backward()
        seen.append(float(unused.grad[0]))
    return seen


def test_a_globally_unused_gradient_stays_as_it_was(ranks: Ranks) -> None:
    """Point 5: what all ranks hold alike is its own mean (a power of two, so that thirds come out even at 1e-12)."""
    for seen in ranks.run(stale_gradients, 4.0):
        assert seen == pytest.approx([4.0] * 4, rel=EXACT)


def random_course(world_size: int, steps: int, blocks: int, *, keep: float, seed: int, **settings: Any) -> Course:
    """Every rank, in every step, runs a random choice of the blocks in a random order."""
    source = random.Random(seed)
    orders = tuple(
        tuple(
            tuple(number for number in source.sample(range(blocks), blocks) if source.random() < keep)
            for _ in range(world_size)
        )
        for _ in range(steps)
    )
    return Course(blocks, orders, **settings)


@pytest.mark.parametrize(
    ("ranks_of_drop", "bucket_cap_mb"),
    [
        (pool_of(2), 1e-5),
        (ThreadRanks(3), 0.001),
        pytest.param(pool_of(2), 0.001, marks=pytest.mark.breadth),
        pytest.param(ThreadRanks(3), 1e-5, marks=pytest.mark.breadth),
    ],
    ids=["processes-2-1e-05", "threads-3-0.001", "processes-2-0.001", "threads-3-1e-05"],
)
def test_layers_dropped_differently_on_every_rank(ranks_of_drop: Ranks, bucket_cap_mb: float) -> None:
    """Points 1, 5 and 6: 50 steps of random layer drop, exact each step, and nobody waits for a gradient in vain."""
    course = random_course(ranks_of_drop.world_size, 50, 5, keep=0.6, seed=1, bucket_cap_mb=bucket_cap_mb)
    assert any(len({frozenset(order) for order in orders}) > 1 for orders in course.orders)
    assert_exact(ranks_of_drop.run(follow, course))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_order_on_any_rank(ranks: Ranks, schedule: str) -> None:
    """Point 6: orders that differ between ranks and change with every iteration; all blocks run."""
    course = random_course(ranks.world_size, 12, 4, keep=1.0, seed=2, schedule=schedule)
    passages = ranks.run(follow, course)
    assert_exact(passages)
    if ranks.world_size > 1:
        assert any(len({tuple(p.ready[step]) for p in passages}) > 1 for step in range(12)), "orders did not differ"


@costly
@given(data=st.data())
def test_any_course(ranks: Ranks, data: st.DataObject) -> None:
    """Points 1, 2, 5 and 6 together, as hypothesis likes it, with one or more chunks in a bucket."""
    course = random_course(
        ranks.world_size,
        steps=data.draw(st.integers(1, 10)),
        blocks=data.draw(st.integers(1, 5)),
        keep=data.draw(st.sampled_from([0.3, 0.7, 1.0])),
        seed=data.draw(st.integers(0, 2**16)),
        schedule=data.draw(st.sampled_from(SCHEDULES)),
        bucket_cap_mb=data.draw(st.sampled_from([1e-5, 5e-4, 0.001, 1.0])),
    )
    with chunks_of(ranks, data.draw(st.sampled_from([100, 600, 10_000]))):
        passages = ranks.run(follow, course)
    assert_exact(passages)


@pytest.mark.parametrize("bucket_cap_mb", [1e-5, 0.001])
def test_the_order_is_learned_from_rank_0_and_learned_again(ranks: Ranks, bucket_cap_mb: float) -> None:
    """Point 6: buckets are cut from the order in which rank 0's gradients become ready."""
    blocks = 4
    forwards, backwards = tuple(range(blocks)), tuple(reversed(range(blocks)))
    mixed = (2, 0, 3, 1)

    def orders(of_rank_0: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (of_rank_0, *[forwards if rank % 2 else mixed for rank in range(1, ranks.world_size)])

    # Windows 1, 2, 4 and 8 are looked at, and the next window's buckets are built from what was seen.
    course = Course(blocks, (orders(backwards),) * 4 + (orders(mixed),) * 5, bucket_cap_mb=bucket_cap_mb)
    passages = ranks.run(follow, course)
    assert_exact(passages)
    of_rank_0 = passages[0].ready
    assert of_rank_0[0] != of_rank_0[-1]
    for passage in passages:
        assert passage.planned[1] == passage.planned[3] == of_rank_0[0]
        assert passage.planned[8] == of_rank_0[8]


def backward_unwatched(accumulated: bool, order: Sequence[int], bucket_cap_mb: float) -> tuple[Gradients, Gradients]:
    """Some ordinary windows, and then one whose last forward goes past the wrapper."""
    communicator = choose_communicator()
    model = gradsync.DistributedDataParallel(Net(["linear"] * 3), bucket_cap_mb=bucket_cap_mb)
    twin = Net(["linear"] * 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        model.zero_grad()
        Batch.draw(3, frozenset(), step, communicator.rank).loss(model).backward()
        optimizer.step()
    model.zero_grad()
    if accumulated:
        batch = Batch.draw(3, frozenset(), 3, communicator.rank)
        with model.no_sync():
            batch.loss(model).backward()
        batch.loss(twin).backward()
    batch = Batch.draw(3, frozenset(), 4, communicator.rank)
    batch.loss(model.module, order).backward()
    batch.loss(twin, order).backward()
    gradsync.average_gradients(twin)
    return gradients_of(model), gradients_of(twin)


@pytest.mark.parametrize("bucket_cap_mb", [1e-5, 1.0])
@pytest.mark.parametrize(
    "order", [(0, 1, 2), (2, 1, 0), (1,), ()], ids=["learned order", "other order", "one block", "head alone"]
)
@pytest.mark.parametrize("accumulated", [False, True], ids=["from zero", "accumulated"])
def test_a_backward_whose_forward_nobody_watched(
    thread_ranks: Ranks, accumulated: bool, order: Sequence[int], bucket_cap_mb: float
) -> None:
    """Points 1 and 6: its first sign is a parameter's gradient, and the others have not come yet, or never will."""
    for ours, plain in thread_ranks.run(backward_unwatched, accumulated, order, bucket_cap_mb):
        assert_close(ours, plain)


def steps_without_gradients(
    course: Sequence[Sequence[str]], optimizer_steps: bool
) -> tuple[list[Gradients], list[int]]:
    """In every step each rank either uses the model or has a loss that does not depend on it."""
    communicator = Recorder(choose_communicator())
    model = gradsync.DistributedDataParallel(Net(["linear"]), communicator=communicator, bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients, synchronizations = [], []
    for step, roles in enumerate(course):
        optimizer.zero_grad()
        loss = Batch.draw(1, frozenset(), step, communicator.rank).loss(model)
        if roles[communicator.rank] == "uses":
            loss.backward()
        if optimizer_steps or step == len(course) - 1:
            optimizer.step()
        gradients.append(gradients_of(model))
        synchronizations.append(model.synchronizer.synchronizations)
    return gradients, synchronizations


@pytest.mark.parametrize("optimizer_steps", [True, False], ids=["every step", "a step was skipped"])
def test_a_rank_without_a_backward_takes_part_at_its_step(ranks: Ranks, optimizer_steps: bool) -> None:
    """Points 5 and 6: it contributes zeros; also when the step before was skipped, as GradScaler does."""
    everybody = ["uses"] * ranks.world_size
    all_but_last = ["uses"] * (ranks.world_size - 1) + ["idles"]
    results = ranks.run(steps_without_gradients, [everybody, all_but_last], optimizer_steps)
    assert_same_bits([gradients[-1] for gradients, _ in results])
    assert [counts for _, counts in results] == [[1, 2]] * ranks.world_size


# -- all of it in a row ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stretch:
    """One window: how gradients are zeroed before it, what each rank accumulates, and how it is synchronized."""

    zeroing: str
    local_forms: tuple[tuple[str, ...], ...]
    closing: str
    steps: bool
    orders: tuple[tuple[int, ...], ...]


@st.composite
def stretches(draw: st.DrawFn, world_size: int, blocks: int) -> Stretch:
    some_blocks = st.permutations(range(blocks)).flatmap(
        lambda order: st.integers(0, blocks).map(lambda kept: tuple(order[:kept]))
    )
    return Stretch(
        zeroing=draw(st.sampled_from(["to none", "to zero", "not at all"])),
        local_forms=tuple(tuple(draw(st.lists(st.sampled_from(FORMS), max_size=2))) for _ in range(world_size)),
        closing=draw(st.sampled_from(["backward", "two backwards", "unwatched", "synchronize"])),
        steps=draw(st.booleans()),
        orders=tuple(draw(some_blocks) for _ in range(world_size)),
    )


def zero_gradients(model: nn.Module, zeroing: str) -> None:
    if zeroing != "not at all":
        model.zero_grad(set_to_none=zeroing == "to none")


def walk(blocks: int, stretches: Sequence[Stretch], schedule: str, bucket_cap_mb: float) -> list[Any]:
    """The gradients after every window, by the engine and plainly."""
    communicator = choose_communicator()
    model = gradsync.DistributedDataParallel(
        Net(["linear"] * blocks),
        schedule=schedule,  # type: ignore[arg-type]
        bucket_cap_mb=bucket_cap_mb,
    )
    twin = Net(["linear"] * blocks)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.001) for net in (model, twin)]
    seen = []
    for number, stretch in enumerate(stretches):
        order = stretch.orders[communicator.rank]
        dropped = frozenset(range(blocks)) - set(order)
        for net in (model, twin):
            zero_gradients(net, stretch.zeroing)
        for micro_batch, form in enumerate(stretch.local_forms[communicator.rank], 1):
            batch = Batch.draw(blocks, dropped, number, micro_batch, communicator.rank)
            backward_without_sync(model, batch, form, order)
            batch.loss(twin, order).backward()
        batch = Batch.draw(blocks, dropped, number, 0, communicator.rank)
        if stretch.closing == "synchronize":
            with model.no_sync():
                batch.loss(model, order).backward()
            model.synchronize()
        elif stretch.closing == "unwatched":
            batch.loss(model.module, order).backward()
        else:
            loss = batch.loss(model, order)
            if stretch.closing == "two backwards":
                with model.no_sync():
                    loss.backward(retain_graph=True)
                batch.loss(twin, order).backward()
            loss.backward()
        batch.loss(twin, order).backward()
        gradsync.average_gradients(twin)
        seen.append((gradients_of(model), gradients_of(twin)))
        if stretch.steps:
            for optimizer in optimizers:
                optimizer.step()
    return seen


@costly
@given(data=st.data())
def test_any_windows_in_a_row(ranks: Ranks, data: st.DataObject) -> None:
    """Points 1, 2, 3, 5 and 6, where one window leaves the engine in the state in which the next one finds it."""
    blocks = data.draw(st.integers(1, 4))
    course = data.draw(st.lists(stretches(ranks.world_size, blocks), min_size=1, max_size=7))
    schedule, bucket_cap_mb = data.draw(st.sampled_from(SCHEDULES)), data.draw(st.sampled_from([1e-5, 0.001, 1.0]))
    with chunks_of(ranks, data.draw(st.sampled_from([600, 10_000]))):
        per_rank = ranks.run(walk, blocks, course, schedule, bucket_cap_mb)
    for window in zip(*per_rank, strict=True):
        assert_same_bits([ours for ours, _ in window])
        for ours, plain in window:
            assert_close(ours, plain)
