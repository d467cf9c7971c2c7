"""Gradient averaging without a wrapper: ``synchronize_gradients(model)`` works in place, ``state_dict`` keys stay."""

from typing import Any, Unpack

import torch
from torch import nn

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Choice, Communicator, choose_communicator, fit_communicator
from gradsync.core.engine.policy import BucketSize, PolicySettings, SyncPolicy
from gradsync.core.engine.synchronizer import compiler_here
from gradsync.observe import count, size
from gradsync.parallel.accumulation import Accumulation
from gradsync.parallel.replica import Replica

__all__ = ["GradientSynchronization", "synchronize_gradients"]


class _ForwardHooks:
    """Forward hooks that notify the engine. In a copy of the model (an EMA, a pickle) the copied hooks do nothing."""

    def __init__(self, attachment: "GradientSynchronization | None") -> None:
        self._attachment = attachment

    # The compiler may see a module that calls them, and would break them into graphs.
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def before(self, module: nn.Module, args: Any) -> None:
        self._begin(module, compiler_here())

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _begin(self, module: nn.Module, compiler: Any) -> None:
        if self._attachment is not None:
            self._attachment.synchronizer.before_forward(module, compiler)
        if self._attachment is not None and torch.is_grad_enabled():
            self._attachment.replica.require_unchanged()
            self._attachment.synchronizer.begin_forward()

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._attachment is not None and torch.is_grad_enabled():
            self._attachment.synchronizer.end_forward(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ForwardHooks":
        return _ForwardHooks(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_ForwardHooks, (None,))


class GradientSynchronization(Accumulation):
    """Handle to the engine attached to a model, as :func:`synchronize_gradients` returns it."""

    def __init__(self, replica: Replica, transport: Choice, policy: SyncPolicy, *, init_sync: bool = True) -> None:
        self.replica = replica
        self.transport = transport
        self.synchronizer = replica.connect(transport.communicator, policy, init_sync=init_sync)
        model = replica.module
        hooks = _ForwardHooks(self)
        self._registered = [
            model.register_forward_pre_hook(hooks.before),
            model.register_forward_hook(hooks.after),
        ]

    def __repr__(self) -> str:
        communicator, synchronizer = self.transport.communicator, self.synchronizer
        where = f"rank {communicator.rank} of {communicator.world_size} over {self.transport}"
        state = synchronizer.position().phase if self._registered else "detached"
        return (
            f"GradientSynchronization({type(self.replica.module).__name__}: "
            f"{count(len(synchronizer.parameters), 'parameter')}, {size(sum(s.nbytes for s in synchronizer.specs))}; "
            f"{where}; {state})"
        )

    def detach(self) -> None:
        """Detach the engine from the model. Gradients stay as they are."""
        for registered in self._registered:
            registered.remove()
        self._registered = []
        self.synchronizer.detach()


def synchronize_gradients(
    model: nn.Module,
    *,
    process_group: Any = None,
    communicator: Communicator | None = None,
    policy: SyncPolicy | None = None,
    bucket_cap_mb: BucketSize = "auto",
    init_sync: bool = True,
    **settings: Unpack[PolicySettings],
) -> GradientSynchronization:
    """Average the gradients of ``model`` over the ranks during every backward from now on.

    Nothing is wrapped: the model keeps its class, its attributes and its ``state_dict`` keys. Parameters and buffers
    are compared across ranks and copied from rank 0 once, unless ``init_sync`` is False. ``policy``, or its fields as
    keyword arguments, determines how gradients travel; see :class:`~gradsync.SyncPolicy`. The returned attachment has
    ``accumulate()``, ``backward()``, ``no_sync()``, ``synchronize()`` and ``detach()``.
    """
    policy = SyncPolicy.chosen(policy, settings, wrapper="synchronize_gradients", bucket_cap_mb=bucket_cap_mb)
    if communicator is not None and process_group is not None:
        raise ConfigurationError("pass one of communicator and process_group, got both")
    chosen = choose_communicator(communicator if communicator is not None else process_group)
    replica = Replica(model)
    # Ranks that must not communicate yet, or that were given a transport, have nothing to choose.
    free = init_sync and communicator is None
    transport = fit_communicator(chosen, replica.device) if free else Choice.given(chosen)
    return GradientSynchronization(replica, transport, policy, init_sync=init_sync)
