"""``DistributedDataParallel``: torch's wrapper, with its signature and behaviour, on gradsync's engine."""

import dataclasses
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel.distributed import _MixedPrecision

from gradsync.base.errors import ConfigurationError, MisuseError
from gradsync.communicator import Choice, Communicator, InProcessWorld, choose_communicator, fit_communicator
from gradsync.core.engine.policy import BucketSize, PolicySettings, SyncPolicy
from gradsync.core.engine.synchronizer import compiler_here
from gradsync.core.reduction import Mean
from gradsync.parallel.accumulation import Accumulation
from gradsync.parallel.forward_sync import (
    ForwardSync,
    call_after_backward,
    choose_buffer_sync,
    step_in_backward,
    take_in_backward_optimizers,
)
from gradsync.parallel.mixed_precision import LowPrecision
from gradsync.parallel.replica import Replica
from gradsync.parallel.torch_names import (
    TorchDDP,
    TorchNames,
    checked_device_id,
    choose_ranks,
    default_reduction,
    refuse_cpu_sync_batch_norm,
)

__all__ = ["DistributedDataParallel", "TrainingAlone"]

# Attributes that a copy creates for itself.
_TRANSIENT = (
    *("transport", "communicator", "process_group", "device_mesh", "replica", "synchronizer"),
    *("_low_precision", "_in_backward", "_lazy_init_ran", "_buffer_futures"),
)


class DistributedDataParallel(ForwardSync, Accumulation, TorchNames, nn.Module, Joinable):
    """Wraps a module so that its gradients are averaged over all ranks during backward.

    Takes the arguments of ``torch.nn.parallel.DistributedDataParallel``. The following are accepted but have no effect,
    because the engine always behaves as if they were on, at no cost: ``find_unused_parameters``, ``static_graph``,
    ``gradient_as_bucket_view``, ``batched_grad_copy``, ``check_reduction``, ``skip_all_reduce_unused_params``.

    Keyword arguments beyond torch's:

    communicator
        how ranks communicate; by default through the process group's own collectives.
    policy
        how gradients are averaged; see :class:`~gradsync.SyncPolicy`. Its fields are also keyword arguments:
        ``reduction``, ``schedule``, ``observer``, ``accumulation_dtype``, ``on_bad_step``, ``replica_check``.

    ``bucket_cap_mb`` defaults to ``"auto"``: a size computed from the measured latency and bandwidth of the group.
    """

    # The wrapper whose forward runs, for the compiler, which reads and sets this on whatever class has that name.
    _active_ddp_module: Any = None

    _lazy_init_ran = False
    # The number of synchronizations that had ended when buffers were last considered.
    _ends = 0
    # The parameters that optimizers step as part of backward.
    _in_backward: Sequence[nn.Parameter] = ()

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: BucketSize = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: _MixedPrecision | None = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        communicator: Communicator | None = None,
        policy: SyncPolicy | None = None,
        **settings: Unpack[PolicySettings],
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ConfigurationError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce belong together, got only one of them"
            )
        if bucket_cap_mb_list and bucket_cap_mb not in (None, "auto"):
            raise ConfigurationError("pass bucket_cap_mb or bucket_cap_mb_list, not both")
        self._policy = SyncPolicy.chosen(
            policy,
            settings,
            wrapper=type(self).__name__,
            bucket_cap_mb=bucket_cap_mb_list or bucket_cap_mb,
            default=default_reduction(mixed_precision),
        )
        chosen = choose_ranks(module, communicator, process_group, device_mesh)
        self.parameters_to_ignore: set[str] = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._delayed = {name for name, _ in delay_all_reduce_named_params or ()}
        self.replica = Replica(module, ignored=self.parameters_to_ignore, delayed=self._delayed)
        # Ranks that must not communicate yet, or that were given a transport, have nothing to choose.
        free = init_sync and communicator is None
        transport = fit_communicator(chosen, self.replica.device) if free else Choice.given(chosen)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.module = module
        self.dim = dim
        self.device, self.device_type = self.replica.device, self.replica.device.type
        self.is_multi_device_module = len({parameter.device for parameter in self.replica.parameters}) > 1
        self.output_device = checked_device_id(self.replica.parameters, device_ids, output_device)
        self.device_ids = None if self.output_device is None else [self.output_device]
        refuse_cpu_sync_batch_norm(module, self.device_type)
        self.mixed_precision = mixed_precision
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.require_forward_param_sync = True
        self.divide_by_initial_world_size = True
        self.forward_sync_buffers = choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
        if check_reduction:
            warnings.warn("`check_reduction` is deprecated: reductions are always checked", FutureWarning, stacklevel=2)
        self._low_precision = LowPrecision.of(mixed_precision, module, self.parameters_to_ignore)
        sync_buffers = forward_sync_buffers is not None or self.forward_sync_buffers
        self._connect_to(transport, chosen.group, init_sync=init_sync, sync_buffers=sync_buffers)
        self.replica.watch(self)

    def _stand_in_for_forward(self, has_run: bool, ends_window: bool) -> bool:
        """Stand in for a forward that this rank has not run; returns whether there was anything to take part in.

        In a join every forward of the others has asked which ranks have data. Otherwise only the first of a window has
        collectives: it has broadcast buffers.
        """
        if self._join_config.enable:
            if not has_run:
                self._follow_forward()
            return not has_run
        if self.synchronizer.window.any_forward or not ends_window:
            return False
        if self.will_sync_module_buffers():
            self._sync_module_buffers()
        self.require_forward_param_sync = True
        return True

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward synchronizes buffers: the first of a window does, even where this rank has ended the
        previous window without a forward that indicated so."""
        if self._ends != self.synchronizer.ends:
            self._ends = self.synchronizer.ends
            self.require_forward_param_sync = True
        return super().will_sync_module_buffers()

    def _sync_module_buffers(self, authoritative_rank: int = 0) -> None:
        # Before or after a forward, and in a hook's own collectives.
        with self.synchronizer.pace.waiting():
            super()._sync_module_buffers(authoritative_rank)

    # -- forward and backward ----------------------------------------------------------------------------------

    # torch.compiler.disable would import the whole compiler along with gradsync.
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; its backward will average the gradients."""
        is_marked = self.process_group is not None
        self.synchronizer.before_forward(self.module, compiler_here(), is_marked=is_marked)
        try:
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            # Where ranks may be threads, process-wide state is left alone.
            with self._inside_ddp_forward() if is_marked else nullcontext():
                output = self.module(*inputs, **kwargs)
            return self._post_forward(output)
        except Exception as error:
            self.synchronizer.raised(error, "its forward")
            raise

    @contextmanager
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Mark the active module: the compiler cuts its graph at bucket boundaries."""
        owners: tuple[Any, Any] = (TorchDDP, DistributedDataParallel)
        before = [owner._active_ddp_module for owner in owners]
        for owner in owners:
            owner._active_ddp_module = self
        try:
            yield
        finally:
            for owner, module in zip(owners, before, strict=True):
                owner._active_ddp_module = module

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return cls._active_ddp_module

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        learning = torch.is_grad_enabled()
        if learning and not self._lazy_init_ran:
            self._lazy_init()
        if learning:
            self.replica.require_unchanged()
            self.synchronizer.begin_forward()
        self._prepare_ranks(learning)
        if self.device_ids:
            moved, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self._low_precision is not None:
            self._awaits_backward = learning or self._low_precision.entered
            self._low_precision.enter()
            inputs, kwargs = self._low_precision.cast_inputs(inputs, kwargs)
        return inputs, kwargs

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _post_forward(self, output: Any) -> Any:
        learning = torch.is_grad_enabled()
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        if learning:
            self.synchronizer.end_forward(output)
            self._finish_buffers_after(output)
            if self._in_backward:
                call_after_backward(output, partial(step_in_backward, self._in_backward, self.synchronizer))
        elif self._low_precision is not None and not self._awaits_backward:
            self._low_precision.release_all()
        # As in torch: of consecutive forwards without gradients only the first takes rank 0's buffers, so ranks may
        # evaluate different numbers of batches.
        self.require_forward_param_sync = learning and self.synchronizer.enabled
        return output

    def _lazy_init(self) -> None:
        """Prepare for the first backward: optimizers may be attached to parameters before or after wrapping."""
        self._in_backward = take_in_backward_optimizers(self.replica.parameters)
        self._lazy_init_ran = True

    # -- copies, other groups --------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is None or self.process_group != dist.distributed_c10d._get_default_group():
            raise MisuseError(
                "only a DistributedDataParallel over the default process group can be pickled or copied: a process "
                "group has no meaning elsewhere. Pickle its .module or state_dict() instead"
            )
        state = dict(self.__dict__)
        for transient in _TRANSIENT:
            state.pop(transient, None)
        state["_policy"], state["_synchronizes"] = self.current_policy(), self.synchronizer.enabled
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        enabled = state.pop("_synchronizes")
        super().__setstate__(state)
        self.replica = Replica(self.module, ignored=self.parameters_to_ignore, delayed=self._delayed)
        self._low_precision = LowPrecision.of(self.mixed_precision, self.module, self.parameters_to_ignore)
        communicator = choose_communicator()
        self._connect_to(Choice.given(communicator), communicator.group)
        self.replica.watch(self)
        self.synchronizer.enabled = enabled

    def _update_process_group(self, new_process_group: Any) -> None:
        """Switch to a different process group: all its ranks call this, and nothing is compared or broadcast.

        On a rank outside the group nothing changes. Hooks that hold a process group must be told separately.
        """
        if dist.distributed_c10d._rank_not_in_group(new_process_group):
            return
        self.reconnect(Choice.given(choose_communicator(new_process_group)), self.current_policy())

    def reconnect(self, transport: Choice, policy: SyncPolicy) -> None:
        """Switch to a different transport. As with a new process group, nothing is compared or broadcast; but ranks
        that share memory allocate it together, so all of them call this, between two windows."""
        enabled, self._policy = self.synchronizer.enabled, policy
        self.synchronizer.detach()
        self._connect_to(transport, transport.communicator.group)
        self.synchronizer.enabled = enabled

    def regroup(self, communicator: Communicator, policy: SyncPolicy) -> None:
        """Switch to different ranks, whatever state the previous group is in. As at wrapping, the new ranks compare
        their models and take rank 0's values. Collective among them."""
        self._policy = policy
        self.synchronizer.detach()
        transport = fit_communicator(communicator, self.replica.device)
        self._connect_to(transport, communicator.group, init_sync=True, sync_buffers=self.forward_sync_buffers)
        self.require_forward_param_sync = True

    def current_policy(self) -> SyncPolicy:
        """The policy chosen at wrapping, with later replacements."""
        client = self.synchronizer.bucket_client
        # A sharded optimizer stays with the engine it was made for.
        reduction = self.synchronizer.reduction if client is None else client.whole
        return dataclasses.replace(self._policy, reduction=reduction)

    def _connect_to(self, transport: Choice, group: Any, *, init_sync: bool = False, sync_buffers: bool = True) -> None:
        """Attach the engine over ``transport``. Nothing is communicated unless ``init_sync``."""
        self.transport, self.communicator, self.process_group = transport, transport.communicator, group
        self.synchronizer = self.replica.connect(
            self.communicator,
            self._policy,
            init_sync=init_sync,
            sync_buffers=sync_buffers,
            swapper=self._low_precision,
        )
        reference = weakref.ref(self)

        def stand_in(has_run: bool, ends_window: bool) -> bool:
            wrapper = reference()
            return wrapper is not None and wrapper._stand_in_for_forward(has_run, ends_window)

        self.synchronizer.pending_work.stand_in_by(stand_in)


class TrainingAlone:
    """Lets ``wrapper`` train without other ranks until :meth:`end`: windows, their weights and clipping are this rank's
    own, and nothing is sent; see :class:`~gradsync.LocalSteps`. Parameters may diverge between ranks; the caller that
    ends it must make them equal.

    Not a context manager, and nothing happens if it is forgotten: the ranks must be together to go back.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper
        self._transport, self._group, self._policy = wrapper.transport, wrapper.process_group, wrapper.current_policy()
        alone = Choice(communicator=InProcessWorld(1).communicator(0), reason="this rank trains by itself")
        # A communication hook would use its own group all the same, and a stateful reduction count these windows.
        wrapper.reconnect(alone, dataclasses.replace(self._policy, reduction=Mean()))

    def end(self) -> None:
        """Average gradients over the previous ranks again. Collective, between two windows."""
        self._wrapper.reconnect(self._transport, self._policy)
        self._wrapper.process_group = self._group

    def give_up(self, reason: str) -> None:
        """Make the wrapper refuse to go on: ranks may not hold the same parameters. Not collective."""
        self._wrapper.synchronizer.refuse(reason)
