"""Setting a wire up: ranks agree on what to set up, and on whether it could be, before anybody uses it.

What differs between ranks, or fails on one of them, is known to all, and the group they came with still works.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.communicator import ProcessGroupCommunicator, fit_communicator
from gradsync.errors import ConfigurationError, GradsyncError, MismatchError
from tests.ranks import pool_of

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")


def sums_up(wire: Any) -> bool:
    """Whether a collective, and the next one, give what all ranks brought."""
    tensors = [torch.full((numel,), float(number)) for number, numel in ((1, 3), (2, 100_000))]
    for tensor in tensors:
        wire.all_reduce(tensor).wait()
    return all(bool((tensor == number * wire.world_size).all()) for number, tensor in enumerate(tensors, 1))


# -- what the environment says ----------------------------------------------------------------------------------------


def fit_with(values: list[str | None]) -> tuple[str, str, bool]:
    """``GRADSYNC_WIRE`` on every rank; what was raised, and whether the group is still in step."""
    wire = ProcessGroupCommunicator(dist.new_group())  # type: ignore[arg-type]
    value = values[wire.rank]
    with pytest.MonkeyPatch.context() as patch:
        if value is None:
            patch.delenv("GRADSYNC_WIRE", raising=False)
        else:
            patch.setenv("GRADSYNC_WIRE", value)
        with pytest.raises(GradsyncError) as raised:
            fit_communicator(wire, CPU)
    return type(raised.value).__name__, str(raised.value), sums_up(wire)


@pytest.mark.parametrize("values", [[None, "group"], ["shared-memory", "peer-exchange"], ["auto", "smoke-signals"]])
def test_a_wire_that_only_one_rank_asks_for_is_refused_on_all(values: list[str | None]) -> None:
    for kind, said, works in pool_of(2).run(fit_with, values):
        assert kind == MismatchError.__name__
        assert f"GRADSYNC_WIRE: rank 0 has {values[0] or 'auto'!r}, rank 1 has {values[1]!r}" in said
        assert works


def test_a_wire_that_nobody_knows_is_refused_on_all() -> None:
    for kind, said, works in pool_of(2).run(fit_with, ["smoke-signals"] * 2):
        assert kind == ConfigurationError.__name__
        assert "got 'smoke-signals'" in said
        assert works


def change_its_mind() -> str:
    """The second model is wrapped when one rank's environment has changed, and the choice is known to both."""
    wire = ProcessGroupCommunicator(dist.new_group())  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADSYNC_WIRE", "group")
        fit_communicator(wire, CPU)
        if wire.rank == 1:
            patch.setenv("GRADSYNC_WIRE", "shared-memory")
        with pytest.raises(MismatchError) as raised:
            fit_communicator(wire, CPU)
    return str(raised.value)


def test_a_known_choice_is_compared_again() -> None:
    for said in pool_of(2).run(change_its_mind):
        assert "rank 0 has 'group', rank 1 has 'shared-memory'" in said
