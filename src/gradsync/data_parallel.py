"""``DistributedDataParallel``: torch's wrapper, signature and habits, on gradsync's engine."""

import dataclasses
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.utils import _to_kwargs

from gradsync.communicator import Choice, Communicator, choose_communicator, fit_communicator
from gradsync.engine.policy import BucketSize, PolicySettings, SyncPolicy
from gradsync.errors import ConfigurationError, MisuseError
from gradsync.reduction import Cast, CommHook, Mean, Reduction
from gradsync.wrap.accumulation import Accumulation
from gradsync.wrap.mixed_precision import LowPrecision, MixedPrecisionConfig
from gradsync.wrap.replica import Replica
from gradsync.wrap.replica_state import broadcast_tensors
from gradsync.wrap.torch_names import TorchDDP, TorchNames
from gradsync.wrap.uneven_inputs import GradientJoinHook, agree_on_rank, count_active, set_divisor

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(Accumulation, TorchNames, nn.Module, Joinable):
    """Wraps a module so that its gradients are averaged over all ranks during backward.

    Takes the arguments of ``torch.nn.parallel.DistributedDataParallel``. These are accepted and have nothing to do
    here, because the engine always behaves as if they were on, at no cost: ``find_unused_parameters``,
    ``static_graph``, ``gradient_as_bucket_view``, ``batched_grad_copy``, ``check_reduction``,
    ``skip_all_reduce_unused_params``.

    Keyword arguments beyond torch's:

    communicator
        how bytes move; by default the process group's own collectives.
    policy
        how gradients travel; see :class:`~gradsync.SyncPolicy`. Its fields may be given as keyword arguments instead:
        ``reduction``, ``schedule``, ``observer``, ``accumulation_dtype``.

    ``bucket_cap_mb`` defaults to ``"auto"``: a size computed from the measured latency and bandwidth of the group.
    """

    # The wrapper whose forward runs, for the compiler. It reads and sets this on whichever class it has by that name.
    _active_ddp_module: Any = None

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
        mixed_precision: MixedPrecisionConfig | None = None,
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
        if bucket_cap_mb_list is not None and bucket_cap_mb not in (None, "auto"):
            raise ConfigurationError("pass bucket_cap_mb or bucket_cap_mb_list, not both")
        self._policy = SyncPolicy.chosen(
            policy,
            settings,
            bucket_cap_mb=bucket_cap_mb_list if bucket_cap_mb_list is not None else bucket_cap_mb,
            default=_default_reduction(mixed_precision),
        )
        chosen = _choose(module, communicator, process_group, device_mesh)
        self.parameters_to_ignore: set[str] = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._delayed = {name for name, _ in delay_all_reduce_named_params or ()}
        self.replica = Replica(module, ignored=self.parameters_to_ignore, delayed=self._delayed)
        # Ranks that must not talk yet, or were told which way to take, have no choice.
        free = init_sync and communicator is None
        self.wire = fit_communicator(chosen, self.replica.device) if free else Choice.given(chosen)
        self.communicator = self.wire.communicator
        self.process_group = chosen.group
        self.module = module
        self.dim = dim
        self.device = self.replica.device
        self.device_type = self.device.type
        self.is_multi_device_module = len({p.device for p in self.replica.parameters}) > 1
        self._set_devices(device_ids, output_device)
        _refuse_cpu_sync_batch_norm(module, self.device_type)
        self.mixed_precision = mixed_precision
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.require_forward_param_sync = True
        self.divide_by_initial_world_size = True
        self.forward_sync_buffers = _choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
        self._low_precision = (
            LowPrecision(mixed_precision, module, self.parameters_to_ignore) if mixed_precision is not None else None
        )
        self.synchronizer = self.replica.connect(
            self.communicator,
            self._policy,
            init_sync=init_sync,
            sync_buffers=forward_sync_buffers is not None or self.forward_sync_buffers,
            keeper=self._low_precision,
        )
        self._connected()

    def _connected(self) -> None:
        self.replica.watch(self)
        reference = weakref.ref(self)

        def before_taking_part() -> None:
            wrapper = reference()
            if wrapper is not None:
                wrapper._stand_in_for_forward()

        self.synchronizer.before_taking_part(before_taking_part)

    def _stand_in_for_forward(self) -> None:
        """A rank without a micro-batch in a window: the first forward of the others has broadcast buffers."""
        if self.will_sync_module_buffers():
            self._broadcast_buffers()
        self.require_forward_param_sync = True

    def _set_devices(self, device_ids: Sequence[Any] | None, output_device: Any) -> None:
        self.device_ids: list[int] | None = None
        self.output_device: int | None = None
        if device_ids and len(device_ids) > 1:
            raise ConfigurationError(f"device_ids must be None or hold one device, got {list(device_ids)}")
        movable = self.device_type != "cpu" and not self.is_multi_device_module
        if not movable:
            if device_ids or output_device is not None:
                raise ConfigurationError(
                    "device_ids and output_device are for modules on one GPU; this module's parameters are on "
                    f"{sorted({str(p.device) for p in self.replica.parameters})}. Leave both out"
                )
            return
        if device_ids:
            index = torch.device(device_ids[0] if not isinstance(device_ids[0], int) else f"cuda:{device_ids[0]}").index
            if index is not None and index != self.device.index:
                raise ConfigurationError(
                    f"device_ids is {list(device_ids)}, but the module is on {self.device}. Move it there before you "
                    "wrap it"
                )
            self.device_ids = [self.device.index]
            self.output_device = self.device.index

    # -- forward and backward ----------------------------------------------------------------------------------

    # torch.compiler.disable would import the whole compiler along with gradsync.
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; its backward will average the gradients."""
        inputs, kwargs = self._before_forward(inputs, kwargs)
        if self.process_group is None:
            # Ranks may be threads here, and what follows belongs to the whole process.
            output = self.module(*inputs, **kwargs)
            self._after_forward(output)
            return output
        with self._inside_ddp_forward():
            output = self.module(*inputs, **kwargs)
        self._after_forward(output)
        return output

    @contextmanager
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def _inside_ddp_forward(self) -> Iterator[None]:
        """The compiler cuts the graph at bucket boundaries for the module that is named as active."""
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
    def _before_forward(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        learning = torch.is_grad_enabled()
        if learning:
            self.replica.require_unchanged()
            self.synchronizer.begin_forward()
        self._prepare_ranks(learning)
        if self.device_ids:
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, torch.device(self.device_type, self.device_ids[0]), True)
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self._low_precision is not None:
            self._awaits_backward = learning or self._low_precision.entered
            self._low_precision.enter()
            inputs, kwargs = self._low_precision.cast_inputs(inputs, kwargs)
        return inputs, kwargs

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _after_forward(self, output: Any) -> None:
        learning = torch.is_grad_enabled()
        if learning:
            self.synchronizer.end_forward(output)
        elif self._low_precision is not None and not self._awaits_backward:
            self._low_precision.release_all()
        # As in torch: of several forwards without gradients only the first takes rank 0's buffers, so that ranks may
        # evaluate different numbers of batches.
        self.require_forward_param_sync = learning and self.synchronizer.enabled

    def _prepare_ranks(self, learning: bool) -> None:
        """The collectives of a forward: uneven inputs, buffers."""
        notified = Join.notify_join_context(self)
        if notified is not None:
            notified.wait()
        joining = self._join_config.enable
        if self.will_sync_module_buffers():
            self._broadcast_buffers(agree_on_rank(self.communicator, candidate=True) if joining else 0)
        if joining:
            active = count_active(self.communicator, active=learning and self.synchronizer.enabled)
            set_divisor(self, active)

    def _broadcast_buffers(self, source: int = 0) -> None:
        buffers = self.replica.buffers
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(buffers)):
            broadcast_tensors(buffers, self.communicator, source)

    # -- buffers, uneven inputs ------------------------------------------------------------------------------------

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward takes the buffers of rank 0."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.replica.buffers)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may have different numbers of inputs; see ``torch.distributed.algorithms.Join``."""
        _ = self.join_process_group  # refuse before Join has changed anything
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> GradientJoinHook:
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

    # -- torch's further methods -------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Reduce buckets with one of torch's communication hooks: ``hook(state, bucket) -> Future[Tensor]``."""
        if isinstance(self.synchronizer.reduction, CommHook):
            raise MisuseError("register_comm_hook can only be called once")
        self.synchronizer.reduce_with(CommHook(state, hook))

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is None or self.process_group != dist.distributed_c10d._get_default_group():
            raise MisuseError(
                "only a DistributedDataParallel over the default process group can be pickled or copied: a process "
                "group has no meaning elsewhere. Pickle its .module or state_dict() instead"
            )
        state = dict(self.__dict__)
        for transient in ("wire", "communicator", "process_group", "replica", "synchronizer", "_low_precision"):
            del state[transient]
        state["_policy"] = dataclasses.replace(self._policy, reduction=self.synchronizer.reduction)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.wire = Choice.given(choose_communicator())
        self.communicator = self.wire.communicator
        self.process_group = self.communicator.group
        self.replica = Replica(self.module, ignored=self.parameters_to_ignore, delayed=self._delayed)
        self._low_precision = (
            LowPrecision(self.mixed_precision, self.module, self.parameters_to_ignore)
            if self.mixed_precision is not None
            else None
        )
        self.synchronizer = self.replica.connect(
            self.communicator, self._policy, init_sync=False, keeper=self._low_precision
        )
        self._connected()


def _choose(module: nn.Module, communicator: Communicator | None, process_group: Any, device_mesh: Any) -> Communicator:
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
        raise ConfigurationError(f"pass one of communicator, process_group and device_mesh, got {' and '.join(given)}")
    if device_mesh is None:
        return choose_communicator(communicator if communicator is not None else process_group)
    if device_mesh.ndim != 1:
        raise ConfigurationError(
            f"device_mesh must have one dimension, got {device_mesh}. Pass the data-parallel one, as in mesh['dp']"
        )
    if device_mesh._get_root_mesh() != device_mesh:
        # A slice of a larger mesh: the module may hold DTensors of the other dimensions, which torch localizes.
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    return choose_communicator(device_mesh.get_group(mesh_dim=0))


def _default_reduction(mixed_precision: MixedPrecisionConfig | None) -> Reduction:
    dtype = None if mixed_precision is None else LowPrecision.wire_dtype(mixed_precision)
    return Mean() if dtype is None else Cast(dtype)


def _choose_buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
    if broadcast_buffers is not None and forward_sync_buffers is not None:
        warnings.warn("broadcast_buffers is ignored because forward_sync_buffers is given", FutureWarning, stacklevel=3)
    if forward_sync_buffers is not None:
        return forward_sync_buffers
    return True if broadcast_buffers is None else broadcast_buffers


def _refuse_cpu_sync_batch_norm(module: nn.Module, device_type: str) -> None:
    if device_type == "cpu" and any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        raise ConfigurationError(
            "SyncBatchNorm works on GPUs only, and this module is on the CPU. Move it to a GPU, or keep BatchNorm"
        )
