"""After its first failure a communicator of any kind stays broken, and says why; nobody gets a wrong result.

Ranks are real processes, and each test breaks a communicator of its own, over a group that nobody else uses.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.communicator import BaseCommunicator, Communicator, InProcessWorld, RoundRobinCommunicator
from gradsync.errors import CommunicatorLostError, GradsyncError, MismatchError, PeerFailedError
from tests.communicator.test_communicators import meet
from tests.communicators import fresh_communicator
from tests.ranks import pool_of

pytestmark = pytest.mark.timeout(120)

NAMES = ["group", "peer-exchange", "shared-memory", "round-robin"]
communicators = pytest.mark.parametrize("name", NAMES)
communicators_and_hosts = pytest.mark.parametrize("name", [*NAMES, "hosts-1+1"])

# Held so that a communicator is not closed while others still look at it.
_kept: list[Communicator] = []


def communicator_to_break(name: str, seconds: float = 30.0) -> Communicator:
    communicator = fresh_communicator(name, seconds)
    tensor = torch.ones(3)
    communicator.all_reduce(tensor).wait()
    assert tensor.tolist() == [communicator.world_size] * 3
    _kept.append(communicator)
    return communicator


def said_by(function: Callable[[], object], kind: type[BaseException] = CommunicatorLostError) -> str:
    with pytest.raises(kind) as raised:
        function()
    return str(raised.value)


# -- a rank that never comes ------------------------------------------------------------------------------------------


def stay_away(name: str) -> dict[str, Any]:
    """Rank 1 comes when the others have given up, and finds nobody: an error, or all the same the right sum."""
    # Time enough to make the group, too.
    communicator = communicator_to_break(name, 2.0)
    outcome: dict[str, Any] = {}
    tensors = [torch.ones(3), torch.ones(100_000)]
    if communicator.rank != 1:
        handles = [communicator.all_reduce(tensor) for tensor in tensors]
        outcome["first"] = said_by(handles[0].wait)
        outcome["again"] = said_by(handles[0].wait)
        outcome["other"] = said_by(handles[1].wait)
        outcome["done"] = [handle.done() for handle in handles]
        # Refused by the call itself: nothing is waited for.
        outcome["start"] = said_by(lambda: communicator.all_reduce(torch.ones(1)))
        outcome["gather"] = said_by(lambda: communicator.all_gather(torch.ones(communicator.world_size), torch.ones(1)))
        outcome["failure"] = str(communicator.failure)
    dist.barrier()
    if communicator.rank == 1:
        try:
            for tensor in tensors:
                communicator.all_reduce(tensor).wait()
                assert tensor[0] == communicator.world_size, "a wrong sum"
        except GradsyncError as error:
            outcome["late"] = str(error)
    dist.barrier()
    return outcome


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.breadth), 3])
@pytest.mark.parametrize(
    "name",
    [name if name in ("group", "shared-memory") else pytest.param(name, marks=pytest.mark.breadth) for name in NAMES],
)
def test_whoever_never_comes_breaks_the_communicator_for_good(name: str, world_size: int) -> None:
    outcomes = pool_of(world_size).run(stay_away, name)
    for rank, outcome in enumerate(outcomes):
        if rank == 1:
            continue
        assert f"rank {rank}" in outcome["first"]
        assert "(all_reduce sum of 3 × torch.float32)" in outcome["first"]
        assert outcome["done"] == [True, True]
        for use in ("again", "start", "gather", "failure"):
            assert outcome[use] == outcome["first"], use


# -- giving up --------------------------------------------------------------------------------------------------------


def give_up(name: str, fast_enough: float = 20.0) -> dict[str, Any]:
    """The last rank gives up while the others wait for it."""
    communicator = communicator_to_break(name)
    last = communicator.world_size - 1
    outcome: dict[str, Any] = {}
    if communicator.rank == last:
        time.sleep(0.2)
        for _ in range(2):
            communicator.abort("the disk is full")
        outcome["start"] = said_by(lambda: communicator.all_reduce(torch.ones(3)))
        outcome["failure"] = str(communicator.failure)
    else:
        began = time.monotonic()
        outcome["told"] = said_by(lambda: communicator.all_reduce(torch.ones(3)).wait())
        assert time.monotonic() - began < fast_enough, "that was the timeout"
        outcome["start"] = said_by(lambda: communicator.all_reduce(torch.ones(3)))
    dist.barrier()
    return outcome


@communicators
def test_a_rank_that_gives_up_is_not_waited_for(name: str) -> None:
    *others, last = pool_of(3).run(give_up, name)
    assert last["start"] == last["failure"] == "rank 2 has given its communicator up: the disk is full"
    for other in others:
        assert other["start"] == other["told"]
        assert "rank 2 has given its communicator up: the disk is full" in other["told"]


def give_up_while_waiting(name: str) -> str:
    """Another thread gives up what this one waits for. Nobody else ever comes."""
    communicator = communicator_to_break(name)
    said = ""
    if communicator.rank == 0:
        handle = communicator.all_reduce(torch.ones(100_000))
        timer = threading.Timer(0.3, communicator.abort, ["enough"])
        timer.start()
        said = said_by(handle.wait)
        timer.join()
    dist.barrier()
    return said


@communicators
def test_who_waits_here_learns_that_it_was_given_up(name: str) -> None:
    said, _ = pool_of(2).run(give_up_while_waiting, name)
    assert said == "rank 0 has given its communicator up: enough"


# -- what is known beside the communicator ----------------------------------------------------------------------------


def lose_while_waiting(name: str) -> tuple[str, str]:
    """Somebody knows that the others are gone, and tells the communicator that waits for them."""
    communicator = communicator_to_break(name)
    assert isinstance(communicator, BaseCommunicator)
    said = started = ""
    if communicator.rank == 0:
        handle = communicator.all_reduce(torch.ones(100_000))
        timer = threading.Timer(0.3, communicator.lose, ["rank 1 is gone"])
        timer.start()
        said = said_by(handle.wait)
        timer.join()
        started = said_by(lambda: communicator.all_reduce(torch.ones(1)))
        assert not communicator.state.waits
    dist.barrier()
    return said, started


@communicators_and_hosts
def test_a_communicator_that_is_lost_raises_the_message_it_was_given(name: str) -> None:
    (said, started), _ = pool_of(2).run(lose_while_waiting, name)
    # Communicators in turn pass on what the one that had the turn says.
    assert said.endswith("rank 1 is gone")
    assert started.endswith("rank 1 is gone")
    assert name == "round-robin" or said == started == "rank 1 is gone"


def complete(name: str) -> tuple[str, str, int]:
    """Rank 0 completes the message of a failure: it is asked once, when the communicator fails for the first time."""
    communicator = communicator_to_break(name)
    assert isinstance(communicator, BaseCommunicator)
    asked: list[str] = []

    def complete_message(message: str) -> str:
        asked.append(message)
        return f"rank 1 was killed. {message}"

    communicator.state.complete_message = complete_message if communicator.rank == 0 else None
    said = started = ""
    if communicator.rank == 0:
        said = said_by(communicator.all_reduce(torch.ones(3)).wait)
        started = said_by(lambda: communicator.all_reduce(torch.ones(3)))
    else:
        communicator.abort("the disk is full")
    dist.barrier()
    return said, started, len(asked)


@communicators_and_hosts
def test_the_message_of_a_failure_is_completed_once(name: str) -> None:
    (said, started, asked), _ = pool_of(2).run(complete, name)
    assert said.startswith("rank 1 was killed. ")
    assert said == started
    assert "the disk is full" in said
    assert asked == 1


# -- interruptions ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def interrupted(seconds: float = 0.2) -> Iterator[None]:
    """A context in which this process is interrupted, as by its user, after that time."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def be_interrupted(name: str) -> dict[str, str]:
    communicator = communicator_to_break(name)
    outcome = {}
    if communicator.rank == 0:
        handle = communicator.all_reduce(torch.ones(3))
        with interrupted():
            outcome["first"] = said_by(handle.wait, KeyboardInterrupt)
        outcome["start"] = said_by(lambda: communicator.all_reduce(torch.ones(3)), GradsyncError)
        outcome["failure"] = str(communicator.failure)
    else:
        time.sleep(0.6)
        try:
            tensor = torch.ones(3)
            communicator.all_reduce(tensor).wait()
            assert tensor.tolist() == [2.0] * 3, "a wrong sum"
        except PeerFailedError as error:
            outcome["late"] = str(error)
    dist.barrier()
    return outcome


@communicators_and_hosts
def test_an_interrupted_wait_breaks_the_communicator(name: str) -> None:
    outcome, _ = pool_of(2).run(be_interrupted, name)
    assert outcome["start"] == outcome["failure"]
    assert "rank 0 failed in collective 2 (all_reduce sum of 3 × torch.float32): KeyboardInterrupt" in outcome["start"]


# -- stages that fail -------------------------------------------------------------------------------------------------


def fail_in_a_stage(name: str, everybody: bool) -> dict[str, str]:
    communicator = communicator_to_break(name)
    tensor = torch.ones(3)

    def stage() -> Any:
        if everybody or communicator.rank == 1:
            raise ValueError("no luck")
        return communicator.all_reduce(tensor)

    handle = communicator.all_reduce(tensor).then(stage)
    after = handle.then(lambda: communicator.all_reduce(tensor))
    fails = everybody or communicator.rank == 1
    outcome = {
        "stage": said_by(handle.wait, ValueError if fails else PeerFailedError),
        "again": said_by(handle.wait, ValueError if fails else PeerFailedError),
        "after": said_by(after.wait, (ValueError, PeerFailedError)),  # type: ignore[arg-type]
        "start": said_by(lambda: communicator.all_reduce(tensor)),
    }
    dist.barrier()
    return outcome


@communicators
@pytest.mark.parametrize("everybody", [True, False])
def test_a_stage_that_fails_breaks_the_communicator_on_all_ranks(name: str, everybody: bool) -> None:
    for rank, outcome in enumerate(pool_of(2).run(fail_in_a_stage, name, everybody)):
        if everybody or rank == 1:
            assert outcome["stage"] == outcome["again"] == "no luck"
            assert f"rank {rank} has given its communicator up: stage " in outcome["start"]
            assert "raised ValueError: no luck" in outcome["start"]


def wait_in_a_stage_for_what_comes_later(name: str) -> str:
    communicator = communicator_to_break(name)
    tensor = torch.ones(3)
    later: list[Any] = []
    known = threading.Event()

    def stage() -> None:
        known.wait(10)
        later[0].wait()

    handle = communicator.all_reduce(tensor).then(stage)
    later.append(communicator.all_reduce(torch.ones(2)))
    known.set()
    said = said_by(handle.wait, GradsyncError)
    dist.barrier()
    return said


@communicators
def test_a_stage_cannot_wait_for_what_comes_after_it(name: str) -> None:
    for said in pool_of(2).run(wait_in_a_stage_for_what_comes_later, name):
        assert "a stage waits for a collective that was started after the stage" in said


# -- communicators over one group, and threads ------------------------------------------------------------------------


def share_a_failure() -> list[str]:
    """What is out of step is the group, not the object that says so."""
    from gradsync.communicator import PeerExchangeCommunicator, ProcessGroupCommunicator

    communicator = communicator_to_break("group")
    others = [ProcessGroupCommunicator(communicator.group), PeerExchangeCommunicator(communicator.group)]
    communicator.abort("no more")
    said = [said_by(lambda other=other: other.all_reduce(torch.ones(1))) for other in others]  # type: ignore[misc]
    dist.barrier()
    return said


def test_communicators_over_one_group_fail_together() -> None:
    for rank, said in enumerate(pool_of(2).run(share_a_failure)):
        assert said == [f"rank {rank} has given its communicator up: no more"] * 2


def test_threads_give_up_together() -> None:
    world = InProcessWorld(3)

    def give_up(communicator: Communicator) -> None:
        communicator.abort("no more")
        communicator.abort("again")
        communicator.all_reduce(torch.ones(3))

    def wait(communicator: Communicator) -> None:
        handle = communicator.all_reduce(torch.ones(3))
        told = threading.Event()
        handle.when_done(told.set)
        said_by(handle.wait)
        assert handle.done()
        assert told.wait(10)
        assert str(communicator.failure) == "rank 1 has given its communicator up: no more"
        communicator.all_reduce(torch.ones(3)).wait()

    for error in meet(world, wait, give_up, wait):  # type: ignore[arg-type]
        assert isinstance(error, PeerFailedError)
        assert str(error) == "rank 1 has given its communicator up: no more"


def test_a_timeout_sticks_to_a_thread() -> None:
    world = InProcessWorld(3, timeout=0.05)
    communicator = world.communicator(1)
    said = said_by(communicator.all_reduce(torch.ones(3)).wait)
    assert "rank 1 waited 0.05 s in collective 1 (all_reduce sum of 3 × torch.float32) for ranks [0, 2]" in said
    assert said_by(lambda: communicator.all_reduce(torch.ones(3))) == said


def test_a_mismatch_of_threads_leaves_them_in_step() -> None:
    def differ(communicator: Communicator) -> None:
        said_by(lambda: communicator.all_reduce(torch.ones(3 + communicator.rank)).wait(), MismatchError)
        output = torch.zeros(2)
        counts = ([1, 1], [1, 1]) if communicator.rank == 0 else ([2, 0], [0, 0])
        said_by(lambda: communicator.all_to_all(output, torch.ones(sum(counts[1])), *counts).wait(), MismatchError)
        assert communicator.failure is None
        tensor = torch.ones(2)
        communicator.all_reduce(tensor).wait()
        assert tensor.tolist() == [2.0, 2.0]

    assert meet(InProcessWorld(2), differ, differ) == [None, None]  # type: ignore[arg-type]


def test_one_broken_turn_breaks_the_round() -> None:
    members = [InProcessWorld(1).communicator(0) for _ in range(2)]
    communicator = RoundRobinCommunicator(members)
    assert communicator.group is None
    members[1].abort("no more")
    assert said_by(lambda: communicator.all_reduce(torch.ones(1))) == str(communicator.failure)
    assert "no more" in str(communicator.failure)
