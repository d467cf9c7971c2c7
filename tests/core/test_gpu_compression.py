"""Compression on a GPU: the bits of the host, alone, and as NCCL ranks that share it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.core.reduction import fused
from gradsync.core.reduction.codings import Blocks, Noise, Rounded, Signs
from gradsync.reduction import reduction_by_name
from tests.ranks import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CODINGS: dict[str, Any] = {
    "8 bits": Blocks(8, 256),
    "4 bits": Blocks(4, 256),
    "small blocks": Blocks(8, 32),
    "odd blocks": Blocks(4, 96),
    "bfloat16": Rounded(torch.bfloat16),
    "float16": Rounded(torch.float16),
    "sign": Signs(256),
}


def coded(coding: Any, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    row = torch.empty(*values.shape[:-1], coding.nbytes(values.shape[-1]), dtype=torch.uint8, device=values.device)
    coding.encode(values, row)
    decoded = torch.empty_like(values)
    coding.decode(row, decoded)
    return row.cpu(), decoded.cpu()


@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize("rows", [None, 1, 3])
def test_the_bytes_are_those_of_the_host(name: str, rows: int | None) -> None:
    coding = CODINGS[name]
    generator = torch.Generator().manual_seed(0)
    shape = (*([] if rows is None else [rows]), 37 * coding.multiple)
    values = torch.randn(shape, generator=generator) * torch.logspace(-20, 20, shape[-1])
    values[..., : coding.multiple] = 0.0
    ours, theirs = coded(coding, values.cuda()), coded(coding, values)
    if name == "sign":
        # A mean magnitude is a sum, whose order differs.
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=0.0)
        return
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(bits: int, bad: float) -> None:
    values = torch.ones(1, 1024, device="cuda")
    values[0, 200] = bad
    decoded = coded(Blocks(bits, 256), values)[1]
    assert not decoded[0, 200].isfinite()
    assert decoded[0, 256:].isfinite().all()


def test_kernels_are_used_and_noise_has_its_own() -> None:
    assert fused.available(torch.ones(1, device="cuda"), 256)
    assert not fused.available(torch.ones(1), 256)
    values = torch.full((1, 25600), 0.3, device="cuda")
    values[:, ::256] = 1.0
    decoded = coded(Blocks(4, 256, Noise(0)), values)[1]
    assert abs(float(decoded[decoded < 0.9].mean()) - 0.3) < 0.01


NAMES = ("bf16", "fp16", "int8", "int4", "sign", "low-rank:2", "top-k:0.1")


def train(name: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 65), nn.Tanh(), nn.Linear(65, 3)).cuda()
    model = gradsync.DistributedDataParallel(model, reduction=reduction_by_name(name), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(8):
        seed = step * dist.get_world_size() + dist.get_rank()
        x = torch.randn(8, 33, generator=torch.Generator().manual_seed(seed)).cuda()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def compare() -> None:
    world_size = dist.get_world_size()
    exact = train("mean")
    for name in NAMES:
        ours = train(name)
        for mine, expected in zip(ours, exact, strict=True):
            assert mine.isfinite().all(), name
            assert (mine - expected).abs().max() < (1e-6 if world_size == 1 else 0.05), name
            others = [torch.empty_like(mine) for _ in range(world_size)]
            dist.all_gather(others, mine)
            assert all(torch.equal(other, others[0]) for other in others), name


def test_alone_nothing_is_lost(nccl: None) -> None:
    compare()


@pytest.mark.parametrize("nccl_ranks", [("slices", 2), ("mps", 2)], indirect=True, ids="nccl-{0[0]}-{0[1]}".format)
def test_two_ranks_of_one_gpu(nccl_ranks: RankPool) -> None:
    nccl_ranks.run(compare, timeout=120.0)
