"""A training that has lost its communicator hands out no mean any more, whatever its loop catches; others can go on."""

import contextlib
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.communicator import Communicator
from gradsync.errors import CommunicatorLostError, GradsyncError
from tests.communicator.test_failures import interrupted
from tests.communicators import fresh_communicator
from tests.ranks import pool_of

pytestmark = pytest.mark.timeout(120)

WIRES = ["group", "peer-exchange", "shared-memory", "round-robin", "hosts-1+1"]
STEPS = 5
TROUBLE = 2

# Held so that a communicator is not closed while others still look at it.
_kept: list[Communicator] = []


@contextlib.contextmanager
def trouble(rank: int, *, by_interrupt: bool) -> Iterator[None]:
    """Rank 1 comes later than the group's timeout, or rank 0 is interrupted as it waits for it."""
    if rank == 1:
        time.sleep(0.6 if by_interrupt else 4.0)
    with interrupted() if by_interrupt and rank == 0 else contextlib.nullcontext():
        yield


def train_on(name: str, by_interrupt: bool) -> list[str]:
    """What each step came to, on a rank that catches everything and goes on."""
    communicator = fresh_communicator(name, 30.0 if by_interrupt else 2.0)
    _kept.append(communicator)
    torch.manual_seed(0)
    model = gradsync.DistributedDataParallel(nn.Linear(4, 1, bias=False), communicator=communicator)
    outcomes = []
    for step in range(STEPS):
        model.zero_grad()
        try:
            loss = model(torch.full((1, 4), float(step + communicator.rank))).sum()
            if step == TROUBLE:
                with trouble(communicator.rank, by_interrupt=by_interrupt):
                    loss.backward()
            else:
                loss.backward()
        except KeyboardInterrupt:
            outcomes.append("interrupted")
            continue
        except GradsyncError as error:
            outcomes.append(type(error).__name__)
            continue
        gradient = model.module.weight.grad
        assert gradient is not None
        outcomes.append("right" if bool((gradient == step + 0.5).all()) else f"wrong: {gradient.tolist()}")
    dist.barrier()
    return outcomes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.breadth) if name not in ("group", "shared-memory") else name
        for name in WIRES
    ],
)
@pytest.mark.parametrize(
    "by_interrupt", [pytest.param(False, id="late", marks=pytest.mark.breadth), pytest.param(True, id="interrupted")]
)
def test_a_loop_that_goes_on_gets_no_mean(name: str, by_interrupt: bool) -> None:
    first, second = pool_of(2).run(train_on, name, by_interrupt)
    lost = CommunicatorLostError.__name__
    assert first == ["right"] * TROUBLE + ["interrupted" if by_interrupt else lost] + [lost] * (STEPS - TROUBLE - 1)
    # What the first rank had sent before it gave up may still arrive, once, and is right.
    assert second[:TROUBLE] == ["right"] * TROUBLE
    assert set(second[TROUBLE:]) <= {"right", lost}
    assert second[TROUBLE + 1 :] == [lost] * (STEPS - TROUBLE - 1)
