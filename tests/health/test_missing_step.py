"""A step() that one rank leaves out, with an optimizer whose step() is a collective: the error names the call."""

import re
from typing import Any

import pytest
import torch

from gradsync import DistributedDataParallel, MismatchError, OverlappedOptimizer, ShardedOptimizer
from gradsync.communicator.checks import collectives_differ, missing_step
from gradsync.health.watch.detector import Suspect
from gradsync.health.watch.messages import suspect_text
from tests.communicators import fresh_communicator
from tests.health.test_watch import MEMBERS, stands
from tests.ranks import pool_of

pytestmark = pytest.mark.timeout(120)

CALL = "Call step() on every rank in each window"


def leave_out_a_step(kind: str) -> str:
    communicator: Any = fresh_communicator("shared-memory", 30.0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8), communicator=communicator)
    if kind == "sharded":
        optimizer: Any = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    else:
        optimizer = OverlappedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    try:
        for step in range(5):
            model(torch.ones(2, 8)).sum().backward()
            if (communicator.rank, step) != (1, 3):
                optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        # Or rank 1 would wait for the rest of what it has begun.
        communicator.abort("rank 0 has seen it")
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("kind", ["sharded", "overlapped"])
def test_a_rank_that_leaves_out_a_step_is_named_with_what_it_did(kind: str) -> None:
    said = pool_of(2).run(leave_out_a_step, kind)
    assert said[0].startswith("MismatchError: ranks started different collectives: rank 0: all_gather of ")
    # With its next gradients, or with what ranks agree on before.
    assert re.search(
        r"rank 0 called step\(\) \(all_gather\), and rank 1 went on without it \((reduce_scatter|all_reduce)\)", said[0]
    )
    assert CALL in said[0]
    assert said[1] != "nothing"


def test_all_ranks_are_named() -> None:
    error = collectives_differ(["all_gather of 4", "reduce_scatter sum of 4", "all_gather of 4"])
    assert isinstance(error, MismatchError)
    assert "rank 0 and rank 2 called step() (all_gather), and rank 1 went on without it (reduce_scatter)" in str(error)


def test_other_differences_are_not_about_steps() -> None:
    error = str(collectives_differ(["broadcast from 0 of 4", "all_reduce sum of 4"]))
    assert error.endswith("All ranks must run the same collectives in the same order")
    assert missing_step({"rank 0": "all_gather of 4", "rank 1": "all_gather of 8"}) == ""
    assert missing_step({"rank 0": "all_gather of 4", "rank 1": ""}) == ""


@pytest.mark.parametrize("number", [12, 13])
def test_the_watch_names_the_step_where_ranks_wait_in_one_and_the_same_collective(number: int) -> None:
    """Over Gloo nobody compares what ranks have started, and they wait to the end."""
    suspect = Suspect(
        member=1,
        kind="at odds",
        seconds=6.0,
        waiters=(0,),
        what=f"collective {number} (all_gather of 4 × torch.float32)",
        status=stands(12, waits=12),
    )
    said = suspect_text(MEMBERS, suspect, is_here=False)
    is_named = "rank 0 called step() (all_gather), and rank 1 went on without it (all_reduce)" in said
    assert is_named == (number == 12)
    assert is_named or said.endswith("All ranks must run the same collectives in the same order")
