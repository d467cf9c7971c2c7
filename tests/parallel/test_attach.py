"""``synchronize_gradients``: the engine on a model that stays what it is."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from gradsync import GradientSynchronization, synchronize_gradients
from gradsync.core.engine.synchronizer import synchronizer_of
from tests.parallel.training import COPIERS, alone, assert_same, filled, gradients, loss_of, rank_here, values
from tests.ranks import Ranks


def net(seed: int = 0) -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    model: nn.Sequential = filled(layers.double(), seed)
    return model


def means(micro_batches: Sequence[Sequence[int]], seed: int = 0) -> list[torch.Tensor | None]:
    """The reference: for each rank the steps it ran, in one process. The mean is over the ranks."""
    model = net(seed)
    for rank, steps in enumerate(micro_batches):
        for step in steps:
            (loss_of(model, rank, step) / len(micro_batches)).backward()
    return gradients(model)


# -- attached ---------------------------------------------------------------------------------------------------------


def describe_attached() -> dict[str, Any]:
    model, plain = net(seed=rank_here()), net()
    handle = synchronize_gradients(model)
    return {
        "handle": type(handle) is GradientSynchronization,
        "class": type(model) is type(plain),
        "keys": list(model.state_dict()) == list(plain.state_dict()),
        "loaded": str(plain.load_state_dict(model.state_dict())),
        "values": values(model),
    }


def test_the_model_keeps_its_class_and_its_keys_and_takes_rank_0s_values(ranks: Ranks) -> None:
    for described in ranks.run(describe_attached):
        assert described["handle"]
        assert described["class"]
        assert described["keys"]
        assert described["loaded"] == "<All keys matched successfully>"
        torch.testing.assert_close(described["values"], [p.detach() for p in net().parameters()], rtol=0, atol=0)


def without_init_sync() -> list[torch.Tensor]:
    model = net(seed=rank_here())
    synchronize_gradients(model, init_sync=False)
    return values(model)


def test_without_init_sync_every_rank_keeps_its_own_values(ranks: Ranks) -> None:
    for rank, kept in enumerate(ranks.run(without_init_sync)):
        torch.testing.assert_close(kept, [p.detach() for p in net(rank).parameters()], rtol=0, atol=0)


def synchronize_by_hand(idle_rank: int) -> list[list[Any]]:
    """Some windows without a single synchronizing backward; one rank has no backward at all."""
    model, found = net(), []
    handle = synchronize_gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for window in range(4):
        optimizer.zero_grad()
        with handle.no_sync():
            for step in range(2):
                if rank_here() != idle_rank:
                    loss_of(model, rank_here(), 2 * window + step).backward()
        handle.synchronize()
        found.append(gradients(model))
        optimizer.step()
    return found


@pytest.mark.parametrize("idle_rank", [None, 0, 1], ids="idle-{}".format)
def test_synchronize_averages_by_hand_also_on_a_rank_without_a_backward(ranks: Ranks, idle_rank: int | None) -> None:
    expected = [
        means([[] if rank == idle_rank else [2 * w, 2 * w + 1] for rank in range(ranks.world_size)]) for w in range(4)
    ]
    for found in ranks.run(synchronize_by_hand, -1 if idle_rank is None else idle_rank):
        assert_same(found, expected)


def meet_in_backward() -> list[Any]:
    """Rank 0 calls synchronize() for what the others do in their backward."""
    model = net()
    handle = synchronize_gradients(model)
    if rank_here() == 0:
        handle.synchronize()
    else:
        loss_of(model, rank_here()).backward()
    return gradients(model)


def test_synchronize_meets_the_backward_of_the_other_ranks(ranks: Ranks) -> None:
    if ranks.world_size == 1:
        pytest.skip("needs somebody to meet")
    expected = means([[], *[[0]] * (ranks.world_size - 1)])
    for found in ranks.run(meet_in_backward):
        assert_same(found, expected)


# -- detached and copied ----------------------------------------------------------------------------------------------


def hooks_on(model: nn.Module) -> int:
    modules = [
        hooks
        for module in model.modules()
        for name, hooks in vars(module).items()
        if name.endswith("_hooks") and isinstance(hooks, dict)
    ]
    parameters = [getattr(parameter, "_post_accumulate_grad_hooks", None) or {} for parameter in model.parameters()]
    return sum(map(len, modules)) + sum(map(len, parameters))


def train_and_detach() -> tuple[list[Any], list[Any], list[Any], int]:
    model = net()
    handle = synchronize_gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank_here(), step).backward()
    before = gradients(model)
    handle.detach()
    kept = gradients(model)
    optimizer.zero_grad()
    loss_of(model, rank_here(), 3).backward()
    optimizer.step()  # of gradients that only this rank has: nobody minds any more
    assert all(synchronizer_of(parameter) is None for parameter in model.parameters())
    return before, kept, gradients(model), hooks_on(model)


def test_detach_keeps_the_gradients_stops_the_averaging_and_leaves_no_hook(ranks: Ranks) -> None:
    for rank, (before, kept, after, hooks) in enumerate(ranks.run(train_and_detach)):
        assert_same(before, means([[2]] * ranks.world_size))
        torch.testing.assert_close(kept, before, rtol=0, atol=0)
        model = net()
        loss_of(model, rank, 3).backward()
        assert_same(after, gradients(model))
        assert hooks == 0


def attach_again() -> list[Any]:
    model = net()
    synchronize_gradients(model).detach()
    synchronize_gradients(model)
    loss_of(model, rank_here()).backward()
    return gradients(model)


def test_a_detached_model_can_be_attached_again(ranks: Ranks) -> None:
    expected = means([[0]] * ranks.world_size)
    for found in ranks.run(attach_again):
        assert_same(found, expected)


def train_a_copy(copier: Callable[[Any], Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Only rank 0 uses its copy: it would wait for ever if the copy were still attached."""
    model = net()
    synchronize_gradients(model)
    loss_of(model, rank_here(), 0).backward()
    copied = copier(model)
    model.zero_grad()
    copied.zero_grad()
    if rank_here() == 0:
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.0)
        loss_of(copied, rank_here(), 1).backward()
        optimizer.step()
    loss_of(model, rank_here(), 1).backward()
    unattached = [synchronizer_of(parameter) for parameter in copied.parameters()]
    return gradients(copied), gradients(model), unattached


@pytest.mark.parametrize("copier", COPIERS)
def test_a_copy_of_the_model_works_alone(ranks: Ranks, copier: Callable[[Any], Any]) -> None:
    results = ranks.run(train_a_copy, copier)
    assert_same(results[0][0], means([[1]]))
    for copied, original, unattached in results:
        assert_same(original, means([[1]] * ranks.world_size))
        assert unattached == [None] * len(unattached)
        assert copied is results[0][0] or set(copied) == {None}


def test_a_handle_that_is_forgotten_goes_on_averaging() -> None:
    model = net()
    synchronize_gradients(model, communicator=alone())
    loss_of(model, 0).backward()
    assert all(synchronizer_of(parameter) is not None for parameter in model.parameters())
