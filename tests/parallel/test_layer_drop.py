"""Layers dropped on all ranks alike: their gradients are nobody's, and do not travel."""

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from gradsync import ConfigurationError, DistributedDataParallel, LayerDrop, MisuseError, synchronize_gradients
from gradsync.communicator import choose_communicator
from gradsync.core.bucket.control_flags import Requests
from tests.parallel.training import alone, assert_same, assert_same_bits, gradients, rank_here
from tests.ranks import RankError, Ranks, ThreadRanks, pool_of

WIDTH, LAYERS = 8, 6

# A bucket for every parameter, some buckets, and one bucket for all.
CAPS = (1e-6, 0.001, 100.0)

# What is left of six layers in four forwards, at a drop of one half.
KEPT_BY_SEED_0 = [[0, 2, 3, 4, 5], [1, 3], [2, 3], [2, 3, 4, 5]]
KEPT_BY_LEAST_SEED = [[0, 1, 2, 4], [1, 2, 4, 5], [0, 3, 5], [0, 1, 2, 3]]


class Block(nn.Module):
    """Adds its number to the last entry of ``ran``."""

    def __init__(self, number: int, ran: list[list[int]]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.number, self.ran = number, ran

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.ran[-1].append(self.number)
        return hidden + torch.tanh(self.linear(hidden))


class Model(nn.Module):
    """A trunk, droppable blocks and a head. Notes which blocks ran."""

    def __init__(self, drop: float, *, seed: int = 0, head: bool = True) -> None:
        super().__init__()
        self.ran: list[list[int]] = []
        self.trunk = nn.Linear(4, WIDTH)
        self.blocks = LayerDrop([Block(number, self.ran) for number in range(LAYERS)], drop=drop, seed=seed)
        self.head: nn.Module = nn.Linear(WIDTH, 2) if head else nn.Identity()
        self.double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                # As float64 from the start: a GPU does not divide float32 as the CPU does.
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
        # The buffers of LayerDrop, too.
        self.to(self.trunk.weight.device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.ran.append([])
        output: torch.Tensor = self.head(self.blocks(self.trunk(inputs)))
        return output[:, :2]


class Straight(nn.Module):
    """The same model with the blocks to run named: the reference."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, kept: Sequence[int]) -> torch.Tensor:
        hidden = self.model.trunk(inputs)
        self.model.ran.append([])
        for number in kept:
            hidden = self.model.blocks.layers[number](hidden)
        output: torch.Tensor = self.model.head(hidden)
        return output[:, :2]


def batch(rank: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (
        torch.randn(3, 4, generator=generator, dtype=torch.float64),
        torch.randn(3, 2, generator=generator, dtype=torch.float64),
    )


def loss_of(model: nn.Module, rank: int, step: int, *args: Any) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return mse_loss(model(inputs, *args), targets)


def reference(windows: Sequence[Sequence[Sequence[int]]], ranks: int, drop: float, head: bool) -> list[list[Any]]:
    """Gradients per window in one process. ``windows`` holds, per micro-batch, the blocks that ran."""
    found, step = [], 0
    for window in windows:
        model = Straight(Model(drop, head=head))
        for kept in window:
            for rank in range(ranks):
                (loss_of(model, rank, step, kept) / ranks).backward()
            step += 1
        found.append(gradients(model.model))
    return found


def counting(sent: list[tuple[int, int]]) -> Any:
    """This rank's communicator; notes elements and bytes an element of what it sums up."""
    communicator = choose_communicator()
    original = communicator.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = "sum") -> Any:
        if op in ("sum", "average"):
            sent.append((tensor.numel(), tensor.element_size()))
        return original(tensor, op)

    communicator.all_reduce = all_reduce  # type: ignore[method-assign]
    return communicator


def run(
    drop: float,
    cap: float,
    *,
    windows: int = 6,
    micro_batches: int = 1,
    schedule: Any = "overlapped",
    head: bool = True,
    seed_by_rank: bool = False,
    forwards_before: bool = False,
) -> dict[str, Any]:
    """Backwards only, so that every window starts from the same parameters."""
    sent: list[tuple[int, int]] = []
    communicator = counting(sent)
    rank = communicator.rank
    model = Model(drop, head=head, seed=rank if seed_by_rank else 0)
    if forwards_before:
        for step in range(2 * rank):
            loss_of(model, rank, step)
        model.ran.clear()
    wrapper = DistributedDataParallel(model, communicator=communicator, bucket_cap_mb=cap, schedule=schedule)
    traffic, found = [], []
    for window in range(windows):
        sent.clear()
        wrapper.zero_grad()
        for number in range(micro_batches):
            wrapper.require_backward_grad_sync = number == micro_batches - 1
            loss_of(wrapper, rank, window * micro_batches + number).backward()
        traffic.append(list(sent))
        found.append(gradients(model))
    kept = [model.ran[first : first + micro_batches] for first in range(0, len(model.ran), micro_batches)]
    slots = [len(plan.slots) for plan in wrapper.synchronizer.layout.buckets]
    return {"kept": kept, "gradients": found, "traffic": traffic, "slots": slots}


# -- the draw ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [-0.1, 1.0, 1.5, float("nan")])
def test_a_drop_that_is_no_probability_is_refused(drop: float) -> None:
    with pytest.raises(ConfigurationError, match="drop"):
        LayerDrop([nn.Identity()], drop=drop)


def test_layers_are_dropped_as_often_as_asked_and_independently() -> None:
    model, forwards = Model(0.3), 400
    for _ in range(forwards):
        model(torch.zeros(1, 4, dtype=torch.float64))
    share = [sum(number in ran for ran in model.ran) / forwards for number in range(LAYERS)]
    assert share == pytest.approx([0.7] * LAYERS, abs=0.1)
    together = sum(0 in ran and 1 in ran for ran in model.ran) / forwards
    assert together == pytest.approx(0.49, abs=0.1)


def kept_by(seed: int, forwards: int = 4) -> list[list[int]]:
    layers = [nn.Identity() for _ in range(LAYERS)]
    drop = LayerDrop(layers, drop=0.5, seed=seed)
    return [[layers.index(layer) for layer in drop.kept()] for _ in range(forwards)]


def test_draws_are_the_same_on_every_machine_and_in_every_release() -> None:
    """A rank of another Python build, and a run that is resumed by a later one, drop the same layers."""
    assert kept_by(0) == KEPT_BY_SEED_0
    assert kept_by(-(2**63)) == KEPT_BY_LEAST_SEED


def test_seeds_that_python_hashes_alike_draw_differently() -> None:
    assert hash(-1) == hash(-2)
    assert kept_by(-1, 16) != kept_by(-2, 16)


def test_evaluation_runs_all_layers_and_draws_nothing() -> None:
    model, undisturbed = Model(0.5), Model(0.5)
    inputs = torch.zeros(1, 4, dtype=torch.float64)
    for _ in range(6):
        model.eval()
        model(inputs)
        assert model.ran.pop() == list(range(LAYERS))
        model.train()
        model(inputs)
        undisturbed(inputs)
    assert model.ran == undisturbed.ran


def test_no_drop_runs_all_layers() -> None:
    model = Model(0.0)
    model(torch.zeros(1, 4, dtype=torch.float64))
    assert model.ran == [list(range(LAYERS))]


@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
def test_a_resumed_run_goes_on_with_the_same_draws(way: str) -> None:
    inputs = torch.zeros(1, 4, dtype=torch.float64)
    model = Model(0.5, seed=3)
    for _ in range(5):
        model(inputs)
    if way == "deepcopy":
        resumed = copy.deepcopy(model)
    else:
        resumed = Model(0.5, seed=99)
        resumed(inputs)  # has drawn already
        resumed.load_state_dict(model.state_dict())
    resumed.ran.clear()
    model.ran.clear()
    for _ in range(8):
        model(inputs)
        resumed(inputs)
    assert resumed.ran == model.ran


def test_a_loop_of_ones_own_runs_the_kept_layers() -> None:
    layers = [nn.Linear(2, 2) for _ in range(4)]
    first, second = LayerDrop(layers, drop=0.5), LayerDrop(layers, drop=0.5)
    calls = [[layers.index(layer) for layer in first.kept()] for _ in range(6)]
    assert [[layers.index(layer) for layer in second.kept()] for _ in range(6)] == calls
    assert len({tuple(call) for call in calls}) > 1


def test_a_dropped_layer_passes_its_input_on_and_further_arguments_reach_the_others() -> None:
    class Plus(nn.Module):
        def forward(self, hidden: torch.Tensor, amount: float, *, times: int) -> torch.Tensor:
            return hidden + amount * times

    drop = LayerDrop([Plus() for _ in range(6)], drop=0.5)
    outputs = {float(drop(torch.zeros(()), 1.0, times=2)) for _ in range(20)}
    assert outputs <= {2.0 * kept for kept in range(7)}
    assert len(outputs) > 1
    assert float(drop.eval()(torch.zeros(()), 1.0, times=2)) == 12.0


# -- over ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["other-seeds", "other-numbers-of-forwards"])
def test_all_ranks_drop_the_same_layers_whatever_they_did_before(ranks: Ranks, before: str) -> None:
    kwargs = {"seed_by_rank": before == "other-seeds", "forwards_before": before != "other-seeds"}
    results = ranks.run(run, 0.5, 100.0, **kwargs)
    assert all(result["kept"] == results[0]["kept"] for result in results)
    assert len({str(window) for window in results[0]["kept"]}) > 1


@pytest.mark.parametrize(
    ("schedule", "cap"), [*(("overlapped", cap) for cap in CAPS), ("bucketed", CAPS[1]), ("naive", CAPS[2])]
)
def test_gradients_are_exact_and_dropped_layers_have_none(ranks: Ranks, schedule: str, cap: float) -> None:
    results = ranks.run(run, 0.5, cap, schedule=schedule)
    expected = reference(results[0]["kept"], ranks.world_size, 0.5, True)
    for result in results:
        assert_same(result["gradients"], expected)
        torch.testing.assert_close(result["gradients"], results[0]["gradients"], rtol=0, atol=0)


@pytest.mark.parametrize("cap", CAPS[1:])
def test_with_several_forwards_a_window_only_what_none_of_them_ran_is_absent(ranks: Ranks, cap: float) -> None:
    results = ranks.run(run, 0.6, cap, micro_batches=3)
    expected = reference(results[0]["kept"], ranks.world_size, 0.6, True)
    for result in results:
        assert_same(result["gradients"], expected)
    absent = [set(range(LAYERS)) - {block for ran in window for block in ran} for window in results[0]["kept"]]
    assert any(absent)  # else the test tests nothing
    assert not all(len(blocks) == LAYERS for blocks in absent)


PER_BLOCK = WIDTH * WIDTH + WIDTH  # multiples of two float64: slots need no padding
OUTSIDE = (4 * WIDTH + WIDTH) + (WIDTH * 2 + 2)
# In the first window ranks ask each other whether anybody counts micro-batches.
WHO_COUNTS = 4


@pytest.mark.parametrize(("cap", "micro_batches"), [*((cap, 1) for cap in CAPS), (CAPS[1], 2)])
def test_dropped_gradients_do_not_travel(ranks: Ranks, cap: float, micro_batches: int) -> None:
    for result in ranks.run(run, 0.5, cap, micro_batches=micro_batches):
        tail = sum(result["slots"]) + ranks.world_size + Requests.PLACES
        for number, (window, sent) in enumerate(zip(result["kept"], result["traffic"], strict=True)):
            run_by_somebody = {block for ran in window for block in ran}
            elements = sum(numel for numel, _ in sent)
            needed = OUTSIDE + PER_BLOCK * len(run_by_somebody)
            assert needed <= elements <= needed + tail + (0 if number else WHO_COUNTS)
            assert {size for _, size in sent} == {8}


@pytest.mark.parametrize(("cap", "head"), [(CAPS[0], True), (CAPS[1], True), (CAPS[1], False)])
def test_whole_buckets_may_vanish(ranks: Ranks, cap: float, head: bool) -> None:
    # Without a head the buckets of the blocks are the first to start.
    results = ranks.run(run, 0.9, cap, head=head, windows=8)
    kept = results[0]["kept"]
    assert any(not window[0] for window in kept)  # all blocks gone at once
    expected = reference(kept, ranks.world_size, 0.9, head)
    for result in results:
        assert_same(result["gradients"], expected)


class Leading(nn.Module):
    """Droppable blocks first: their gradients, and so their buckets, come last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = LayerDrop([Block(number, [[]]) for number in range(3)], drop=0.8)
        self.head = nn.Linear(WIDTH, 2)
        # The buffers of LayerDrop, too.
        self.double().to(self.head.weight.device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.blocks(inputs))
        return output


def drop_the_last_bucket(cap: float) -> list[Any]:
    model, sent, found = Leading(), [], []  # type: ignore[var-annotated]
    wrapper = DistributedDataParallel(model, communicator=counting(sent), bucket_cap_mb=cap)
    generator = torch.Generator().manual_seed(rank_here())
    for _ in range(8):
        sent.clear()
        wrapper.zero_grad()
        wrapper(torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)).sum().backward()
        blocks = [p.grad is not None for p in model.blocks.parameters()]
        found.append((blocks, sum(numel for numel, _ in sent), gradients(model.head)))
    return found


@pytest.mark.parametrize("cap", CAPS[:2])
def test_the_last_bucket_may_vanish_too(ranks: Ranks, cap: float) -> None:
    results = ranks.run(drop_the_last_bucket, cap)
    assert any(not any(blocks) for blocks, _, _ in results[0])
    for result in results:
        for number, (blocks, elements, _) in enumerate(result):
            needed = WIDTH * 2 + 2 + PER_BLOCK * sum(blocks) // 2
            tail = 8 + ranks.world_size + Requests.PLACES
            assert needed <= elements <= needed + tail + (0 if number else WHO_COUNTS)
        assert_same_bits([result, results[0]])


def uneven_windows() -> tuple[list[list[int]], list[Any]]:
    """Rank 0 runs two micro-batches where the others run one."""
    model = Model(0.5)
    wrapper = DistributedDataParallel(model)
    if rank_here() == 0:
        with wrapper.no_sync():
            loss_of(wrapper, 0, 0).backward()
    loss_of(wrapper, rank_here(), 1).backward()
    return model.ran, gradients(model)


def test_ranks_may_run_different_numbers_of_forwards_in_a_window() -> None:
    results = ThreadRanks(2).run(uneven_windows)
    straight = Straight(Model(0.5))
    for rank, (ran, _) in enumerate(results):
        for step, kept in zip([0, 1] if rank == 0 else [1], ran, strict=True):
            (loss_of(straight, rank, step, kept) / 2).backward()
    for _, found in results:
        assert_same(found, gradients(straight.model))


def join_unevenly(counts: Sequence[int]) -> tuple[list[list[int]], list[torch.Tensor]]:
    model = Model(0.5)
    wrapper = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    with warnings.catch_warnings(), wrapper.join():  # Join changes the filters
        for step in range(counts[rank_here()]):
            optimizer.zero_grad()
            loss_of(wrapper, rank_here(), step).backward()
            optimizer.step()
    return model.ran, [parameter.detach() for parameter in model.parameters()]


def test_a_rank_that_has_run_out_of_inputs_shadows_what_is_left() -> None:
    counts = [4, 1]
    results = pool_of(2).run(join_unevenly, counts)
    straight = Straight(Model(0.5))
    optimizer = torch.optim.SGD(straight.parameters(), lr=0.1)
    for step, kept in enumerate(results[0][0]):
        optimizer.zero_grad()
        for rank in (rank for rank in range(2) if step < counts[rank]):
            (loss_of(straight, rank, step, kept) / 2).backward()
        optimizer.step()
    for _, values in results:
        expected = [parameter.detach() for parameter in straight.parameters()]
        assert_same(values, expected)


def attach(drop: float) -> tuple[list[Any], list[Any]]:
    model = Model(drop)
    synchronize_gradients(model)
    found = []
    for step in range(5):
        model.zero_grad()
        loss_of(model, rank_here(), step).backward()
        found.append(gradients(model))
    return [[ran] for ran in model.ran], found


def test_it_works_without_a_wrapper(ranks: Ranks) -> None:
    for kept, found in ranks.run(attach, 0.5):
        expected = reference(kept, ranks.world_size, 0.5, True)
        assert_same(found, expected)


# -- misuse -----------------------------------------------------------------------------------------------------------


class Impatient(nn.Module):
    """Runs all blocks also past their LayerDrop."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = LayerDrop([Block(number, [[]]) for number in range(4)], drop=0.7)
        # The buffers of LayerDrop, too.
        self.double().to(self.blocks.layers[0].linear.weight.device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.blocks(inputs)
        for block in self.blocks.layers:
            hidden = block(hidden)
        return hidden


def run_past_the_drop(cap: float, schedule: Any) -> None:
    wrapper = DistributedDataParallel(Impatient(), bucket_cap_mb=cap, schedule=schedule)
    for _ in range(4):
        wrapper.zero_grad()
        wrapper(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()


@pytest.mark.parametrize("schedule", ["overlapped", "bucketed"])
@pytest.mark.parametrize("cap", CAPS)
def test_a_dropped_layer_that_runs_all_the_same_is_refused_with_the_remedy(cap: float, schedule: str) -> None:
    for error in pool_of(2).run(run_past_the_drop, cap, schedule, expect_errors=True):
        assert isinstance(error, RankError)
        assert error.kind == MisuseError.__name__, error.traceback
        assert "blocks.layers" in error.message
        assert "only through its LayerDrop" in error.message


def test_a_dropped_layer_that_runs_all_the_same_is_refused_on_a_single_rank_too() -> None:
    wrapper = DistributedDataParallel(Impatient(), communicator=alone())
    with pytest.raises(MisuseError, match="only through its LayerDrop"):
        for _ in range(4):
            wrapper.zero_grad()
            wrapper(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
