"""Parameters that lie in flat memory, so that a sharded step copies nothing: nobody can tell, except by the time."""

import os
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gradsync import DistributedDataParallel
from gradsync.errors import MisuseError
from gradsync.optim.sharded import ShardedOptimizer
from gradsync.optim.sharded.share import Share, movable
from tests.optim.training import (
    TINY,
    assert_as_plain,
    assert_same,
    batch,
    filled,
    in_threads_and_processes,
    make,
    net,
    parameters_of,
    take_steps,
)
from tests.ranks import Ranks, ThreadRanks

pytestmark = pytest.mark.timeout(120)


def shares_of(optimizer: ShardedOptimizer) -> list[Share]:
    segments = optimizer._segments
    assert segments is not None
    return segments.shares


# -- they do lie there ------------------------------------------------------------------------------------------------


def require_flat(optimizer: ShardedOptimizer) -> None:
    for share in shares_of(optimizer):
        storages = {parameter.untyped_storage()._cdata for parameter in share.bucket.parameters}
        assert storages == {share.flat.untyped_storage()._cdata}
        assert share.is_in_place
        # Nothing is to be loaded before a step.
        assert not share.current()


def lie_flat() -> None:
    model = DistributedDataParallel(net(), bucket_cap_mb=3e-4)
    optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    memory: list[StorageWeakRef] = []
    for step in range(5):
        take_steps(model, optimizer, [step])
        optimizer.flush()
        require_flat(optimizer)
        if step == 1:
            memory = [StorageWeakRef(share.flat.untyped_storage()) for share in shares_of(optimizer)]
            model.synchronizer.engine.store.build()
    # Once buckets were laid out again, what parameters have left is free.
    assert len(memory) > 1
    assert all(reference.expired() for reference in memory)


@in_threads_and_processes
def test_parameters_of_a_bucket_lie_in_one_storage(ranks: Ranks) -> None:
    ranks.run(lie_flat)


def freeze_one() -> None:
    model = DistributedDataParallel(net())
    optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    frozen, *others = model.parameters()
    for step in range(6):
        frozen.requires_grad_(step < 2)
        take_steps(model, optimizer, [step])
    optimizer.flush()
    assert all(other.untyped_storage().nbytes() > other.nbytes for other in others)
    assert frozen.untyped_storage().nbytes() == frozen.nbytes


def test_one_that_is_frozen_does_not_keep_the_memory_of_all() -> None:
    ThreadRanks(2).run(freeze_one)


# -- and nobody can tell ----------------------------------------------------------------------------------------------


def keep_views(kind: str, when: int) -> list[torch.Tensor]:
    """Weights are limited through views that were taken once, as some code does."""
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    optimizer = make(kind, torch.optim.SGD, model, lr=0.3)
    views: list[torch.Tensor] = []
    for step in range(8):
        if step == when:
            views = [parameter.data for parameter in model.parameters()]
        take_steps(model, optimizer, [step])
        if kind == "sharded":
            optimizer.flush()
            if step == 5:
                model.synchronizer.engine.store.build()
        for view in views:
            view.clamp_(-0.1, 0.1)
    return parameters_of(model)


@pytest.mark.parametrize("when", [0, 4], ids=["before the first step", "between steps"])
@in_threads_and_processes
def test_views_of_parameters_stay_views_of_them(ranks: Ranks, when: int) -> None:
    plain = ranks.run(keep_views, "plain", when)[0]
    assert max(float(each.abs().max()) for each in plain) <= 0.1
    assert_same(ranks.run(keep_views, "sharded", when), plain)


def swap_memory(kind: str) -> list[torch.Tensor]:
    """A parameter gets other memory for some steps, and what it had before is put back."""
    model = DistributedDataParallel(net(), bucket_cap_mb=2e-3)
    optimizer = make(kind, torch.optim.SGD, model, lr=0.3)
    weight = next(model.parameters())
    saved, seen = weight.data, []
    for step in range(7):
        if step == 2:
            saved = weight.data
            weight.data = torch.full_like(saved, 0.25)
        if step == 4:
            seen.append(saved.clone())
            weight.data = saved
        if step == 5:
            # Nobody has the old memory: it may lie in the flat one again.
            weight.data = torch.full_like(weight, 0.5)
        take_steps(model, optimizer, [step])
        weight.detach()
    return [*seen, *parameters_of(model)]


@in_threads_and_processes
def test_parameters_may_get_other_memory(ranks: Ranks) -> None:
    assert_as_plain(ranks, swap_memory)


class Odd(nn.Module):
    """Parameters in channels_last, of complex numbers, without elements, used twice, and of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 2).double().to(memory_format=torch.channels_last)
        self.phase = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j], dtype=torch.complex128))
        self.nothing = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.single = nn.Parameter(torch.ones(5))
        self.strided = nn.Parameter(torch.arange(8.0, dtype=torch.float64)[::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x[:, :6].reshape(-1, 3, 2, 1).expand(-1, -1, -1, 2)
        seen = self.convolution(images).sum() + self.convolution(images * 2).sum()
        rest = (self.phase * self.phase.conj()).real.sum() + self.single.double().square().sum() + self.nothing.sum()
        return seen.square() + rest + self.strided.square().sum()


def train_odd(kind: str) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
    model = DistributedDataParallel(filled(Odd()), bucket_cap_mb=1.0)
    optimizer = make(kind, torch.optim.AdamW, model, lr=1e-2)
    take_steps(model, optimizer, range(6))
    return parameters_of(model), [parameter.stride() for parameter in model.parameters()]


@in_threads_and_processes
def test_they_look_as_before(ranks: Ranks) -> None:
    theirs, strides = ranks.run(train_odd, "plain")[0]
    ours = ranks.run(train_odd, "sharded")
    assert_same([parameters for parameters, _ in ours], theirs)
    assert all(mine == strides for _, mine in ours)


def test_what_others_refer_to_is_not_moved() -> None:
    alone, viewed, shared = (nn.Parameter(torch.ones(4)) for _ in range(3))
    view = viewed.detach()
    shared.share_memory_()
    tied = nn.Parameter(torch.ones(4))
    other = nn.Parameter(tied.data[1:])
    left, right = (nn.Parameter(half) for half in torch.ones(8).split(4))
    found = movable([alone, viewed, shared, tied, other, left, right])
    assert found == {id(alone), id(left), id(right)}
    # Half of a storage whose other half is not among those that move.
    assert movable([left]) == set()
    del view
    assert id(viewed) in movable([viewed])


def use_an_old_graph() -> None:
    model = DistributedDataParallel(net())
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    take_steps(model, optimizer, [0])
    take_steps(model, optimizer, [1])
    kept = model.module(batch(0, 0)).square().mean()
    take_steps(model, optimizer, [2])
    optimizer.flush()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(kept, list(model.module.parameters()))


@in_threads_and_processes
def test_autograd_sees_that_they_have_changed(ranks: Ranks) -> None:
    ranks.run(use_an_old_graph)


def change_in_a_fork() -> list[torch.Tensor]:
    model = DistributedDataParallel(net())
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    take_steps(model, optimizer, [0])
    before = parameters_of(model)
    child = os.fork()
    if child == 0:
        for parameter in model.parameters():
            parameter.data.fill_(7.0)
        os._exit(0)
    os.waitpid(child, 0)
    assert all(map(torch.equal, before, parameters_of(model)))
    return before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("ranks", [("processes", 2)], indirect=True, ids=["processes-2"])
def test_a_forked_process_has_parameters_of_its_own(ranks: Ranks) -> None:
    ranks.run(change_in_a_fork)


# -- in the middle of a step ------------------------------------------------------------------------------------------


class Slow(torch.optim.SGD):
    """Lets somebody look at parameters when it has updated them, and is not through yet."""

    element_wise = True
    look: Any = None

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if Slow.look is not None:
            Slow.look()
        return result


def read_in_the_middle() -> None:
    model = DistributedDataParallel(net())
    optimizer = ShardedOptimizer(Slow(model.parameters(), lr=0.1), model)
    take_steps(model, optimizer, [0])
    weight = next(model.parameters())
    seen: list[torch.Tensor] = []
    readers: list[threading.Thread] = []

    def look() -> None:
        with pytest.raises(MisuseError, match="inside of the step"):
            weight.sum()
        readers.append(threading.Thread(target=lambda: seen.append(weight.detach().clone())))
        readers[-1].start()
        readers[-1].join(0.2)
        assert not seen

    Slow.look = look
    try:
        take_steps(model, optimizer, [1])
    finally:
        Slow.look = None
    for reader in readers:
        reader.join()
    optimizer.flush()
    assert seen
    assert all(torch.equal(each, weight) for each in seen)


@pytest.mark.parametrize("ranks", [("processes", 2)], indirect=True, ids=["processes-2"])
def test_nobody_sees_half_of_a_step(ranks: Ranks) -> None:
    ranks.run(read_in_the_middle)
