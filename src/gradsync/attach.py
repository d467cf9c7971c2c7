"""The engine without a wrapper: ``synchronize_gradients(model)`` works in place and keeps ``state_dict`` keys."""

from typing import Any

import torch
from torch import nn

from gradsync.communicator import Choice, Communicator, choose_communicator, fit_communicator
from gradsync.engine.observer import Observer
from gradsync.engine.options import Schedule
from gradsync.errors import ConfigurationError
from gradsync.reduction import Mean, Reduction
from gradsync.wrap.accumulation import Accumulation
from gradsync.wrap.replica import BucketSize, EngineSettings, Replica

__all__ = ["GradientSynchronization", "synchronize_gradients"]


class _ForwardHooks:
    """Tells the engine of forwards. A copy of the model (an EMA, a pickle) takes along hooks that do nothing."""

    def __init__(self, handle: "GradientSynchronization | None") -> None:
        self._handle = handle

    def before(self, module: nn.Module, args: Any) -> None:
        if self._handle is not None and torch.is_grad_enabled():
            self._handle.replica.require_unchanged()
            self._handle.synchronizer.begin_forward()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._handle is not None and torch.is_grad_enabled():
            self._handle.synchronizer.end_forward(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ForwardHooks":
        return _ForwardHooks(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_ForwardHooks, (None,))


class GradientSynchronization(Accumulation):
    """The engine attached to a model, as :func:`synchronize_gradients` returns it."""

    def __init__(self, replica: Replica, wire: Choice, settings: EngineSettings, *, init_sync: bool = True) -> None:
        self.replica = replica
        self.wire = wire
        self.synchronizer = replica.connect(wire.communicator, settings, init_sync=init_sync)
        model = replica.module
        hooks = _ForwardHooks(self)
        self._registered = [
            model.register_forward_pre_hook(hooks.before),
            model.register_forward_hook(hooks.after),
        ]

    def detach(self) -> None:
        """Take the engine off the model. Gradients stay as they are."""
        for registered in self._registered:
            registered.remove()
        self.synchronizer.detach()


def synchronize_gradients(
    model: nn.Module,
    *,
    process_group: Any = None,
    communicator: Communicator | None = None,
    reduction: Reduction | None = None,
    schedule: Schedule = "overlapped",
    bucket_cap_mb: BucketSize = "auto",
    observer: Observer | None = None,
    accumulation_dtype: torch.dtype | None = None,
    init_sync: bool = True,
) -> GradientSynchronization:
    """Average the gradients of ``model`` over the ranks during every backward, from now on.

    Nothing is wrapped: the model keeps its class, its attributes and its ``state_dict`` keys. Parameters and buffers
    are compared over ranks and taken from rank 0 once, unless ``init_sync`` is False. The returned handle has
    ``accumulate()``, ``backward()``, ``no_sync()``, ``synchronize()`` and ``detach()``.
    """
    settings = EngineSettings(
        reduction=Mean() if reduction is None else reduction,
        schedule=schedule,
        bucket_cap_mb=bucket_cap_mb,
        observer=observer,
        accumulation_dtype=accumulation_dtype,
    )
    if communicator is not None and process_group is not None:
        raise ConfigurationError("pass one of communicator and process_group, got both")
    chosen = choose_communicator(communicator if communicator is not None else process_group)
    replica = Replica(model)
    # Ranks that must not talk yet, or were told which way to take, have no choice.
    free = init_sync and communicator is None
    wire = fit_communicator(chosen, replica.device) if free else Choice.given(chosen)
    return GradientSynchronization(replica, wire, settings, init_sync=init_sync)
