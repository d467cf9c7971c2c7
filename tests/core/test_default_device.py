"""A user's ``torch.set_default_device`` is for the user's own tensors: gradsync says where it makes each of its own.

"meta" stands for a device on which nothing can be read.
"""

from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync.reduction import reduction_by_name
from tests.ranks import Ranks, seeded

pytestmark = pytest.mark.timeout(120)

STEPS = 6


def train(kind: str, default: str) -> list[torch.Tensor]:
    rank = gradsync.communicator.choose_communicator().rank
    with seeded(0):
        plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2))
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * n + rank)) for n in range(STEPS)]
    with torch.device(default):
        reduction = None if kind in ("sharded", "overlapped", "weights") else reduction_by_name(kind)
        model: Any = gradsync.DistributedDataParallel(plain, reduction=reduction, bucket_cap_mb=0.0005)
        options = {"lr": 0.05, "momentum": 0.9}
        optimizer: Any = torch.optim.SGD(plain.parameters(), **options)
        if kind == "sharded":
            optimizer = gradsync.ShardedOptimizer(torch.optim.SGD(model.parameters(), **options), model)
        elif kind == "overlapped":
            optimizer = gradsync.OverlappedOptimizer(optimizer, model)
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            if kind == "weights":
                with model.accumulate(last=True):
                    model.backward(model(batch).square().mean(), weight=1 + (number + rank) % 2)
            else:
                model(batch).square().mean().backward()
            gradsync.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


KINDS = ("mean", "bf16", "int8", "low-rank:2", "top-k:0.1", "sharded", "overlapped", "weights")


@pytest.mark.breadth
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same_under_another_default_device(process_ranks: Ranks, kind: str) -> None:
    expected = process_ranks.run(train, kind, "cpu")
    for ours, theirs in zip(process_ranks.run(train, kind, "meta"), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0)
