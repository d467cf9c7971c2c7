"""Gathers sharded optimizer state parameter by parameter, to save it or to redistribute it when buckets are rebuilt.

What ranks must agree on first (which numbers there are, and of what dtype) is sent as JSON. Then the state is gathered
one bucket at a time, so that no rank ever holds more than one whole bucket of it besides its shares.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator
from gradsync.communicator.agreement import gather_bytes
from gradsync.optim.sharded.segments import ParameterState, Segments
from gradsync.optim.sharded.share import Share

__all__ = ["gather_states"]


def gather_states(segments: Segments, communicator: Communicator) -> Iterator[tuple[int, ParameterState]]:
    """The index and the whole state of every parameter that has any, in memory order. Collective."""
    for share in segments.shares:
        yield from _of_bucket(share, segments.states(share), communicator)


def _of_bucket(
    share: Share, mine: dict[int, ParameterState], communicator: Communicator
) -> Iterator[tuple[int, ParameterState]]:
    plan = share.plan
    known = [json.loads(each) for each in gather_bytes(communicator, json.dumps(_told(mine)).encode())]
    for told in known:
        # If one rank cannot send its state, all ranks raise.
        if isinstance(told, str):
            raise ConfigurationError(told)
    # A parameter may lie in the shares of several ranks, which have then updated it equally often.
    scalars = {int(index): entry["scalars"] for of_rank in known for index, entry in of_rank.items()}
    tensors = {int(index): entry["tensors"] for of_rank in known for index, entry in of_rank.items()}
    wholes = {
        key: _gather(share, key, dtype, mine, communicator)
        for key, dtype in sorted({(key, dtype) for each in tensors.values() for key, dtype in each.items()})
    }
    for slot in plan.slots:
        if slot.parameter in scalars:
            yield (
                slot.parameter,
                ParameterState(
                    tensors={
                        key: wholes[key][slot.offset : slot.offset + slot.numel] for key in tensors[slot.parameter]
                    },
                    scalars={key: _scalar(value, plan.device) for key, value in scalars[slot.parameter].items()},
                ),
            )


def _gather(
    share: Share, key: str, dtype: str, mine: dict[int, ParameterState], communicator: Communicator
) -> torch.Tensor:
    plan = share.plan
    own = torch.zeros(plan.share, dtype=getattr(torch, dtype), device=plan.device)
    for part in share.parts:
        if part.index in mine and key in mine[part.index].tensors:
            own[part.start : part.stop] = mine[part.index].tensors[key]
    whole = torch.empty(plan.payload, dtype=own.dtype, device=own.device)
    communicator.all_gather(whole, own).wait()
    return whole


def _told(states: dict[int, ParameterState]) -> dict[int, Any] | str:
    try:
        return _described(states)
    except ConfigurationError as error:
        return str(error)


def _described(states: dict[int, ParameterState]) -> dict[int, Any]:
    return {
        index: {
            "tensors": {key: str(value.dtype).removeprefix("torch.") for key, value in state.tensors.items()},
            "scalars": {key: _plain(key, value) for key, value in state.scalars.items()},
        }
        for index, state in states.items()
    }


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        where = "host" if value.device.type == "cpu" else "device"
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), where: value.item()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigurationError(
        f"the state {key!r} of a sharded optimizer is neither a number nor a tensor with a number for each element: "
        f"got {value!r}. It cannot be taken apart"
    )


def _scalar(plain: Any, device: torch.device) -> Any:
    if not isinstance(plain, dict):
        return plain
    on_host = "host" in plain
    value = plain["host"] if on_host else plain["device"]
    dtype = getattr(torch, plain["dtype"])
    return torch.full(plain["shape"], value, dtype=dtype, device="cpu" if on_host else device)
