"""Converts a sharded optimizer's state to and from a plain one's: the same file for any number of ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from gradsync.base.errors import ConfigurationError
from gradsync.core.bucket.layout import ParameterSpec
from gradsync.optim.sharded.segments import ParameterState

__all__ = ["check_groups", "from_parameter", "indexed", "to_parameter"]

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
    """Raise, as torch does, unless the saved groups are like these."""
    if len(saved) != len(groups):
        raise ValueError(
            f"the saved optimizer has {len(saved)} parameter groups and this one {len(groups)}: it belongs to another "
            "model, or to other settings"
        )
    for number, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
        if len(theirs["params"]) != len(ours["params"]):
            raise ValueError(
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
