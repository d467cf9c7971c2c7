"""The sharded optimizer on a GPU: alone, and as NCCL ranks that share it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradsync import DistributedDataParallel, ShardedOptimizer
from gradsync.optim.sharded.gather import AwaitedParameter
from tests.ranks import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 65), nn.Tanh(), nn.Linear(65, 3)
    return nn.Sequential(*layers).to("cuda", dtype)


def train(kind: str, dtype: torch.dtype, *, scaled: bool) -> tuple[list[torch.Tensor], int]:
    wide: Any = {"accumulation_dtype": torch.float32} if dtype is torch.bfloat16 else {}
    model = DistributedDataParallel(make_model(dtype), bucket_cap_mb=0.02, **wide)
    optimizer: torch.optim.Optimizer
    if kind == "sharded":
        optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True), model)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    scaler = torch.amp.GradScaler("cuda", enabled=scaled)
    awaited = 0
    for step in range(12):
        seed = step * dist.get_world_size() + dist.get_rank()
        x = torch.randn(8, 33, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)
        scaler.scale(model(x).float().square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        awaited += sum(type(parameter) is AwaitedParameter for parameter in model.parameters())
        optimizer.zero_grad()
    return [parameter.detach().double() for parameter in model.parameters()], awaited


def compare() -> None:
    alone = dist.get_world_size() == 1
    for scaled in (False, True):
        theirs, _ = train("plain", torch.float64, scaled=scaled)
        ours, awaited = train("sharded", torch.float64, scaled=scaled)
        # Alone there is nobody to wait for.
        assert (awaited == 0) == alone
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    narrow, _ = train("sharded", torch.bfloat16, scaled=False)
    torch.testing.assert_close(narrow, theirs, rtol=0.05, atol=0.05)
    mine = torch.cat([each.view(-1) for each in narrow])
    others = mine.clone()
    dist.broadcast(others, 0)
    assert torch.equal(others, mine)


def test_alone_it_trains_to_the_parameters_of_a_plain_optimizer(nccl: None) -> None:
    compare()


@pytest.mark.parametrize(
    "nccl_ranks", [("slices", 2), ("slices", 3), ("mps", 2)], indirect=True, ids="nccl-{0[0]}-{0[1]}".format
)
def test_it_trains_to_the_parameters_of_a_plain_optimizer(nccl_ranks: RankPool) -> None:
    nccl_ranks.run(compare, timeout=120.0)
