"""CUDA graphs, autocast with a loss scaler, and activation checkpointing, over NCCL ranks: as eager, or refused."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradsync
from gradsync.errors import MisuseError
from tests.ranks import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

REPLAYS = 100


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator("cuda").manual_seed(10 * step + dist.get_rank()))


def train(model: Any, steps: int) -> list[torch.Tensor]:
    wrapped: Any = gradsync.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3, fused=True)
    for step in range(steps):
        optimizer.zero_grad()
        wrapped(batch(step)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


def run_graphed() -> None:
    # Of torch, about streams of its own in make_graphed_callables.
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
    graphed = torch.cuda.make_graphed_callables(make_model(), (torch.randn(8, 16),))
    ours, eager = train(graphed, REPLAYS), train(make_model(), REPLAYS)
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    same = torch.cat([each.view(-1) for each in ours])
    others = same.clone()
    dist.broadcast(others, 0)
    assert torch.equal(same, others)


def run_captured() -> str:
    # Of torch, since what was refused left nothing in the graph.
    warnings.filterwarnings("ignore", "The CUDA Graph is empty")
    # And about a backward on another stream, as its documentation wants it for a capture.
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
    model: Any = gradsync.DistributedDataParallel(make_model())
    x = torch.randn(8, 16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(11):
            model.zero_grad()
            model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(MisuseError) as refused, torch.cuda.graph(graph):
        model(x).square().mean().backward()
    # Nothing is broken by it.
    model.zero_grad()
    model(x).square().mean().backward()
    torch.cuda.synchronize()
    return str(refused.value)


class Checkpointed(nn.Module):
    """The same model, whose blocks are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = make_model(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.inner[:2](x.requires_grad_())
        middle: torch.Tensor = checkpoint(self.inner[2:4], first, use_reentrant=self.reentrant)
        output: torch.Tensor = self.inner[4:](middle)
        return output


def run_checkpointed(reentrant: bool) -> None:
    torch.testing.assert_close(train(Checkpointed(reentrant), 20), train(make_model(), 20), rtol=1e-5, atol=1e-6)


def run_scaled() -> tuple[list[bool], list[torch.Tensor]]:
    """bf16 autocast with a GradScaler; in one step rank 1 alone overflows."""
    model: Any = gradsync.DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0)
    skipped = []
    for step in range(12):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch(step)).float().square().mean()
        if step == 5 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        skipped.append(all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
    return skipped, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.fixture(scope="module", params=[("slices", 2), ("mps", 3)], ids=lambda each: f"nccl-{each[0]}-{each[1]}")
def few_ranks(request: pytest.FixtureRequest) -> RankPool:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from tests.ranks import nccl_pool_of

    sharing, size = request.param
    return nccl_pool_of(size, sharing)


def test_graphed_callables_are_replayed_as_eager(few_ranks: RankPool) -> None:
    few_ranks.run(run_graphed, timeout=120.0)


def test_a_captured_step_is_refused_in_one_sentence(few_ranks: RankPool) -> None:
    for words in few_ranks.run(run_captured):
        assert "make_graphed_callables" in words


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(few_ranks: RankPool, reentrant: bool) -> None:
    few_ranks.run(run_checkpointed, reentrant)


def test_an_overflow_of_one_rank_skips_the_step_of_all(few_ranks: RankPool) -> None:
    results = few_ranks.run(run_scaled)
    for skipped, parameters in results:
        assert [step for step, was in enumerate(skipped) if was] == [5]
        for ours, first in zip(parameters, results[0][1], strict=True):
            assert torch.equal(ours, first)
