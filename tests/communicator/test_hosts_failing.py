"""Hosts that fail: whoever shares memory with a rank that has lost another host learns of it at once, and of whom.

Ranks have a number in the world, one in their host and one between hosts. Messages use the first.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.communicator import (
    Communicator,
    HierarchicalCommunicator,
    PeerExchangeCommunicator,
    ProcessGroupCommunicator,
    SharedMemoryCommunicator,
    transport_state,
)
from gradsync.communicator.topology import HostLayout
from gradsync.errors import PeerFailedError
from tests.ranks import RankError, RankPool

pytestmark = pytest.mark.timeout(120)


def share_memory(group: dist.ProcessGroup) -> Communicator:
    communicator = ProcessGroupCommunicator(group)
    return communicator if communicator.world_size == 1 else SharedMemoryCommunicator(communicator, timeout=20.0)


def hosts_of(hosts: tuple[tuple[int, ...], ...]) -> HierarchicalCommunicator:
    group = dist.new_group()
    assert group is not None
    communicator = HierarchicalCommunicator.over(group, share_memory, topology=HostLayout(hosts=hosts))
    assert isinstance(communicator.between, PeerExchangeCommunicator | None)
    return communicator


def go_on_until_one_dies(hosts: tuple[tuple[int, ...], ...], victim: int, numel: int) -> None:
    communicator = hosts_of(hosts)
    for number in range(100):
        if communicator.rank == victim and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        communicator.all_reduce(torch.ones(numel)).wait()


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("hosts", "victim", "numel"),
    [
        (((0, 1), (2, 3)), 3, 100),
        pytest.param(((0, 1), (2, 3)), 2, 100_000, marks=pytest.mark.breadth),
        pytest.param(((0, 1), (2,)), 1, 100, marks=pytest.mark.breadth),
        (((0, 1), (2,)), 2, 100),
    ],
)
def test_who_died_is_named_on_every_host(
    own_ranks: Callable[[int], RankPool], hosts: tuple[tuple[int, ...], ...], victim: int, numel: int
) -> None:
    pool = own_ranks(sum(map(len, hosts)))
    for rank, answer in enumerate(pool.run(go_on_until_one_dies, hosts, victim, numel, expect_errors=True)):
        assert isinstance(answer, RankError)
        if rank == victim:
            assert answer.kind == "RankDied"
        else:
            assert issubclass(type(answer.exception), PeerFailedError), answer
            assert f"rank {victim}" in answer.message, (rank, answer.message)


kept: list[Communicator] = []


def leave_the_others_alone() -> list[str]:
    """What is said of rank 1, which exits: between hosts of one rank each, and by an exchange."""
    group: Any = dist.distributed_c10d._get_default_group()
    communicators = [hosts_of(((0,), (1,), (2,))), PeerExchangeCommunicator(group)]
    kept.extend(communicators)
    for communicator in communicators:
        communicator.all_reduce(torch.ones(300_000)).wait()
    if group.rank() == 1:
        os._exit(0)
    said = []
    for communicator in communicators:
        with pytest.raises(PeerFailedError) as raised:
            communicator.all_reduce(torch.ones(300_000)).wait()
        said.append(str(raised.value))
    return said


def test_a_rank_that_exits_is_named(own_ranks: Callable[[int], RankPool]) -> None:
    first, exited, last = own_ranks(3).run(leave_the_others_alone, expect_errors=True)
    assert isinstance(exited, RankError)
    for rank, said in ((0, first), (2, last)):
        assert not isinstance(said, RankError), said
        for each in said:
            assert "rank 1" in each
            assert f"left rank {rank} alone in collective 2 (all_reduce sum of 300000 × torch.float32)" in each


def lose_the_other_host(seconds_to_live: float) -> tuple[str, float]:
    """Rank 2 gives up, and lives on: rank 1 has no connection with it, and shares memory with one that has."""
    communicator = hosts_of(((0, 1), (2,)))
    kept.append(communicator)
    communicator.all_reduce(torch.ones(3)).wait()
    said, took = "", 0.0
    if communicator.rank == 2:
        time.sleep(0.2)
        communicator.abort("the disk is full")
    else:
        began = time.monotonic()
        with pytest.raises(PeerFailedError) as raised:
            communicator.all_reduce(torch.ones(3)).wait()
        said, took = str(raised.value), time.monotonic() - began
        with pytest.raises(PeerFailedError) as again:
            communicator.all_reduce(torch.ones(3))
        assert str(again.value) == str(communicator.failure)
    # Nobody leaves before all have heard.
    dist.barrier()
    assert took < seconds_to_live, "that was the timeout, or the end of a process"
    return said, took


def test_a_failure_between_hosts_is_told_inside_them(own_ranks: Callable[[int], RankPool]) -> None:
    first, second, _ = own_ranks(3).run(lose_the_other_host, 15.0)
    for said, _ in (first, second):
        assert "rank 2 has given its communicator up: the disk is full" in said


def wait_too_long(numbers: list[int]) -> str:
    """Ranks that share memory, under other numbers than their own."""
    group = dist.new_group(numbers)
    rank = dist.get_rank()
    if rank not in numbers:
        dist.barrier()
        return ""
    communicator = SharedMemoryCommunicator(ProcessGroupCommunicator(group), timeout=0.3)  # type: ignore[arg-type]
    kept.append(communicator)
    said = ""
    if rank == numbers[0]:
        with pytest.raises(PeerFailedError) as raised:
            communicator.all_reduce(torch.ones(3)).wait()
        said = str(raised.value)
    dist.barrier()
    return said


def test_ranks_of_shared_memory_are_called_by_their_number_in_the_world(own_ranks: Callable[[int], RankPool]) -> None:
    said = own_ranks(3).run(wait_too_long, [1, 2])[1]
    assert said.startswith("rank 1 (0 in its group) waited 0.3 s")
    assert "for rank 2 (1 in its group) (process " in said


def die_in_the_group(numel: int) -> None:
    communicator = ProcessGroupCommunicator(dist.distributed_c10d._get_default_group())
    for number in range(100):
        if communicator.rank == 1 and number == 3:
            communicator.abort("the disk is full")
        communicator.all_reduce(torch.ones(numel)).wait()


def test_a_process_group_says_what_the_first_to_fail_has_said(own_ranks: Callable[[int], RankPool]) -> None:
    answers = own_ranks(3).run(die_in_the_group, 100, expect_errors=True)
    for answer in answers:
        assert isinstance(answer, RankError)
        assert "rank 1 has given its communicator up: the disk is full" in answer.message
    assert "Of rank 1 and rank 2 one has ended" in answers[0].message  # type: ignore[union-attr]


class Stuck:
    """A store that never answers, or only says no."""

    def __init__(self, error: bool) -> None:
        self._error = error

    def compare_set(self, *_: Any) -> bytes:
        if self._error:
            raise RuntimeError("Connection reset by peer")
        threading.Event().wait(0.5)
        return b"too late"


@pytest.mark.parametrize("error", [True, False])
def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, error: bool) -> None:
    monkeypatch.setattr(transport_state, "STORE_SECONDS", 0.05)
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda _: Stuck(error))
    group = Stuck(True)
    assert transport_state.find_root_cause(group, "rank 1 fell") == "rank 1 fell"
    # Nor asked again, though it would answer now.
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda _: store)
    store.set(transport_state.FAILED_KEY, "rank 2 fell")
    assert transport_state.find_root_cause(group, "rank 1 fell") == "rank 1 fell"
    assert transport_state.find_root_cause(Stuck(True), "rank 1 fell") == "rank 1 fell. Before that, rank 2 fell"


@pytest.mark.parametrize("in_circle", [False, True])
def test_a_group_made_anew_at_the_same_store_hears_nothing_of_the_old_one(
    monkeypatch: pytest.MonkeyPatch, in_circle: bool
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda _: store)
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    for _ in range(2):
        group, part = Stuck(True), Stuck(True)
        if in_circle:
            transport_state.FailureDomain(group).add(part)
        transport_state.clear_root_cause(part)
        assert transport_state.find_root_cause(part, "rank 1 fell") == "rank 1 fell"
        assert transport_state.find_root_cause(part, "rank 0 let go") == "rank 0 let go. Before that, rank 1 fell"
