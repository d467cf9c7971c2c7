"""``kwargs_handlers``: settings for the objects that an Accelerator creates, under Accelerate's names.

Accelerate's own handler objects are accepted as well, recognised by their class names, so code that imports them from
there needs no change.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from gradsync.accelerator.compat import is_dynamo_off
from gradsync.base.errors import ConfigurationError
from gradsync.core.engine.policy import SyncPolicy

__all__ = [
    "AutocastKwargs",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "ProfileKwargs",
    "settings_of",
]


@dataclass
class DistributedDataParallelKwargs:
    """For the wrapper of prepared models; see :class:`gradsync.DistributedDataParallel`.

    ``policy`` goes beyond torch's arguments: a :class:`gradsync.SyncPolicy`. ``comm_hook`` names one of torch's
    communication hooks ("fp16", "bf16", "power_sgd", "batched_power_sgd"), ``comm_wrapper`` ("fp16", "bf16") the type
    in which its data is sent, and ``comm_state_option`` holds arguments for PowerSGD's state.
    """

    dim: int = 0
    broadcast_buffers: bool | None = None
    bucket_cap_mb: Any = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: Any = "no"
    comm_wrapper: Any = "no"
    comm_state_option: dict[str, Any] = field(default_factory=dict)
    policy: SyncPolicy | None = None


@dataclass
class GradScalerKwargs:
    """For the scaler of ``mixed_precision="fp16"``; see ``torch.amp.GradScaler``."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class AutocastKwargs:
    """For autocast; see ``torch.autocast``."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class InitProcessGroupKwargs:
    """For the process group, if the accelerator creates it."""

    timeout: timedelta | None = None


@dataclass
class ProfileKwargs:
    """For ``accelerator.profile()``; see ``torch.profiler.profile``. Activities are "cpu" and "cuda"."""

    activities: Sequence[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch.profiler.profile:
        """A profiler with these settings."""
        known = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}
        for name in self.activities or ():
            if name not in known:
                raise ConfigurationError(f"a profiler's activities are {' and '.join(map(repr, known))}, got {name!r}")
        names = ("on_trace_ready", "record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
        return torch.profiler.profile(
            activities=None if self.activities is None else [known[name] for name in self.activities],
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            **{name: getattr(self, name) for name in names},
        )


_KNOWN = (DistributedDataParallelKwargs, GradScalerKwargs, AutocastKwargs, InitProcessGroupKwargs, ProfileKwargs)


def settings_of(handlers: Iterable[Any] | None) -> dict[str, dict[str, Any]]:
    """What each handler changes, by the name of its class."""
    settings: dict[str, dict[str, Any]] = {known.__name__: {} for known in _KNOWN}
    for handler in handlers or ():
        name = type(handler).__name__
        if name == "TorchDynamoPlugin" and is_dynamo_off(handler):
            continue
        if name not in settings:
            raise ConfigurationError(
                f"kwargs_handlers knows {', '.join(settings)}, got {name}. Leave it out: nothing here would use it"
            )
        settings[name].update(_changed(handler))
    return settings


def _changed(handler: Any) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    known = next(kind for kind in _KNOWN if kind.__name__ == type(handler).__name__)
    names = {field.name for field in dataclasses.fields(known)}
    defaults = type(handler)()
    changed = {name: value for name, value in vars(handler).items() if value != getattr(defaults, name)}
    if unknown := sorted(changed.keys() - names):
        raise ConfigurationError(
            f"{type(handler).__name__}({unknown[0]}={changed[unknown[0]]!r}) means nothing here; known are "
            f"{', '.join(sorted(names))}. For a process group with settings of its own, call "
            "torch.distributed.init_process_group before the Accelerator is made, which then uses it"
        )
    return changed
