"""What forwards and backwards do besides averaging gradients: they synchronize buffers, run torch's ``Join`` protocol
for ranks that have run out of data, and step optimizers inside backward.

Buffer hooks may return futures that must be done when ``backward()`` returns. Optimizers that torch's
``_apply_optimizer_in_backward`` has attached to parameters must step on the means; torch steps them bucket by bucket,
here all of them step when the last bucket has finished.

[Note: forwards in step] In a join every forward of a rank with data is matched with one of every other rank, and a rank
that has left follows along. So ranks with data must run equally many forwards between two synchronizations. A
micro-batch of ``accumulate()`` without a forward stands in for one, but nothing stands in for a micro-batch that does
not exist. Ranks count what each is about to do along with who has data: where some end their window and some do not,
all of them raise.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from gradsync.base.errors import MisuseError, NotCallableError
from gradsync.communicator import Communicator
from gradsync.core.engine.backward_watch import call_at_end, tensors_in
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.parallel.replica import BATCH_BYTES, Replica, agree_on_rank, broadcast_tensors

__all__ = [
    "ForwardSync",
    "GradientJoinHook",
    "call_after_backward",
    "choose_buffer_sync",
    "step_in_backward",
    "take_in_backward_optimizers",
]


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


class ForwardSync:
    """Mixin of the wrapper that brings buffers to the same values on all ranks, and lets ranks run out of data at
    different times. The names are torch's."""

    replica: Replica
    communicator: Communicator
    synchronizer: Synchronizer
    process_group: Any
    device: torch.device
    require_forward_param_sync: bool
    forward_sync_buffers: bool
    divide_by_initial_world_size: bool
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

    # -- ranks with different numbers of inputs ---------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Context in which ranks may have different numbers of inputs; see ``torch.distributed.algorithms.Join``."""
        _ = self.join_process_group  # refuse before Join has changed anything
        joinables: list[Any] = [self]
        return Join(
            joinables, enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> "GradientJoinHook":
        if self.synchronizer.has_sharing_client:
            raise MisuseError(
                "join() lets ranks without data leave the loop, and a sharded optimizer needs all of them in every "
                "step. Give every rank as many steps, and leave out the backward where there is nothing to learn from"
            )
        self.divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return GradientJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        if self.process_group is None:
            raise MisuseError(f"join() needs a process group, and {self.communicator} has none")
        return self.process_group

    def _prepare_ranks(self, learning: bool) -> None:
        """Run the collectives of a forward: uneven inputs, buffers."""
        if self._join_config.enable:
            with self.synchronizer.pace.waiting():
                self._meet_in_join(learning)
        elif self._check_sync_bufs_pre_fwd():
            self._sync_buffers()

    def _meet_in_join(self, learning: bool) -> None:
        notified = Join.notify_join_context(self)  # type: ignore[arg-type]
        if notified is not None:
            notified.wait()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        synchronizer = self.synchronizer
        synchronizes = learning and synchronizer.enabled
        self._divide_by(self._count_active(1, synchronizes=synchronizes, framed=synchronizer.in_block))

    def _count_active(self, present: int, *, synchronizes: bool = False, framed: bool = False) -> int:
        """How many ranks will synchronize, where this one is ``present`` or has left the loop. Collective.

        Raises on all ranks if they could no longer get back in step. See [Note: forwards in step].
        """
        counts = torch.tensor([present, int(synchronizes), int(framed)], device=self.communicator.device)
        self.communicator.all_reduce(counts).wait()
        present, active, in_frames = counts.tolist()
        if in_frames and 0 < active < present:
            self.synchronizer.raised_on_all()
            raise MisuseError(
                f"of {present} ranks with data in join(), {active} have come to the last micro-batch of their window "
                "and the others have not. In a join ranks may have different numbers of windows, but each window must "
                "have as many micro-batches on all of them (one may leave out its forward). For windows of different "
                "lengths leave join() out: accumulate() lets ranks have any number of micro-batches, or none"
            )
        return int(active)

    def _divide_by(self, active: int) -> None:
        count = self.communicator.world_size if self.divide_by_initial_world_size else active
        self.synchronizer.divide_by(count)

    def _follow_forward(self) -> None:
        """Run the collectives of a forward that this rank has not run: in a join the others count who has data."""
        self._prepare_ranks(learning=True)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        self.require_forward_param_sync = self.synchronizer.enabled


class GradientJoinHook(JoinHook):
    """What a rank does repeatedly after its own data has run out."""

    def __init__(self, model: ForwardSync) -> None:
        super().__init__()
        self._model = model
        self._shadowed = False

    def main_hook(self) -> None:
        """Shadow one iteration of the ranks that still have data: their buffers, their count, their gradients."""
        model = self._model
        if model._check_sync_bufs_pre_fwd():
            model._sync_buffers(has_data=False)
        active = model._count_active(0)
        if model._check_sync_bufs_post_fwd():
            model._sync_buffers(has_data=False)
        # As in a rank with data: after a backward without synchronization the next forward broadcasts nothing.
        model.require_forward_param_sync = active > 0
        if active:
            model._divide_by(active)
            self._shadowed = True
            model.synchronizer.pending_work.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the final model of one that ran to the end, when all have run out of data."""
        model = self._model
        source = agree_on_rank(model.communicator, candidate=is_last_joiner)
        buffers = model.replica.buffers if model.forward_sync_buffers else []
        broadcast_tensors([*model.replica.parameters, *buffers], model.communicator, source)
        model.synchronizer.divide_by(model.communicator.world_size)
        if self._shadowed:
            # The last mean was for the others. The first gradient of the next epoch would be added to it.
            model.synchronizer.clear()


def call_after_backward(output: Any, action: Callable[[], None]) -> None:
    """Call ``action`` when a backward through ``output`` has ended: after the engine, if the engine registered first.

    A backward that reaches several tensors of the output calls it several times.
    """

    def hook(_: torch.Tensor) -> None:
        call_at_end(action)

    for tensor in tensors_in(output):
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(hook)


def take_in_backward_optimizers(parameters: Sequence[Any]) -> list[Any]:
    """The parameters that optimizers step as part of backward. From now on :func:`step_in_backward` does that."""
    stepped = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
    if stepped:
        # Where nothing uses them, importing torch's distributed optimizers would take time, and warns.
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map as handles

        # Their own hooks would step on this rank's gradients alone.
        for parameter in stepped:
            for handle in handles.get(parameter, ()):
                handle.remove()
    return stepped


def step_in_backward(parameters: Sequence[Any], synchronizer: Synchronizer) -> None:
    """Step optimizers on the means, if the backward has left any, then release them."""
    if not synchronizer.window.has_means:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            for optimizer in parameter._in_backward_optimizers:
                optimizer.step()
            parameter.grad = None
