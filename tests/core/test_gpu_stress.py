"""Memory over streams, under stress: every reduction and optimizer, small buckets, a busy allocator, ranks that share a
GPU. See [Note: memory over streams] in gradsync/communicator/device_stage.py.

Each window is compared with a naive all_reduce of a copy of the gradients. The host reads nothing until the last window
has been queued, so that it runs as far ahead of the device as in a training.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.communicator import device_stage
from gradsync.reduction import ErrorFeedback, LowRank, Quantize, Reduction, Sign, TopK, reduction_by_name
from tests.ranks import RankPool

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

# By time slices every collective takes milliseconds: all windows for pairs in the first mode, fewer for the others.
WINDOWS, FEW_WINDOWS = 50, 8
# Several buckets for each of the larger layers' gradients.
BUCKET_MB = 0.05
WIDTH = 96
# By name, with what the error of one window may be, relative to the largest gradient of any rank; None: no bound but
# the law of what was held back.
REDUCTIONS: dict[str, tuple[Callable[[], Reduction], float | None]] = {
    "mean": (lambda: reduction_by_name("mean"), 1e-6),
    "bf16": (lambda: reduction_by_name("bf16"), 2 * 2.0**-8),
    "fp16": (lambda: reduction_by_name("fp16"), 2 * 2.0**-11),
    "int8": (lambda: reduction_by_name("int8"), 2 / 254),
    "int4": (lambda: Quantize(4), 2 / 14),
    "int8 stochastic": (lambda: Quantize(8, stochastic=True), 2 / 127),
    "int8 with feedback": (lambda: ErrorFeedback(Quantize(8)), None),
    "int4 with feedback": (lambda: ErrorFeedback(Quantize(4)), None),
    "sign with feedback": (lambda: ErrorFeedback(Sign()), None),
    "low-rank with feedback": (lambda: ErrorFeedback(LowRank(4)), None),
    "top-k with feedback": (lambda: ErrorFeedback(TopK(0.05)), None),
}
MODES = ("plain", "accumulate", "weights")
# With the reductions that they allow, and how far parameters may be from those of a naive training by then: float32
# sums in another order drift apart slowly, rounded ones faster.
OPTIMIZERS = {
    ("plain", "mean"): 1e-3,
    ("plain", "int8"): 5e-3,
    ("sharded", "mean"): 1e-3,
    ("sharded", "bf16"): 2e-3,
    ("sharded", "fp16"): 1e-3,
    ("overlapped", "mean"): 1e-3,
}


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(33, WIDTH)]
    for number in range(6):
        layers += [nn.Tanh() if number % 2 else nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def batch(window: int, micro: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1000 * window + 10 * micro + dist.get_rank())
    return torch.randn(8, 33, generator=generator)


@contextmanager
def churning() -> Iterator[Callable[[], None]]:
    """What is called takes memory of many sizes, fills it, and lets most of it go."""
    held: list[torch.Tensor] = []

    def churn() -> None:
        held.extend(torch.full((1 << power,), float("nan")) for power in range(6, 18))
        del held[: max(0, len(held) - 20)]

    yield churn
    held.clear()


def churn_inside(model: nn.Sequential, churn: Callable[[], None]) -> None:
    """Between all layers, in forward and in backward."""

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        churn()
        if output.requires_grad:
            output.register_hook(lambda _: churn())

    for part in model:
        part.register_forward_hook(hook)


def plan_of(mode: str, window: int) -> list[tuple[int, float]]:
    """The micro-batches of a window on this rank, each with its weight."""
    if mode == "plain":
        return [(0, 1.0)]
    if mode == "accumulate":
        return [(0, 1.0), (1, 1.0), (2, 1.0)]
    return [(micro, 1.0 + (window + micro + dist.get_rank()) % 3) for micro in range(2)]


def expected_mean(model: nn.Module, mode: str, window: int) -> list[torch.Tensor]:
    """By the simplest way there is: gradients of this rank, weighted, through dist.all_reduce."""
    parameters = list(model.parameters())
    total = torch.zeros(())
    summed = [torch.zeros_like(parameter) for parameter in parameters]
    for micro, weight in plan_of(mode, window):
        gradients = torch.autograd.grad(model(batch(window, micro)).square().mean(), parameters)
        torch._foreach_add_(summed, gradients, alpha=weight)
        total += weight
    flat = torch.cat([total.view(1), *(tensor.view(-1) for tensor in summed)])
    dist.all_reduce(flat)
    means = (flat[1:] / flat[0]).split([tensor.numel() for tensor in summed])
    return [mean.view_as(tensor) for mean, tensor in zip(means, summed, strict=True)]


def synchronize(model: Any, mode: str, window: int, churn: Callable[[], None]) -> None:
    """One window of ``model``, with the allocator at work wherever a hook can be."""
    micros = plan_of(mode, window)
    if mode == "weights":
        for micro, weight in micros:
            with model.accumulate(last=micro == len(micros) - 1):
                model.backward(model(batch(window, micro)).square().mean(), weight=weight)
                churn()
        return
    for micro, _ in micros:
        with model.no_sync() if micro < len(micros) - 1 else torch.enable_grad():
            loss = model(batch(window, micro)).square().mean() / len(micros)
            churn()
            loss.backward()
            churn()


def run_reduction(name: str, mode: str, windows: int = WINDOWS) -> dict[str, Any]:
    """Synchronize; return how far means were off, window by window, and what is left of the law of feedback."""
    reduction = REDUCTIONS[name][0]()
    reference = make_model()
    model: Any = gradsync.DistributedDataParallel(make_model(), reduction=reduction, bucket_cap_mb=BUCKET_MB)
    errors, largest, differences = [], [], []
    applied = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in reference.parameters()]
    wanted = [torch.zeros_like(each) for each in applied]
    with churning() as churn:
        churn_inside(model.module, churn)
        for window in range(windows):
            means = expected_mean(reference, mode, window)
            synchronize(model, mode, window, churn)
            got = [parameter.grad.clone() for parameter in model.parameters()]
            churn()
            errors.append(torch.stack([(a - b).abs().max() for a, b in zip(got, means, strict=True)]).max())
            largest.append(largest_anywhere(reference, mode, window))
            differences.append(disagreement(got))
            for sums, terms in ((applied, got), (wanted, means)):
                for total, term in zip(sums, terms, strict=True):
                    total += term
            model.zero_grad()
    held = held_back(model)
    law = [
        (a + residual - b).abs().max() / b.abs().max().clamp(min=1e-12)
        for a, residual, b in zip(applied, held, wanted, strict=True)
    ]
    return {
        "buckets": len(model.synchronizer.buckets),
        "errors": [float(e) / float(scale) for e, scale in zip(errors, largest, strict=True)],
        "differences": [float(each) for each in differences],
        "law": max(float(each) for each in law),
    }


def largest_anywhere(model: nn.Module, mode: str, window: int) -> torch.Tensor:
    """The largest share of the mean that any rank brings, as codings see it."""
    micros = plan_of(mode, window)
    found = []
    for micro, _ in micros:
        gradients = torch.autograd.grad(model(batch(window, micro)).square().mean(), list(model.parameters()))
        found.append(torch.stack([gradient.abs().max() for gradient in gradients]).max())
    most = torch.stack(found).max()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most


def disagreement(tensors: list[torch.Tensor]) -> torch.Tensor:
    """0 where all ranks hold the same bits."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).nan_to_num(nan=12345.0)
    extremes = torch.cat([flat, -flat])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    highest, lowest = extremes.chunk(2)
    return (highest + lowest).abs().max()


def held_back(model: Any) -> list[torch.Tensor]:
    """What all ranks together hold back of each parameter."""
    synchronizer = model.synchronizer
    held = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in model.parameters()]
    if isinstance(synchronizer.reduction, ErrorFeedback):
        synchronizer.engine.pipeline.await_end()
        residuals = synchronizer.reduction.state_dict()["residuals"]
        for (name, _), target in zip(model.module.named_parameters(), held, strict=True):
            if name in residuals:
                target += residuals[name]
    for each in held:
        dist.all_reduce(each)
    return held


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_window_is_as_exact_as_its_coding(nccl_ranks: RankPool, name: str, mode: str) -> None:
    windows = WINDOWS if mode == MODES[0] and nccl_ranks.world_size == 2 else FEW_WINDOWS
    for seen in nccl_ranks.run(run_reduction, name, mode, windows, timeout=120.0):
        check_reduction(seen, name)


def check_reduction(seen: dict[str, Any], name: str) -> None:
    bound = REDUCTIONS[name][1]
    assert seen["buckets"] > 4
    assert max(seen["differences"]) == 0.0, f"replicas differ in windows {nonzero(seen['differences'])}"
    if bound is not None:
        wrong = [window for window, error in enumerate(seen["errors"]) if not error <= bound]
        assert not wrong, f"windows {wrong} are off by {[seen['errors'][window] for window in wrong]}, bound {bound}"
    if "feedback" in name:
        assert seen["law"] < 1e-4


def nonzero(values: list[float]) -> list[int]:
    return [number for number, value in enumerate(values) if value]


# -- optimizers ------------------------------------------------------------------------------------------------------


def run_optimizer(kind: str, reduction: str, windows: int = WINDOWS) -> dict[str, Any]:
    """Train; return how far parameters are from those of a naive training, and whether replicas agree."""
    reference, plain = make_model(), make_model()
    model: Any = gradsync.DistributedDataParallel(plain, bucket_cap_mb=BUCKET_MB, reduction=reduction)
    options: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9}
    optimizer: Any
    if kind == "sharded":
        optimizer = gradsync.ShardedOptimizer(torch.optim.SGD(model.parameters(), **options), model)
    elif kind == "overlapped":
        optimizer = gradsync.OverlappedOptimizer(torch.optim.SGD(model.parameters(), **options), model)
    else:
        optimizer = torch.optim.SGD(model.parameters(), **options)
    naive = torch.optim.SGD(reference.parameters(), **options)
    errors, differences = [], []
    with churning() as churn:
        churn_inside(model.module, churn)
        for window in range(windows):
            for parameter, mean in zip(reference.parameters(), expected_mean(reference, "plain", window), strict=True):
                parameter.grad = mean
            naive.step()
            synchronize(model, "plain", window, churn)
            if window % 3 == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
            churn()
            if window % 5 == 4:
                now = [parameter.detach().clone() for parameter in model.parameters()]
                pairs = zip(now, map(torch.Tensor.detach, reference.parameters()), strict=True)
                errors.append(torch.stack([(a - b).abs().max() for a, b in pairs]).max())
                differences.append(disagreement(now))
    return {"errors": [float(each) for each in errors], "differences": [float(each) for each in differences]}


@pytest.mark.parametrize(("kind", "reduction"), OPTIMIZERS)
def test_every_optimizer_trains_as_a_naive_one(nccl_ranks: RankPool, kind: str, reduction: str) -> None:
    windows = WINDOWS if nccl_ranks.world_size == 2 else 2 * FEW_WINDOWS
    for seen in nccl_ranks.run(run_optimizer, kind, reduction, windows, timeout=120.0):
        assert max(seen["differences"]) == 0.0
        assert max(seen["errors"]) < OPTIMIZERS[kind, reduction]


# -- the tests themselves --------------------------------------------------------------------------------------------


def run_poisoned(name: str, *, repaired: bool) -> dict[str, Any]:
    """The stress with freed memory poisoned; with the rule switched off if not ``repaired``."""
    poisons, waited = device_stage._poisons, device_stage._Kept.waited
    device_stage._poisons = True
    if not repaired:

        def let_go_at_any_wait(kept: Any) -> None:
            kept._things = None

        device_stage._Kept.waited = let_go_at_any_wait  # type: ignore[method-assign, assignment]
    try:
        return run_reduction(name, "plain", FEW_WINDOWS)
    finally:
        device_stage._poisons = poisons
        device_stage._Kept.waited = waited  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["fp16", "int8", "sign with feedback", "low-rank with feedback"])
def test_poisoned_memory_shows_nothing_with_the_rule_and_much_without(nccl_ranks: RankPool, name: str) -> None:
    for seen in nccl_ranks.run(run_poisoned, name, repaired=True, timeout=120.0):
        check_reduction(seen, name)
    broken = nccl_ranks.run(run_poisoned, name, repaired=False, timeout=120.0)
    with pytest.raises(AssertionError):
        for seen in broken:
            check_reduction(seen, name)
