"""Gradients of narrow parameters that have no place in a bucket are averaged in the wide type, as the others are."""

from typing import Any

import pytest
import torch
from torch import nn

from gradsync import DistributedDataParallel, OverlappedOptimizer, ShardedOptimizer
from gradsync.communicator import choose_communicator
from tests.optim.training import TINY, batch, filled, net, parameters_of
from tests.ranks import ThreadRanks

pytestmark = pytest.mark.timeout(120)

KINDS = ("plain", "sharded", "overlapped")


def optimizer_of(kind: str, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
    if kind == "plain":
        return optimizer
    return ShardedOptimizer(optimizer, model) if kind == "sharded" else OverlappedOptimizer(optimizer, model)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.embedding(index))
        return out


def train_sparse(kind: str, accumulation_dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Rank 1 leaves the embedding out in one window."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(filled(Bag()).bfloat16(), accumulation_dtype=accumulation_dtype)
    optimizer = optimizer_of(kind, model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        if step == 2 and rank == 1:
            model.module.linear(torch.ones(1, 3, dtype=torch.bfloat16)).float().square().mean().backward()
        else:
            model(torch.tensor([step, rank])).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sparse_embedding(kind: str) -> None:
    ours = ThreadRanks(2).run(train_sparse, kind, torch.float32)
    assert all(map(torch.equal, ours[0], ours[1]))
    # Rounded at other places, so not to the bit.
    for mine, theirs in zip(ours[0], ThreadRanks(2).run(train_sparse, "plain", None)[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def train_frozen(kind: str) -> list[torch.Tensor]:
    """A layer is trained, frozen and trained again, twice."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(net().bfloat16(), bucket_cap_mb=TINY / 4, accumulation_dtype=torch.float32)
    optimizer = optimizer_of(kind, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(14):
        model.module[2].weight.requires_grad_(not (3 <= step < 6 or 9 <= step < 11))
        model(batch(rank, step).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_trained_again(kind: str) -> None:
    ours = ThreadRanks(2).run(train_frozen, kind)
    assert all(map(torch.equal, ours[0], ours[1]))
    if kind == "overlapped":
        assert all(map(torch.equal, ours[0], ThreadRanks(2).run(train_frozen, "plain")[0]))
