"""Where the engine and its window stand: one phase each, which says what happens and what may come next."""

import contextlib
import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradsync import DistributedDataParallel, MisuseError, PeerFailedError
from gradsync.communicator import ProcessGroupCommunicator, choose_communicator
from gradsync.core.engine.pipeline import BucketState
from gradsync.core.engine.state import Phase, Phases, Switches
from gradsync.core.window import Counting, WindowState
from gradsync.testing import run_ranks
from tests.ranks import RankError, RankPool


class Watched:
    """A model of three buckets that notes the phase, and the states of buckets, as each gradient becomes ready."""

    def __init__(self, **settings: Any) -> None:
        self.module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        self.model = DistributedDataParallel(self.module, bucket_cap_mb=8 * 8 * 4 / 2**20, **settings)
        self.engine = self.model.synchronizer.engine
        self.phases: list[Phase] = []
        self.states: list[list[BucketState]] = []
        for parameter in self.module.parameters():
            parameter.register_hook(self._note)

    def _note(self, _: torch.Tensor) -> None:
        self.phases.append(self.engine.phase)
        self.states.append([self.engine.pipeline.state_of(bucket) for bucket in self.engine.buckets])

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.ones(2, 8)).square().mean()
        return loss


def synchronized() -> tuple[list[Phase], list[Phase], list[WindowState]]:
    watched = Watched()
    states = [watched.model.synchronizer.window.state]
    between = [watched.engine.phase]
    for _ in range(2):
        watched.model.zero_grad()
        loss = watched.loss()
        states.append(watched.model.synchronizer.window.state)
        loss.backward()
        states.append(watched.model.synchronizer.window.state)
        between.append(watched.engine.phase)
    return watched.phases, between, states


def test_a_synchronized_backward() -> None:
    for during, between, states in run_ranks(synchronized, 2):
        assert set(during) == {Phase.SYNCHRONIZING}
        assert set(between) == {Phase.IDLE}
        assert states == [
            WindowState.CLOSED,
            WindowState.OPEN,
            WindowState.SYNCHRONIZED,
            WindowState.OPEN,
            WindowState.SYNCHRONIZED,
        ]


def local() -> tuple[list[Phase], WindowState, str]:
    watched = Watched()
    with watched.model.no_sync():
        watched.loss().backward()
    return watched.phases, watched.model.synchronizer.window.state, repr(watched.model.synchronizer)


def test_a_backward_of_this_rank_alone() -> None:
    for during, state, text in run_ranks(local, 2):
        assert set(during) == {Phase.LOCAL}
        assert state is WindowState.UNSYNCHRONIZED
        assert text.startswith("Synchronizer(idle: no backward runs; Window(unsynchronized: gradients of this rank")


def buckets_in_backward() -> list[list[BucketState]]:
    watched = Watched()
    for _ in range(4):
        watched.model.zero_grad()
        watched.states.clear()
        watched.loss().backward()
    return watched.states


def test_buckets_start_one_after_the_other() -> None:
    """As seen before each of three gradients lands; the last bucket, which holds the control flags, waits for the
    end."""
    filling, reducing = BucketState.FILLING, BucketState.REDUCING
    for states in run_ranks(buckets_in_backward, 2):
        assert states == [
            [filling, filling, filling],
            [reducing, filling, filling],
            [reducing, reducing, filling],
        ]


def failing() -> tuple[list[Phase], str]:
    watched = Watched()
    seen = []
    watched.loss().backward()
    if choose_communicator().rank == 1:
        watched.module[0].weight.register_hook(lambda _: 1 / 0)
    watched.model.zero_grad()
    with pytest.raises((PeerFailedError, ZeroDivisionError)):
        watched.loss().backward()
    seen.append(watched.engine.phase)
    text = watched.model.synchronizer.describe()
    watched.model.zero_grad()
    watched.module[0].weight._backward_hooks.clear()
    watched.loss().backward()
    seen.append(watched.engine.phase)
    watched.model.synchronizer.detach()
    seen.append(watched.engine.phase)
    watched.loss().backward()
    seen.append(watched.engine.phase)
    return seen, text


def detached() -> None:
    watched = Watched()
    watched.model.synchronizer.detach()
    with pytest.raises(MisuseError, match="was detached"):
        watched.model.synchronize()
    with pytest.raises(MisuseError, match="was detached"), watched.model.accumulate(last=True):
        watched.loss().backward()
    # Nothing is left half done: a wrapper that takes the parameters over works.
    other = DistributedDataParallel(watched.module)
    other.zero_grad()
    other(torch.ones(2, 8)).square().mean().backward()
    assert other.synchronizer.engine.phase is Phase.IDLE


def test_what_is_detached_says_so() -> None:
    run_ranks(detached, 2)


def test_a_failed_backward_and_the_way_back() -> None:
    for seen, text in run_ranks(failing, 2):
        assert seen == [Phase.BROKEN, Phase.IDLE, Phase.DETACHED, Phase.DETACHED]
        assert text.splitlines()[0] == f"broken: {Phase.BROKEN.value}"


def counting() -> list[Counting]:
    watched = Watched()
    weights = watched.model.synchronizer.window.weights
    seen = [weights.phase]
    with watched.model.accumulate(last=False):
        watched.loss().backward()
        seen.append(weights.phase)
    with watched.model.accumulate(last=True):
        watched.loss().backward()
        seen.append(weights.phase)
    seen.append(weights.phase)
    return seen


def test_the_weights_of_a_window() -> None:
    for seen in run_ranks(counting, 2):
        assert seen == [Counting.NOTHING, Counting.COUNTING, Counting.AGREED, Counting.NOTHING]


def described() -> str:
    watched = Watched()
    watched.loss().backward()
    return watched.model.synchronizer.describe()


def test_a_description_names_what_one_looks_for() -> None:
    for text in run_ranks(described, 2):
        first, *_ = lines = text.splitlines()
        assert first == "idle: no backward runs"
        assert any("Window(synchronized: means" in line for line in lines)
        assert any("1 windows synchronized" in line for line in lines)
        assert sum("Bucket(bucket" in line for line in lines) == 3
        assert any("'2.weight'" in line and "chunks full" in line for line in lines)


def leave_in_backward() -> str:
    """Rank 1 ends in the middle of its third backward; rank 0 says what it was missed in."""
    group = dist.distributed_c10d._get_default_group()
    watched = Watched(communicator=ProcessGroupCommunicator(group))
    for _ in range(2):
        watched.model.zero_grad()
        watched.loss().backward()
    if dist.get_rank() == 1:
        watched.module[1].weight.register_hook(lambda _: os._exit(3))
    watched.model.zero_grad()
    try:
        watched.loss().backward()
    except PeerFailedError as error:
        again = None
        with contextlib.suppress(PeerFailedError):
            watched.model.zero_grad()
            watched.loss().backward()
            again = "a second window went through a dead communicator"
        return again or str(error)
    return "nothing was noticed"


def test_an_error_of_a_process_group_names_rank_collective_and_bucket() -> None:
    pool = RankPool(2)
    try:
        story, ended = pool.run(leave_in_backward, expect_errors=True, timeout=100)
    finally:
        pool.close()
    assert isinstance(ended, RankError)
    assert re.search(r"rank 0: collective \d+ \(all_reduce sum of \d+ × torch.float32\)", str(story)), story
    assert re.search(r"\[bucket [012]: '\d.weight' … '\d.weight', \d+ bytes of torch.float32\]", str(story)), story


def test_a_phase_that_cannot_follow_is_refused() -> None:
    phases = Phases()
    with pytest.raises(RuntimeError, match="cannot go from IDLE to IDLE"):
        phases.enter(Phase.IDLE)
    phases.enter(Phase.LOCAL)
    assert phases.idle == []
    phases.enter(Phase.BROKEN)
    assert phases.idle == [True]
    phases.enter(Phase.DETACHED)
    with pytest.raises(RuntimeError, match="from DETACHED"):
        phases.enter(Phase.IDLE)


def test_switches_come_back_also_after_an_error() -> None:
    switches = Switches()
    with switches.set(enabled=False):
        with pytest.raises(ZeroDivisionError), switches.set(enabled=True, forced=True):
            assert (switches.enabled, switches.forced, switches.steps_locally) == (True, True, False)
            raise ZeroDivisionError
        assert (switches.enabled, switches.forced) == (False, False)
    assert switches.enabled
