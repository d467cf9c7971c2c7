"""Handles and stages on a CUDA device. Skipped where there is none; run there like tests/core/test_gpu.py."""

import os
import threading

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gradsync.communicator import Handle, ProcessGroupCommunicator
from gradsync.errors import PeerFailedError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def communicator(nccl: None) -> ProcessGroupCommunicator:
    group = dist.group.WORLD
    assert group is not None
    return ProcessGroupCommunicator(group)


def test_the_host_never_waits_for_a_stage(communicator: ProcessGroupCommunicator) -> None:
    """The device is kept busy, so that whatever the host does comes before it."""
    tensor = torch.zeros(1 << 20, device="cuda")

    def double() -> Handle:
        tensor.mul_(2.0)
        return communicator.all_reduce(tensor)

    def add() -> None:
        tensor.add_(0.5)

    # Once before: the device loads a kernel when it is first used, and then it waits.
    communicator.all_reduce(tensor).then(double).then(add).wait()
    tensor.fill_(1.0).clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)
        tensor.add_(1.0)
        handle = communicator.all_reduce(tensor).then(double).then(add)
        was_done = handle.done()
        handle.wait()
        handle.wait()
        result = tensor.clone()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not was_done
    assert result.unique().tolist() == [4.5]
    assert handle.done()


def test_it_calls_back_and_describes(communicator: ProcessGroupCommunicator) -> None:
    tensor, called = torch.ones(10, device="cuda"), threading.Event()
    handle = communicator.all_reduce(tensor)
    handle.when_done(called.set)
    assert called.wait(20)
    handle.wait()
    torch.cuda.synchronize()
    assert handle.done()
    assert handle.describe() == "collective 1 (all_reduce sum of 10 × torch.float32)"
    threading.Thread(target=handle.wait).start()


def test_uneven_shares_on_the_device(communicator: ProcessGroupCommunicator) -> None:
    tensor = torch.arange(6.0, device="cuda")
    output, gathered, parts = torch.empty_like(tensor), torch.empty_like(tensor), torch.empty_like(tensor)
    communicator.reduce_scatter(output, tensor, "average", [6]).wait()
    communicator.all_gather(gathered, tensor, [6]).wait()
    communicator.all_to_all(parts, tensor, [6], [6]).wait()
    for result in (output, gathered, parts):
        assert torch.equal(result, tensor)


def test_a_stage_that_fails_breaks_the_communicator(communicator: ProcessGroupCommunicator) -> None:
    def stage() -> None:
        raise ValueError("no luck")

    handle = communicator.all_reduce(torch.ones(3, device="cuda")).then(stage)
    for _ in range(2):
        with pytest.raises(ValueError, match="no luck"):
            handle.wait()
    with pytest.raises(PeerFailedError, match="no luck"):
        communicator.all_reduce(torch.ones(3, device="cuda"))


def two_ranks(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.cuda.set_device(0)
    group = dist.group.WORLD
    assert group is not None
    communicator = ProcessGroupCommunicator(group)
    tensor, share = torch.full((5,), rank + 1.0, device="cuda"), torch.zeros([2, 3][rank], device="cuda")
    handle = communicator.reduce_scatter(share, tensor, "sum", [2, 3]).then(
        lambda: communicator.all_gather(tensor, share, [2, 3])
    )
    on_host = torch.ones(2)
    chained = communicator.all_reduce(on_host).then(lambda: communicator.all_reduce(on_host))
    between = torch.ones(1, device="cuda")
    communicator.all_reduce(between).wait()
    handle.wait()
    chained.wait()
    assert tensor.tolist() == [3.0] * 5
    assert on_host.tolist() == [4.0] * 2
    assert between.item() == 2.0
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_share_a_device_over_gloo(tmp_path: object) -> None:
    """Stages on the device and on the host, of one communicator."""
    mp.spawn(two_ranks, args=(str(tmp_path),), nprocs=2)
