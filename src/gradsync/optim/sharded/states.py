"""Optimizer state per parameter: gathered from its shares, and converted to and from that of a plain optimizer.

It is gathered to be saved, or to be redistributed when buckets are rebuilt. What ranks must agree on first (which
numbers there are, and of what dtype) is sent as JSON. Then the state is gathered one bucket at a time, so that no rank
ever holds more than one whole bucket of it besides its shares.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator
from gradsync.communicator.agreement import gather_bytes
from gradsync.core.bucket.layout import ParameterSpec
from gradsync.optim.sharded.share import Part, Share

__all__ = [
    "MASTER",
    "ParameterState",
    "check_groups",
    "from_parameter",
    "gather_states",
    "indexed",
    "is_wide",
    "to_parameter",
]

# The state has parameters under this name, in the dtype in which they are updated, where that is wider than their own.
MASTER = "master"


@dataclass(kw_only=True)
class ParameterState:
    """The optimizer's state of one parameter, or of this rank's part of it: ``tensors`` are flat, with one number per
    element, and ``scalars`` hold for all of them."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)

    def part(self, part: Part) -> "ParameterState":
        """The part of a whole state that a rank with this ``part`` of the parameter keeps."""
        tensors = {key: value[part.inside].to(part.parameter.device, copy=True) for key, value in self.tensors.items()}
        return ParameterState(tensors=tensors, scalars=self.scalars)

    def narrowed(self, parameter: nn.Parameter) -> "ParameterState":
        """The state as a plain optimizer keeps it: in the parameter's own dtype, without a more precise copy of it."""
        dtype = parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype
        tensors = {
            key: value.to(dtype) if value.is_floating_point() else value
            for key, value in self.tensors.items()
            if key != MASTER
        }
        return ParameterState(tensors=tensors, scalars=self.scalars)


def is_wide(state: Mapping[str, Any], parameter: nn.Parameter) -> bool:
    """Whether a plain optimizer keeps a more precise state than the parameter's dtype."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor) and value.shape == parameter.shape]
    return any(value.is_floating_point() and value.dtype != parameter.dtype for value in tensors)


def gather_states(
    share: Share, mine: dict[int, ParameterState], communicator: Communicator
) -> Iterator[tuple[int, ParameterState]]:
    """The index and the whole state of every parameter of a bucket that has any, in memory order. Collective.

    ``mine`` are this rank's parts, in its ``share``.
    """
    plan = share.plan
    known = [json.loads(each) for each in gather_bytes(communicator, json.dumps(_described(mine)).encode())]
    for description in known:
        # If one rank cannot send its state, all ranks raise.
        if isinstance(description, str):
            raise ConfigurationError(description)
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


def _described(states: dict[int, ParameterState]) -> dict[int, Any] | str:
    """What the others must know of these states, or why they cannot be sent."""
    try:
        return {
            index: {
                "tensors": {key: str(value.dtype).removeprefix("torch.") for key, value in state.tensors.items()},
                "scalars": {key: _plain(key, value) for key, value in state.scalars.items()},
            }
            for index, state in states.items()
        }
    except ConfigurationError as error:
        return str(error)


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


# -- to and from a plain optimizer's: the same file for any number of ranks --------------------------------------------

# The names under which torch's optimizers keep numbers that hold for a whole parameter.
SCALARS = ("step", "mu_product", "eta", "mu")


def to_parameter(state: ParameterState, spec: ParameterSpec, device: torch.device) -> dict[str, Any]:
    """What a plain optimizer would keep for the parameter: tensors of its shape, and scalars."""
    shaped = {key: _shaped(value, spec, device) for key, value in state.tensors.items()}
    return {**{key: _copied(value) for key, value in state.scalars.items()}, **shaped}


def from_parameter(saved: dict[str, Any], parameter: nn.Parameter, spec: ParameterSpec) -> ParameterState:
    """The inverse of ``to_parameter``."""
    state = ParameterState()
    for key, value in saved.items():
        is_tensor = isinstance(value, torch.Tensor)
        # For a parameter without dimensions, both kinds look the same.
        if is_tensor and value.shape == parameter.shape and (parameter.dim() or key not in SCALARS):
            state.tensors[key] = _flattened(value, spec)
        elif is_tensor and value.numel() != 1:
            raise ConfigurationError(
                f"the saved state {key!r} of parameter {spec.name!r} has the shape {tuple(value.shape)}, and the "
                f"parameter {tuple(parameter.shape)}: it belongs to another model"
            )
        else:
            state.scalars[key] = _copied(value)
    return state


def check_groups(saved: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Raise a ValueError, as torch does, unless the saved groups are like these."""
    if len(saved) != len(groups):
        raise ConfigurationError(
            f"the saved optimizer has {len(saved)} parameter groups and this one {len(groups)}: it belongs to another "
            "model, or to other settings"
        )
    for number, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
        if len(theirs["params"]) != len(ours["params"]):
            raise ConfigurationError(
                f"group {number} of the saved optimizer has {len(theirs['params'])} parameters, and this one's "
                f"{len(ours['params'])}: it belongs to another model, or to other settings"
            )


def indexed(groups: Iterable[dict[str, Any]]) -> list[nn.Parameter]:
    """The parameters of all groups, in the order in which a saved state numbers them."""
    return [parameter for group in groups for parameter in group["params"]]


def _shaped(flat: torch.Tensor, spec: ParameterSpec, device: torch.device) -> torch.Tensor:
    values = torch.view_as_complex(flat.view(-1, 2)) if spec.dtype.is_complex else flat
    shaped = values.as_strided(spec.shape, spec.stride)
    return torch.empty_strided(spec.shape, spec.stride, dtype=shaped.dtype, device=device).copy_(shaped)


def _flattened(value: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    # For a parameter with sparse gradients it may be sparse, too.
    value = value if value.layout is torch.strided else value.to_dense()
    dense = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device).copy_(value)
    flat = dense.as_strided((dense.numel(),), (1,))
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
