"""Interpretation of torch's wrapper arguments: which ranks take part, and which device the module is on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator, choose_communicator
from gradsync.core.reduction import Cast, Mean, Reduction
from gradsync.parallel.mixed_precision import LowPrecision, MixedPrecisionConfig

__all__ = ["Devices", "choose_ranks", "default_reduction", "refuse_cpu_sync_batch_norm"]


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of a module's parameters. ``ids`` has the number of the device inputs are moved to, and ``output``
    that of the device outputs are moved to; None where nothing is moved."""

    device: torch.device
    several: bool
    ids: list[int] | None = None
    output: int | None = None

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], device_ids: Sequence[Any] | None, output_device: Any) -> "Devices":
        """The requested devices, checked against those of the parameters."""
        device, several = parameters[0].device, len({p.device for p in parameters}) > 1
        if device_ids and len(device_ids) > 1:
            raise ConfigurationError(f"device_ids must be None or hold one device, got {list(device_ids)}")
        if device.type == "cpu" or several:
            if device_ids or output_device is not None:
                raise ConfigurationError(
                    "device_ids and output_device are for modules on one GPU; this module's parameters are on "
                    f"{sorted({str(p.device) for p in parameters})}. Leave both out"
                )
            return cls(device=device, several=several)
        if not device_ids:
            return cls(device=device, several=several)
        index = torch.device(device_ids[0] if not isinstance(device_ids[0], int) else f"cuda:{device_ids[0]}").index
        if index is not None and index != device.index:
            raise ConfigurationError(
                f"device_ids is {list(device_ids)}, but the module is on {device}. Move it there before you wrap it"
            )
        return cls(device=device, several=several, ids=[device.index], output=device.index)


def choose_ranks(
    module: nn.Module, communicator: Communicator | None, process_group: Any, device_mesh: Any
) -> Communicator:
    """The ranks over which gradients are averaged; by default all of the default group."""
    given = [
        name
        for name, value in (
            ("communicator", communicator),
            ("process_group", process_group),
            ("device_mesh", device_mesh),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise ConfigurationError(
            f"Cannot specify both {' and '.join(given)} arguments. Each says which ranks there are: pass one of "
            f"communicator, process_group and device_mesh, got {' and '.join(given)}"
        )
    if device_mesh is None:
        return choose_communicator(communicator if communicator is not None else process_group)
    if device_mesh.ndim != 1:
        raise ConfigurationError(
            f"Only 1D device mesh is supported, but got {device_mesh}. Pass one dimension of it, as in mesh['dp']"
        )
    if device_mesh._get_root_mesh() != device_mesh:
        # A slice of a larger mesh: the module may hold DTensors of the other dimensions, which torch localizes.
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    return choose_communicator(device_mesh.get_group(mesh_dim=0))


def default_reduction(mixed_precision: MixedPrecisionConfig | None) -> Reduction:
    """The reduction used where none was given: narrow gradients, if ``mixed_precision`` asks for them."""
    dtype = None if mixed_precision is None else LowPrecision.wire_dtype(mixed_precision)
    return Mean() if dtype is None else Cast(dtype)


def refuse_cpu_sync_batch_norm(module: nn.Module, device_type: str) -> None:
    """Raise for layers that torch supports on GPUs only."""
    if device_type == "cpu" and any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        raise ConfigurationError(
            "SyncBatchNorm works on GPUs only, and this module is on the CPU. Move it to a GPU, or keep BatchNorm"
        )
