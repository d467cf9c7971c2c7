"""What a forward and its backward do besides gradients: buffers are synchronized, optimizers step inside backward.

Buffer hooks may return futures that must be done when ``backward()`` returns. Optimizers that torch's
``_apply_optimizer_in_backward`` has attached to parameters must step on the means; torch steps them bucket by bucket,
here all of them step when the last bucket has finished.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from gradsync.base.errors import NotCallableError
from gradsync.communicator import Communicator
from gradsync.core.engine.backward_watch import call_at_end, tensors_in
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.parallel.replica import BATCH_BYTES, Replica, agree_on_rank, broadcast_tensors

__all__ = ["BufferSync", "InBackwardOptimizers", "call_after_backward", "choose_buffer_sync"]


def choose_buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
    """Whether forwards synchronize buffers, from the setting's two names. Warns as torch does."""
    if broadcast_buffers is not None and forward_sync_buffers is not None:
        warnings.warn(
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated and "
            "ignored when `forward_sync_buffers` is given.",
            FutureWarning,
            stacklevel=3,
        )
    elif broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead, which concerns forwards alone: "
            "`broadcast_buffers=False` also leaves each rank its own buffers at wrapping, "
            "`forward_sync_buffers=False` does not.",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers
    return True if broadcast_buffers is None else broadcast_buffers


class BufferSync:
    """Mixin of the wrapper that brings buffers to the same values on all ranks. The names are torch's."""

    replica: Replica
    communicator: Communicator
    require_forward_param_sync: bool
    forward_sync_buffers: bool
    _join_config: Any

    buffer_hook: _BufferCommHook | None = None
    broadcast_bucket_size = BATCH_BYTES
    _buffer_futures: Sequence[Any] = ()

    @property
    def broadcast_buffers(self) -> bool:
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The buffers that are synchronized."""
        return list(self.named_module_buffers.values())

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that are synchronized, by name."""
        return self.replica.named_buffers

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward synchronizes buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.replica.buffers)

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, torch.Tensor]], Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Call ``hook(state, named_buffers)`` instead of the broadcast, before the forward or after it.

        It may return futures; they are waited for at the end of the backward. If it returns none, it has done its work.
        """
        if not callable(hook):
            raise NotCallableError(f"a hook on buffers must be callable as hook(state, named_buffers), got {hook!r}")
        self.buffer_hook = _BufferCommHook(hook, state, comm_hook_location)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self._syncs_at(_BufferCommHookLocation.PRE_FORWARD)

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self._syncs_at(_BufferCommHookLocation.POST_FORWARD)

    def _syncs_at(self, location: _BufferCommHookLocation) -> bool:
        hook = self.buffer_hook
        before = _BufferCommHookLocation.PRE_FORWARD
        return (before if hook is None else hook.buffer_comm_hook_location) == location and (
            self.will_sync_module_buffers()
        )

    def _sync_buffers(self, *, has_data: bool = True) -> None:
        """Synchronize the buffers now. Collective. In a ``join`` they come from a rank that still has data."""
        joining = self._join_config.enable
        self._sync_module_buffers(agree_on_rank(self.communicator, candidate=has_data) if joining else 0)

    @torch.no_grad()
    def _sync_module_buffers(self, authoritative_rank: int = 0) -> None:
        buffers = self.replica.buffers
        # Backwards of earlier forwards may still need the values that autograd saved; as in torch, it does not object.
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(buffers)):
            if self.buffer_hook is None:
                broadcast_tensors(buffers, self.communicator, authoritative_rank)
                return
            self._finish_buffers()
            hook, state = self.buffer_hook.buffer_comm_hook, self.buffer_hook.buffer_comm_hook_state
            self._buffer_futures = hook(state, self.named_module_buffers) or ()

    def _default_broadcast_coalesced(
        self, bufs: Sequence[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """The default without a hook: for hooks that do something in addition."""
        broadcast_tensors(self.replica.buffers if bufs is None else bufs, self.communicator, authoritative_rank)

    def _finish_buffers(self) -> None:
        """Wait for the futures of a hook."""
        futures, self._buffer_futures = self._buffer_futures, ()
        for future in futures:
            future.wait()

    def _finish_buffers_after(self, output: Any) -> None:
        if self._buffer_futures:
            call_after_backward(output, self._finish_buffers)


def call_after_backward(output: Any, action: Callable[[], None]) -> None:
    """Call ``action`` when a backward through ``output`` has ended: after the engine, if the engine registered first.

    A backward that reaches several tensors of the output calls it several times.
    """

    def hook(_: torch.Tensor) -> None:
        call_at_end(action)

    for tensor in tensors_in(output):
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(hook)


class InBackwardOptimizers:
    """Optimizers that step their parameters as part of backward."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map as handles

        self._parameters = parameters
        # Their own hooks would step on this rank's gradients alone.
        for parameter in parameters:
            for handle in handles.get(parameter, ()):
                handle.remove()

    @classmethod
    def of(cls, parameters: Sequence[Any]) -> "InBackwardOptimizers | None":
        """The optimizers attached to these parameters; None if there are none."""
        stepped = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
        return cls(stepped) if stepped else None

    def step(self, synchronizer: Synchronizer) -> None:
        """Step on the means, if the backward has left any, then release them."""
        if not synchronizer.window.has_means:
            return
        for parameter in self._parameters:
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:
                    optimizer.step()
                parameter.grad = None
