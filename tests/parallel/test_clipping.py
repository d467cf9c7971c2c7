"""Clipping: the norm of the averaged gradient, equal to one process's, and refused in the middle of a window."""

from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync import DistributedDataParallel
from gradsync.communicator import choose_communicator
from gradsync.errors import ConfigurationError, MisuseError
from tests.ranks import Ranks, ThreadRanks, seeded

pytestmark = pytest.mark.timeout(60)

NORMS = (1.0, 2.0, 3.5, float("inf"))


def network(*, dtype: torch.dtype = torch.float64, sparse: bool = False) -> nn.Module:
    with seeded(5):
        layers: list[nn.Module] = [nn.Linear(4, 6, dtype=dtype), nn.Tanh(), nn.Linear(6, 3, dtype=dtype)]
        if sparse:
            layers.insert(0, nn.Embedding(9, 4, sparse=True, dtype=dtype))
        return nn.Sequential(*layers)


def inputs(window: int, rank: int, *, sparse: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * window + rank)
    if sparse:
        return torch.randint(9, (5,), generator=generator)
    return torch.randn(5, 4, generator=generator, dtype=torch.float64)


def clip_windows(state: dict[str, Any], norm_type: float, sparse: bool, by: str) -> list[tuple[float, list[Any]]]:
    """The norm and the clipped gradients of four windows; the first is computed late, the others as buckets finish."""
    rank = choose_communicator().rank
    plain = network(sparse=sparse)
    plain.load_state_dict(state)
    model = DistributedDataParallel(plain, bucket_cap_mb=1e-4)
    results = []
    for window in range(4):
        with model.no_sync():
            model(inputs(window, rank + 50, sparse=sparse)).square().mean().backward()
        model(inputs(window, rank, sparse=sparse)).square().mean().backward()
        if by == "model":
            norm = model.clip_grad_norm_(0.05, norm_type)
        elif by == "parameters":
            norm = gradsync.clip_grad_norm_(model.parameters(), 0.05, norm_type)
        else:
            norm = gradsync.clip_grad_norm_(plain[-1].parameters(), 0.05, norm_type)
        results.append((float(norm), [p.grad.to_dense().clone() for p in model.parameters()]))
        model.zero_grad()
    return results


def expected(state: dict[str, Any], world_size: int, norm_type: float, sparse: bool, by: str) -> list[Any]:
    model = network()
    if sparse:
        model = nn.Sequential(nn.Embedding(9, 4, dtype=torch.float64), *model)
    model.load_state_dict(state)
    results = []
    for window in range(4):
        for rank in range(world_size):
            for key in (rank, rank + 50):
                (model(inputs(window, key, sparse=sparse)).square().mean() / world_size).backward()
        part = model[-1] if by == "part" else model
        norm = torch.nn.utils.clip_grad_norm_(part.parameters(), 0.05, norm_type)
        results.append((float(norm), [p.grad.clone() for p in model.parameters()]))
        model.zero_grad()
    return results


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("sparse", [False, True])
def test_equals_one_process(ranks: Ranks, norm_type: float, sparse: bool) -> None:
    state = network(sparse=sparse).state_dict()
    results = ranks.run(clip_windows, state, norm_type, sparse, "model")
    reference = expected(state, ranks.world_size, norm_type, sparse, "model")
    assert [[norm for norm, _ in result] for result in results] == [[norm for norm, _ in results[0]]] * len(results)
    for result in results:
        torch.testing.assert_close(result, reference, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("by", ["parameters", "part"])
def test_of_parameters(by: str) -> None:
    """Parameters in any number: whole buckets where all of them are meant, single gradients otherwise."""
    state = network().state_dict()
    reference = expected(state, 2, 2.0, False, by)
    for result in ThreadRanks(2).run(clip_windows, state, 2.0, False, by):
        torch.testing.assert_close(result, reference, rtol=1e-12, atol=1e-14)


def norms_after(change: str) -> tuple[float, float]:
    """What is computed as buckets finish is forgotten when somebody changes the gradients afterwards."""
    model = DistributedDataParallel(network())
    for _ in range(2):
        model.zero_grad()
        model(inputs(0, 0)).square().mean().backward()
        if change == "scaled":
            for parameter in model.parameters():
                parameter.grad.mul_(3)
        elif change == "moved":
            for parameter in model.parameters():
                parameter.grad.data = parameter.grad * 3
        elif change == "dropped":
            next(model.parameters()).grad = None
        elif change == "exchanged":
            first = next(model.parameters())
            first.grad = torch.full_like(first, 2.0)
        true = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        clipped = model.clip_grad_norm_(0.1 * float(true))
        left = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert float(left) == pytest.approx(0.1 * float(true), rel=1e-5)
    return float(clipped), float(true)


@pytest.mark.parametrize("change", ["nothing", "scaled", "moved", "dropped", "exchanged"])
def test_sees_changes(change: str) -> None:
    for ours, true in ThreadRanks(2).run(norms_after, change):
        assert ours == pytest.approx(true, rel=1e-12)


def precomputed() -> list[bool]:
    model = DistributedDataParallel(network(), bucket_cap_mb=1e-4)
    seen = []
    for _ in range(3):
        model.zero_grad()
        model(inputs(0, 0)).square().mean().backward()
        norms = model.synchronizer.engine.store.norms
        seen.append(norms is not None and all(norms.of(bucket) is not None for bucket in model.synchronizer.buckets))
        model.clip_grad_norm_(1.0)
    return seen


def test_norms_are_there_when_backward_returns() -> None:
    """Once it is known that they are wanted, and the buckets are made in the learned order."""
    for seen in ThreadRanks(2).run(precomputed):
        assert seen[0] is False
        assert seen[-1] is True


def clip_too_early(how: str) -> str:
    model = DistributedDataParallel(network())
    with model.accumulate(last=False):
        model(inputs(0, 0)).square().mean().backward()
        with pytest.raises(MisuseError, match="unfinished window") as caught:
            if how == "norm":
                model.clip_grad_norm_(1.0)
            else:
                gradsync.clip_grad_value_(model, 1.0)
    with model.accumulate(last=True):
        model(inputs(1, 0)).square().mean().backward()
    model.clip_grad_norm_(1.0)
    return str(caught.value)


@pytest.mark.parametrize("how", ["norm", "value"])
def test_refused_inside_a_window_and_nothing_lost(ranks: Ranks, how: str) -> None:
    for message in ranks.run(clip_too_early, how):
        assert "before the optimizer steps" in message


def clip_value() -> float:
    model = DistributedDataParallel(network())
    model(10 * inputs(0, 0)).square().sum().backward()
    gradsync.clip_grad_value_(model, 0.01)
    return max(float(p.grad.abs().max()) for p in model.parameters())


def test_value() -> None:
    assert ThreadRanks(2).run(clip_value) == [0.01] * 2


def not_finite() -> None:
    model = DistributedDataParallel(network())
    (model(inputs(0, 0)).sum() * float("nan")).backward()
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert model.clip_grad_norm_(1.0).isnan()


def test_not_finite() -> None:
    ThreadRanks(1).run(not_finite)


@pytest.mark.parametrize("arguments", [(-1.0,), (float("nan"),), ("much",), (1.0, 0.0), (1.0, -2.0), (None,)])
def test_bad_numbers(arguments: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_norm"):
        gradsync.clip_grad_norm_(network(), *arguments)


def test_a_model_without_the_engine() -> None:
    model = network()
    model(inputs(0, 0)).sum().backward()
    true = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    assert float(gradsync.clip_grad_norm_(model, 0.1)) == pytest.approx(true)
    assert float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])) == pytest.approx(0.1, rel=1e-4)
