"""`run_ranks`: a user's function as ranks of one process."""

import threading

import pytest
import torch

import gradsync
from gradsync.communicator import InProcessWorld
from gradsync.testing import communicator, run_ranks

pytestmark = pytest.mark.timeout(60)


def test_results_come_in_rank_order_whoever_is_done_first() -> None:
    done = [threading.Event() for _ in range(4)]

    def work() -> int:
        rank = communicator().rank
        if rank + 1 < len(done):
            done[rank + 1].wait()
        done[rank].set()
        return rank

    assert run_ranks(work, 4) == [0, 1, 2, 3]


def test_arguments_are_passed_on() -> None:
    def work(word: str, *, times: int) -> str:
        return word * times

    assert run_ranks(work, 2, "ab", times=2) == ["abab", "abab"]


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_see_their_world(world_size: int) -> None:
    def work() -> tuple[int, int, float]:
        total = torch.tensor([1.0])
        communicator().all_reduce(total).wait()
        return communicator().rank, communicator().world_size, float(total)

    assert run_ranks(work, world_size) == [(rank, world_size, float(world_size)) for rank in range(world_size)]


def test_worlds_do_not_see_each_other() -> None:
    """One inside the other: the inner ranks are the ambient ones inside, the outer ones afterwards."""

    def inner() -> int:
        return communicator().world_size

    def outer() -> tuple[list[int], int]:
        return run_ranks(inner, 3), communicator().world_size

    assert run_ranks(outer, 2) == [([3, 3, 3], 2)] * 2


def test_outside_there_is_no_communicator() -> None:
    run_ranks(lambda: None, 1)
    with pytest.raises(gradsync.ConfigurationError):
        communicator()


def test_an_error_is_raised_here_with_a_note_that_names_the_rank() -> None:
    def work() -> None:
        if communicator().rank == 1:
            raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck") as raised:
        run_ranks(work, 3)
    assert raised.value.__notes__ == ["raised on rank 1 of 3 (in-process ranks)"]


def test_ranks_that_wait_for_a_failed_one_are_told_which_it_was() -> None:
    """Contract point 11. They do not hang, and the story is that of the rank that failed first."""
    told: dict[int, str] = {}

    def work() -> None:
        wire = communicator()
        if wire.rank == 2:
            raise ValueError("no luck")
        try:
            wire.all_reduce(torch.ones(1)).wait()
        except gradsync.PeerFailedError as error:
            told[wire.rank] = str(error)
            raise

    with pytest.raises(ValueError, match="no luck"):
        run_ranks(work, 3)
    assert told == dict.fromkeys((0, 1), "rank 2 failed: ValueError: no luck")


def test_a_backward_does_not_wait_for_a_failed_rank() -> None:
    """Contract point 11, with the engine in between."""

    def work() -> None:
        model = gradsync.DistributedDataParallel(torch.nn.Linear(2, 2))
        for step in range(3):
            if communicator().rank == 1 and step == 2:
                raise KeyError("the data has run out")
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(KeyError, match="the data has run out") as raised:
        run_ranks(work, 2)
    assert raised.value.__notes__ == ["raised on rank 1 of 2 (in-process ranks)"]


def test_system_exit_is_an_error_too() -> None:
    def work() -> None:
        if communicator().rank == 0:
            raise SystemExit(3)
        communicator().all_reduce(torch.ones(1)).wait()

    with pytest.raises(SystemExit) as raised:
        run_ranks(work, 2)
    assert raised.value.code == 3


def test_nothing_is_left_behind() -> None:
    before = threading.active_count()
    run_ranks(lambda: None, 4)
    assert threading.active_count() == before


def test_a_world_of_no_ranks_is_refused() -> None:
    with pytest.raises(gradsync.ConfigurationError, match="at least 1, got 0"):
        run_ranks(lambda: None, 0)
    assert InProcessWorld(1).world_size == 1
