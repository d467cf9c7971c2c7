"""A forked child has its parent's communicators and none of their threads: it is told so, and does no harm."""

import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradsync import DistributedDataParallel, OverlappedOptimizer, ShardedOptimizer
from gradsync.communicator import Communicator, HierarchicalCommunicator, HostLayout, InProcessWorld
from gradsync.errors import GradsyncError
from tests.communicator.test_set_up import sums_up
from tests.communicators import fresh_communicator
from tests.ranks import pool_of

pytestmark = pytest.mark.timeout(120)

NAMES = ["group", "peer-exchange", "shared-memory", "round-robin", "hosts-1+1"]


def use(communicator: Communicator, handle: Any) -> list[str]:
    """What a child hears that uses the communicator, and tries to take it down."""
    said = []
    for call in (
        lambda: communicator.all_reduce(torch.ones(3)),
        lambda: communicator.all_gather(torch.ones(2), torch.ones(1)),
        lambda: communicator.allocate(100_000, torch.float32, torch.device("cpu")).sum(),
        handle.wait,
    ):
        try:
            call()
            said.append("nothing")
        except GradsyncError as error:
            said.append(f"{type(error).__name__}: {error}")
    communicator.abort("the child wants no more")
    if hasattr(communicator, "close"):
        communicator.close()
    return said


def answer_of_a_child(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a child as a DataLoader forks it."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(work()))
    child.start()
    assert ours.poll(20), "the child hangs"
    answer = ours.recv()
    child.join(20)
    assert child.exitcode == 0
    return answer


def in_a_child(name: str) -> tuple[list[str], bool, bool]:
    """A child while a collective is under way here; what it hears, and what is left of it."""
    communicator = fresh_communicator(name, 30.0)
    assert sums_up(communicator)
    tensor = torch.ones(3)
    # Rank 1 comes to it only when the child is gone.
    handle = communicator.all_reduce(tensor) if communicator.rank == 0 else None

    def work() -> list[str]:
        nonlocal communicator
        said = use(communicator, handle)
        del communicator
        gc.collect()
        return said

    said = []
    if communicator.rank == 0:
        said = answer_of_a_child(work)
    else:
        time.sleep(0.5)
        handle = communicator.all_reduce(tensor)
    assert handle is not None
    handle.wait()
    return said, tensor.tolist() == [2.0] * 3, sums_up(communicator)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_child_uses_no_communicator_and_breaks_none(name: str) -> None:
    (said, right, works), (_, others_right, others_work) = pool_of(2).run(in_a_child, name)
    assert right
    assert works
    assert others_right
    assert others_work
    # Only shared memory needs the others for that.
    allocates = "MisuseError" if name == "shared-memory" else "nothing"
    for heard, kind in zip(said, ("MisuseError", "MisuseError", allocates, "MisuseError"), strict=True):
        assert heard.startswith(kind), heard
    assert f"was forked from rank 0 (process {pool_of(2).pids()[0]})" in said[0]


def read_in_a_child(kind: str, flush: bool) -> list[str]:
    """What a child hears that is forked right after a step, and reads parameters."""
    model = DistributedDataParallel(torch.nn.Linear(8, 8), communicator=fresh_communicator("shared-memory", 30.0))
    if kind == "sharded":
        optimizer: Any = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    else:
        optimizer = OverlappedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    if flush:
        optimizer.flush()

    def work() -> list[str]:
        said = []
        reads: list[Callable[[], object]] = [
            lambda: model.module.weight.sum(),
            lambda: torch.cat([each.flatten() for each in model.state_dict().values()]),
            lambda: model.module(torch.ones(1, 8)),
            optimizer.flush,
        ]
        for read in reads:
            try:
                read()
                said.append("")
            except GradsyncError as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    said: list[str] = answer_of_a_child(work)
    optimizer.flush()
    return said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["sharded", "overlapped"])
def test_a_child_that_reads_parameters_right_after_a_step_is_told_to_flush(kind: str) -> None:
    for said in pool_of(2).run(read_in_a_child, kind, False):
        assert len(said) == 4
        for each in said:
            assert each.startswith("MisuseError: this process was forked while new parameters were on their way")
            assert each.endswith("Call optimizer.flush() before you fork")
    assert pool_of(2).run(read_in_a_child, kind, True) == [[""] * 4] * 2


def test_inner_communicators_are_forsaken_with_the_outer_one_but_not_a_rank_that_is_alone() -> None:
    inside, between = InProcessWorld(1).communicator(0), InProcessWorld(2).communicator(0)
    outer = HierarchicalCommunicator(inside, between, HostLayout(hosts=((0,), (1,))), rank=0)
    child = os.fork()
    if not child:
        failed = [type(communicator.failure).__name__ for communicator in (inside, between, outer)]
        os._exit(0 if failed == ["NoneType", "MisuseError", "MisuseError"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert outer.failure is None
