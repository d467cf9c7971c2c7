"""A training whose wire is lost hands out no mean any more, whatever its loop catches; one that failed can go on."""

import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.communicator import Communicator
from gradsync.errors import CommunicatorLostError, GradsyncError
from tests.ranks import pool_of
from tests.wires import fresh_wire

pytestmark = pytest.mark.timeout(120)

WIRES = ["group", "peer-exchange", "shared-memory", "round-robin", "hosts-1+1"]
STEPS = 5
TROUBLE = 2

# Held so that a wire is not closed while others still look at it.
_kept: list[Communicator] = []


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class Trouble:
    """In one step rank 1 comes later than the group's timeout, or rank 0 is interrupted as it waits for it."""

    def __init__(self, rank: int, *, interrupted: bool) -> None:
        self._rank, self._interrupted = rank, interrupted

    def __enter__(self) -> None:
        if self._rank == 1:
            time.sleep(0.6 if self._interrupted else 4.0)
        elif self._interrupted:
            self._before = signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.2)

    def __exit__(self, *_: object) -> None:
        if self._interrupted and self._rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, self._before)


def train_on(name: str, interrupted: bool) -> list[str]:
    """What each step came to, on a rank that catches everything and goes on."""
    wire = fresh_wire(name, 30.0 if interrupted else 2.0)
    _kept.append(wire)
    torch.manual_seed(0)
    model = gradsync.DistributedDataParallel(nn.Linear(4, 1, bias=False), communicator=wire)
    outcomes = []
    for step in range(STEPS):
        model.zero_grad()
        try:
            loss = model(torch.full((1, 4), float(step + wire.rank))).sum()
            if step == TROUBLE:
                with Trouble(wire.rank, interrupted=interrupted):
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
    "interrupted", [pytest.param(False, id="late", marks=pytest.mark.breadth), pytest.param(True, id="interrupted")]
)
def test_a_loop_that_goes_on_gets_no_mean(name: str, interrupted: bool) -> None:
    first, second = pool_of(2).run(train_on, name, interrupted)
    lost = CommunicatorLostError.__name__
    assert first == ["right"] * TROUBLE + ["interrupted" if interrupted else lost] + [lost] * (STEPS - TROUBLE - 1)
    # What the first rank had sent before it gave up may still arrive, once, and is right.
    assert second[:TROUBLE] == ["right"] * TROUBLE
    assert set(second[TROUBLE:]) <= {"right", lost}
    assert second[TROUBLE + 1 :] == [lost] * (STEPS - TROUBLE - 1)
