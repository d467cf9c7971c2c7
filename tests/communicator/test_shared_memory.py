"""What is special about shared memory: where buckets lie, who notices a rank that ends, and what is left of it all.

The collectives themselves are tested by the contract of all communicators, in test_communicators.py.
"""

import contextlib
import gc
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.communicator import (
    ProcessGroupCommunicator,
    SharedMemoryCommunicator,
    fit_communicator,
    shared_signals,
)
from tests.ranks import RankError, RankPool

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")


def group_communicator() -> ProcessGroupCommunicator:
    return ProcessGroupCommunicator(dist.distributed_c10d._get_default_group())


def shared_communicator(timeout: float = 60.0) -> SharedMemoryCommunicator:
    return SharedMemoryCommunicator(group_communicator(), timeout=timeout)


# -- where things lie -------------------------------------------------------------------------------------------------


def reduce_buckets() -> dict[str, object]:
    communicator = shared_communicator()
    bucket = communicator.allocate(1_000_001, torch.float32, CPU)
    bucket.fill_(communicator.rank + 1.0)
    communicator.all_reduce(bucket).wait()
    part = bucket[50:60_000]
    communicator.all_reduce(part, "max").wait()
    segments = len(communicator._heap._segments)
    del bucket, part
    gc.collect()
    return {
        "segments": (segments, len(communicator._heap._segments)),
        "in /dev/shm": [name for name in os.listdir("/dev/shm") if "gradsync" in name],
        "descriptors": [link for link in descriptors() if "memfd:gradsync" in link],
    }


def descriptors() -> list[str]:
    return [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]


def test_memory_has_no_name_and_goes_with_the_last_tensor(own_ranks: Callable[[int], RankPool]) -> None:
    for seen in own_ranks(3).run(reduce_buckets):
        before, after = seen["segments"]  # type: ignore[misc]
        assert after == before - 1
        assert seen["in /dev/shm"] == []
        assert seen["descriptors"] == []


def mixed_places() -> list[torch.Tensor]:
    """Some ranks' tensors lie in shared memory, and some do not."""
    communicator = shared_communicator()
    results = []
    for numel in (10, 300_000, 700_001):
        shared = communicator.allocate(numel, torch.float64, CPU)
        tensor = torch.zeros(numel, dtype=torch.float64) if communicator.rank == 1 else shared
        tensor.copy_(torch.arange(numel) + communicator.rank)
        communicator.all_reduce(tensor).wait()
        results.append(tensor.clone())
    return results


def allocate_while_some_let_go() -> list[float]:
    """Small, then large, then small: between them ranks let go of a whole slab at different times."""
    communicator = shared_communicator(timeout=5.0)
    kept = [communicator.allocate(60_000, torch.float32, CPU) for _ in range(5)]
    if communicator.rank == 0:
        kept.clear()
        gc.collect()
    large = communicator.allocate(1_000_000, torch.float32, CPU)
    small = communicator.allocate(100, torch.float32, CPU)
    sums = []
    for tensor in (large, small):
        communicator.all_reduce(tensor.fill_(communicator.rank + 1.0)).wait()
        sums.append(tensor[-1].item())
    communicator.close()
    return sums


def test_ranks_may_let_go_of_memory_at_different_times(own_ranks: Callable[[int], RankPool]) -> None:
    assert own_ranks(3).run(allocate_while_some_let_go) == [[6.0, 6.0]] * 3


def allocate_more_than_a_slab() -> list[int]:
    communicator = shared_communicator()
    own = len(communicator._heap._segments)
    counts = []
    for _ in range(3):
        small = [communicator.allocate(60_000, torch.float32, CPU) for _ in range(5)]
        communicator.all_reduce(small[-1]).wait()
        counts.append(len(communicator._heap._segments) - own)
        del small
        gc.collect()
    counts.append(len(communicator._heap._segments) - own)
    communicator.close()
    return counts


def test_slabs_that_nobody_uses_any_more_go(own_ranks: Callable[[int], RankPool]) -> None:
    """Four of these tensors fill a slab. Five lie in two of them, and with none left only the open one stays."""
    assert own_ranks(3).run(allocate_more_than_a_slab) == [[1, 2, 2, 1]] * 3


def test_ranks_may_keep_their_tensors_in_different_places(own_ranks: Callable[[int], RankPool]) -> None:
    for results in own_ranks(3).run(mixed_places):
        for result in results:
            expected = 3 * torch.arange(result.numel(), dtype=torch.float64) + 3
            assert torch.equal(result, expected)


def run_in_the_background() -> bool:
    """Nobody waits for it, and it comes to an end."""
    communicator = shared_communicator()
    bucket = communicator.allocate(1_000_000, torch.float32, CPU)
    bucket.fill_(1.0)
    handle = communicator.all_reduce(bucket)
    deadline = time.monotonic() + 30
    while not (bucket == 3).all() and time.monotonic() < deadline:
        time.sleep(0.01)
    arrived = bool((bucket == 3).all())
    handle.wait()
    return arrived


def test_a_bucket_is_reduced_while_its_rank_does_something_else(own_ranks: Callable[[int], RankPool]) -> None:
    assert own_ranks(3).run(run_in_the_background) == [True] * 3


def wait_for_a_late_rank() -> float:
    """Seconds of processor time that waiting for half a second took."""
    communicator = shared_communicator()
    message = torch.ones(4)
    communicator.all_reduce(message).wait()
    if communicator.rank == 2:
        time.sleep(0.5)
    busy = time.process_time()
    communicator.all_reduce(message).wait()
    return time.process_time() - busy


def test_waiting_costs_no_processor_time(own_ranks: Callable[[int], RankPool]) -> None:
    assert max(own_ranks(3).run(wait_for_a_late_rank)) < 0.25


# -- ranks that differ, or end ----------------------------------------------------------------------------------------


def start_different_collectives() -> str:
    communicator = shared_communicator()
    tensor = torch.ones(5 if communicator.rank == 1 else 3)
    with pytest.raises(gradsync.MismatchError) as raised:
        communicator.all_reduce(tensor).wait()
    after = torch.ones(2)
    communicator.all_reduce(after).wait()
    assert after.tolist() == [3.0, 3.0], "the collective after a refused one is as good as any"
    return str(raised.value)


def test_different_collectives_are_refused_on_all_ranks(own_ranks: Callable[[int], RankPool]) -> None:
    for message in own_ranks(3).run(start_different_collectives):
        assert "rank 0: all_reduce sum of 3 × torch.float32" in message
        assert "rank 1: all_reduce sum of 5 × torch.float32" in message


def go_on_until_rank_1_is_killed(numel: int, with_child: bool) -> float:
    communicator = shared_communicator()
    bucket = communicator.allocate(numel, torch.float32, CPU)
    child = 0
    if communicator.rank == 1 and with_child:
        # Like a worker of a DataLoader, which may live on for a while.
        child = os.fork()
        if child == 0:
            time.sleep(5)
            os._exit(0)
    for number in range(1000):
        if communicator.rank == 1 and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        communicator.all_reduce(bucket).wait()
    return 0.0


@pytest.mark.parametrize(
    ("numel", "with_child"), [pytest.param(10, True, marks=pytest.mark.breadth), (1_000_000, False)]
)
def test_a_killed_rank_is_named(own_ranks: Callable[[int], RankPool], numel: int, with_child: bool) -> None:
    answers = own_ranks(3).run(go_on_until_rank_1_is_killed, numel, with_child, timeout=30, expect_errors=True)
    assert isinstance(answers[1], RankError)
    assert answers[1].kind == "RankDied"
    for rank in (0, 2):
        answer = answers[rank]
        assert isinstance(answer, RankError)
        assert answer.kind == "CommunicatorLostError"
        assert "rank 1 (process " in answer.message
        assert "has ended" in answer.message
        assert "all_reduce sum" in answer.message


kept: list[SharedMemoryCommunicator] = []


def end_while_it_is_looked_for() -> str:
    """Rank 1, which has not come, ends between two looks: the post of whoever noticed is not the rank's."""
    communicator = shared_communicator()
    kept.append(communicator)
    said = ""
    if communicator.rank == 0:

        def spin(semaphore: Any) -> bool:
            communicator._signals._note_end(1)
            return bool(semaphore.try_take())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_signals, "_spin", spin)
            with pytest.raises(gradsync.PeerFailedError) as raised:
                communicator.all_reduce(torch.ones(3)).wait()
        said = str(raised.value)
    dist.barrier()
    return said


def test_an_end_is_not_taken_for_a_coming(own_ranks: Callable[[int], RankPool]) -> None:
    assert "rank 1 (process " in own_ranks(3).run(end_while_it_is_looked_for)[0]


def leave_first() -> list[float]:
    """A rank that has done its part may go, and the others get their result all the same."""
    communicator = shared_communicator()
    tensors = [torch.ones(100_000) for _ in range(3)]
    handles = [communicator.all_reduce(tensor) for tensor in tensors]
    for handle in handles:
        handle.wait()
    if communicator.rank == 0:
        communicator.close()
    return [float(tensor.mean()) for tensor in tensors]


def test_a_rank_may_leave_after_its_part(own_ranks: Callable[[int], RankPool]) -> None:
    assert own_ranks(3).run(leave_first) == [[3.0] * 3] * 3


# -- where memory is short --------------------------------------------------------------------------------------------


class Lines(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        logging.getLogger("gradsync").addHandler(self)
        try:
            yield
        finally:
            logging.getLogger("gradsync").removeHandler(self)


@contextlib.contextmanager
def short_of_memory(rank: int, nbytes: int) -> Iterator[list[str]]:
    """No file, and so no shared memory, of more than ``nbytes``, on rank 1. Gives what is logged."""
    log, (_, hard) = Lines(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes if rank == 1 else resource.RLIM_INFINITY, hard))
    with log.listening():
        yield log.lines
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))


def allocate_too_much() -> tuple[list[str], float]:
    communicator = shared_communicator()
    with short_of_memory(communicator.rank, 10_000_000) as lines:
        buckets = [communicator.allocate(3_000_000, torch.float32, CPU) for _ in range(2)]
    for bucket in buckets:
        bucket.fill_(communicator.rank)
        communicator.all_reduce(bucket).wait()
    return lines, float(buckets[0].mean() + buckets[1].mean())


def test_buckets_that_cannot_be_shared_take_another_way(own_ranks: Callable[[int], RankPool]) -> None:
    results = own_ranks(3).run(allocate_too_much)
    assert [total for _, total in results] == [6.0] * 3
    lines = [lines for lines, _ in results]
    assert lines[0] == lines[2] == []
    assert len(lines[1]) == 1
    assert "rank 1 cannot share 12000000 bytes" in lines[1][0]


def train_without_shared_memory() -> tuple[str, list[str], torch.Tensor]:
    communicator = group_communicator()
    torch.manual_seed(0)
    with short_of_memory(communicator.rank, 1000) as lines:
        choice = fit_communicator(ProcessGroupCommunicator(dist.new_group()), CPU)
    model = gradsync.DistributedDataParallel(nn.Linear(3, 1), communicator=choice.communicator)
    model(torch.full((1, 3), float(communicator.rank))).sum().backward()
    assert model.module.weight.grad is not None
    return str(choice), lines, model.module.weight.grad


def test_without_any_shared_memory_the_group_is_used_and_the_log_says_so(
    own_ranks: Callable[[int], RankPool],
) -> None:
    for choice, lines, gradient in own_ranks(3).run(train_without_shared_memory):
        assert choice.startswith("the process group (memory cannot be shared")
        assert sum("gradients travel over sockets" in line for line in lines) == 1
        assert gradient.tolist() == [[1.0, 1.0, 1.0]]
