"""The end of a process: nothing of a communicator is at work when the interpreter ends, whatever was under way."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from gradsync.communicator import SharedMemoryCommunicator, shutdown
from gradsync.communicator.shared_heap import HostPeers
from gradsync.communicator.shutdown import MOST_KEPT, UnderWay
from tests.communicators import fresh_communicator
from tests.ranks import RankPool
from tests.scripts import free_port

pytestmark = pytest.mark.timeout(120)


def test_what_is_under_way_is_kept_until_it_ends() -> None:
    kept = UnderWay()
    ends = [False] * 3
    tensors = [torch.ones(number + 1) for number in range(3)]
    numbers = [kept.begin(lambda n=n: ends[n], (tensors[n],)) for n in range(3)]  # type: ignore[misc]
    ends[1] = True
    assert [each.numel() for each in kept.left()] == [1, 3]
    kept.end(numbers[0])
    assert [each.numel() for each in kept.left()] == [3]


def test_what_nobody_waits_for_is_let_go_of_when_it_has_ended() -> None:
    kept = UnderWay()
    for _ in range(5 * MOST_KEPT):
        kept.begin(lambda: True, (torch.ones(1),))
    assert len(kept._tensors) <= MOST_KEPT


def test_threads_of_gloo_are_given_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they have been at rest twice in a row."""
    looks = iter([["S", "R"], ["S", "S"], ["R", "S"], ["S", "S"], ["S", "S"], ["R", "R"]])
    monkeypatch.setattr(shutdown, "_gloo_states", lambda: iter(next(looks)))
    monkeypatch.setattr(shutdown, "SETTLE_SECONDS", 60.0)
    shutdown._await_idle_gloo()
    assert next(looks) == ["R", "R"]


def test_a_communicator_over_others_leaves_before_them() -> None:
    """Or its thread would begin theirs anew, after they have left."""
    left = []

    class BaseCommunicator:
        def __init__(self, name: str) -> None:
            self.name = name
            shutdown.register(self)

        def after_fork(self) -> None:
            raise NotImplementedError

        def shutdown(self, seconds: float) -> None:
            left.append(self.name)

    communicators = [BaseCommunicator(f"communicator {number}") for number in range(20)]
    shutdown.shut_down_all()
    assert left == [communicator.name for communicator in reversed(communicators)]


def give_up_unwatched() -> list[str]:
    """The thread that watches sees nothing of it: it comes when the sockets are closed, and their numbers others'."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostPeers, "watch", lambda *_: None)
        communicator = fresh_communicator("shared-memory", 60.0)
    assert isinstance(communicator, SharedMemoryCommunicator)
    if communicator.rank == 0:
        communicator.all_reduce(torch.ones(100_000))
        time.sleep(0.3)
    # Not as long as the communicator itself would wait.
    communicator.shutdown(20.0)
    left = [thread.name for thread in threading.enumerate() if thread.name == "gradsync-shared-memory"]
    dist.barrier()
    return left


def test_giving_up_does_not_depend_on_who_watches(own_ranks: Callable[[int], RankPool]) -> None:
    assert own_ranks(2).run(give_up_unwatched) == [[], []]


def leave_with_something_under_way(seconds: float) -> tuple[list[str], bool, list[str]]:
    """On rank 0 a collective that nobody else comes to, on every communicator with its own thread, and on the group."""
    communicators = [fresh_communicator(name, 30.0) for name in ("peer-exchange", "shared-memory", "hosts-1+1")]
    group = fresh_communicator("group", 30.0)
    tensor = torch.ones(3)
    references, failures = sys.getrefcount(tensor), []
    if group.rank == 0:
        for communicator in communicators:
            communicator.all_reduce(torch.ones(100_000))
        group.all_reduce(tensor)
        references = sys.getrefcount(tensor)
        time.sleep(seconds)
    # These ranks are this test's own, and a busy machine takes its time.
    shutdown.PATIENCE_SECONDS = 10.0
    shutdown.shut_down_all()
    if group.rank == 0:
        failures = [str(communicator.failure) for communicator in communicators]
    names = ("gradsync peer exchange", "gradsync-shared-memory", "gradsync hierarchy")
    left = [thread.name for thread in threading.enumerate() if thread.name in names]
    is_kept = sys.getrefcount(tensor) == references + 1
    dist.barrier()
    return left, is_kept, failures


@pytest.mark.parametrize("seconds", [0.0, 0.0003, 1.0], ids=["at once", "as they begin", "in the middle"])
def test_nothing_is_at_work_when_the_interpreter_ends(own_ranks: Callable[[int], RankPool], seconds: float) -> None:
    (left, is_kept, failures), (others_left, _, _) = own_ranks(2).run(leave_with_something_under_way, seconds)
    assert left == others_left == []
    assert is_kept, "a thread of Gloo may be the last to hold it"
    assert len(failures) == 3
    for failure in failures:
        assert "its process ends, and did not wait for what was under way" in failure


LEAVE = """
import time, torch, torch.distributed as dist
from gradsync.communicator import PeerExchangeCommunicator
dist.init_process_group("gloo")
communicator = PeerExchangeCommunicator(dist.distributed_c10d._get_default_group())
communicator.all_reduce(torch.ones(100_000)).wait()
if dist.get_rank() == 0:
    for _ in range(2):
        communicator.all_reduce(torch.ones(1_000_000))
    time.sleep(0.05)
"""


@pytest.mark.program
def test_a_process_may_end_with_collectives_under_way() -> None:
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVE],
            env=os.environ | variables | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
