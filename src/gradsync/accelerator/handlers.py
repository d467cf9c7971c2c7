"""``kwargs_handlers``: settings for the objects that an Accelerator makes, under Accelerate's names.

Accelerate's own handler objects are understood as well, by the names of their classes, so that code which imports them
from there needs no change.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gradsync.engine.policy import SyncPolicy
from gradsync.errors import ConfigurationError

__all__ = [
    "AutocastKwargs",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "settings_of",
]


@dataclass
class DistributedDataParallelKwargs:
    """For the wrapper of prepared models; see :class:`gradsync.DistributedDataParallel`.

    ``policy`` is what it has beyond torch's: a :class:`gradsync.SyncPolicy`.
    """

    dim: int = 0
    broadcast_buffers: bool | None = None
    bucket_cap_mb: Any = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
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
    """For the process group, where the accelerator makes it."""

    timeout: timedelta | None = None


_KNOWN = (DistributedDataParallelKwargs, GradScalerKwargs, AutocastKwargs, InitProcessGroupKwargs)


def settings_of(handlers: Iterable[Any] | None) -> dict[str, dict[str, Any]]:
    """What each handler changes, by the name of its class."""
    settings: dict[str, dict[str, Any]] = {known.__name__: {} for known in _KNOWN}
    for handler in handlers or ():
        name = type(handler).__name__
        if name not in settings:
            raise ConfigurationError(
                f"kwargs_handlers knows {', '.join(settings)}, got {name}. Leave it out: nothing here would use it"
            )
        settings[name].update(_changed(handler))
    return settings


def _changed(handler: Any) -> dict[str, Any]:
    """The fields that differ from their defaults, as far as they mean something here."""
    known = next(kind for kind in _KNOWN if kind.__name__ == type(handler).__name__)
    names = {field.name for field in dataclasses.fields(known)}
    defaults = type(handler)()
    return {
        name: getattr(handler, name)
        for name in vars(handler)
        if name in names and getattr(handler, name) != getattr(defaults, name)
    }
