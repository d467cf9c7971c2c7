"""A rank whose device is slow is named, though no host waits for anything. Skipped where there is no CUDA device."""

import logging
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from gradsync import DistributedDataParallel
from tests.observe.test_gpu_recording import LONG, slow_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 80


def two_ranks(rank: int, folder: str, slow: int | None, has_buffers: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.cuda.set_device(0)
    handler = logging.FileHandler(Path(folder, f"said-{rank}"))
    logging.getLogger("gradsync").addHandler(handler)
    model = slow_model()
    for layer in model:
        # Both take a while, so that one of them is slower, and not the only one with work.
        layer.cycles = LONG // 20
    # Forwards wait for the buffers of rank 0.
    whole = nn.Sequential(nn.BatchNorm1d(32), *model) if has_buffers else model
    wrapper = DistributedDataParallel(whole.cuda(), bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.01)
    for step in range(STEPS):
        if rank == slow and step == STEPS // 3:
            model[1].cycles = LONG // 2
        optimizer.zero_grad()
        wrapper(torch.ones(4, 32, device="cuda")).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    # The watch looks once a second, and more often.
    time.sleep(2.0)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("has_buffers", [False, True], ids=["plain", "buffers"])
@pytest.mark.parametrize("slow", [0, 1])
def test_the_rank_with_the_slow_device_is_named(tmp_path: Path, slow: int, has_buffers: bool) -> None:
    mp.spawn(two_ranks, args=(str(tmp_path), slow, has_buffers), nprocs=2)
    said = (tmp_path / "said-0").read_text()
    assert f"rank {slow} (process " in said, said
    assert "computes " in said
    assert f"rank {1 - slow} (process " not in said


def test_nobody_is_named_where_devices_are_alike(tmp_path: Path) -> None:
    mp.spawn(two_ranks, args=(str(tmp_path), None, True), nprocs=2)
    assert (tmp_path / "said-0").read_text() == ""
