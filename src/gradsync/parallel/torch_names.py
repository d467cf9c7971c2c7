"""torch's names: what arguments of the wrapper mean, and attributes that its compiler and other libraries look up.

The attributes let gradsync's class take the place of torch's::

    torch.nn.parallel.DistributedDataParallel = gradsync.DistributedDataParallel

Code that looked the class up earlier still holds torch's own (the compiler, if it was imported before). So torch's
class is captured when gradsync is imported, whatever name it has later, and both are told which model's forward runs.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from gradsync.base.errors import ConfigurationError, MisuseError
from gradsync.communicator import Communicator, choose_communicator
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.core.reduction import Cast, CommHook, Mean, Reduction
from gradsync.parallel.replica import MIB, Replica

__all__ = [
    "TorchDDP",
    "TorchNames",
    "checked_device_id",
    "choose_ranks",
    "default_reduction",
    "refuse_cpu_sync_batch_norm",
]

TorchDDP: Any = nn.parallel.DistributedDataParallel

# The environment variables that torch's logging data repeats.
_VARIABLES = ("master_addr", "master_port", "cuda_visible_devices", "gloo_socket_ifname", "torch_distributed_debug")


class TorchNames:
    """Mixin with the attributes of a wrapper under torch's names."""

    module: nn.Module
    replica: Replica
    synchronizer: Synchronizer
    communicator: Communicator
    process_group: Any
    device_type: str
    device_ids: list[int] | None
    output_device: int | None
    dim: int
    is_multi_device_module: bool
    find_unused_parameters: bool
    static_graph: bool
    forward_sync_buffers: bool

    # Inputs are copied to a GPU on a stream of their own.
    use_side_stream_for_tensor_copies = True
    # The name of one of torch's hooks that is a reduction here.
    _builtin_hook: str | None = None

    @property
    def bucket_bytes_cap(self) -> int:
        """The bytes at which the compiler cuts the graph of a module: the largest cap, or the smallest it accepts."""
        return max(*self.synchronizer.caps.caps, MIB)

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """The sizes given for the first buckets; empty if there is one size for all."""
        policy = self.synchronizer.options.policy
        listed = isinstance(policy.bucket_cap_mb, list | tuple)
        return [int(size * MIB) for size in policy.sizes or ()] if listed else []

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """Whether bucket sizes were left to the default."""
        return self.synchronizer.options.policy.sizes is None

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward would synchronize now: the attribute that other libraries set and read."""
        return self.synchronizer.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.synchronizer.enabled = value

    # -- what is managed -------------------------------------------------------------------------------------------

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return self.replica.parameters

    @property
    def _distributed_rank(self) -> int:
        return self.communicator.rank

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """The parameters of a module that are not ignored, as ``torch.distributed.optim`` asks for them."""
        yield from TorchDDP._get_data_parallel_params(module, named_params)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Any) -> None:
        """Name parameters and buffers to leave alone; call it before wrapping."""
        TorchDDP._set_params_and_buffers_to_ignore_for_model(module, params_and_buffers_to_ignore)

    # -- inputs and outputs, for those who derive from the wrapper ------------------------------------------------

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        device = torch.device(self.device_type, device_id)
        return _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return gather(outputs, output_device, dim=self.dim)

    # -- hooks -------------------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Reduce buckets with one of torch's communication hooks: ``hook(state, bucket) -> Future[Tensor]``."""
        self._reduce_with(CommHook(state, hook))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """torch's built-in hooks, which are not Python: a plain mean, or one sent in float16."""
        kinds: dict[Any, Reduction] = {
            BuiltinCommHookType.ALLREDUCE: Mean(),
            BuiltinCommHookType.FP16_COMPRESS: Cast(torch.float16),
        }
        if comm_hook_type not in kinds:
            raise ConfigurationError(f"expected one of torch.distributed.BuiltinCommHookType, got {comm_hook_type!r}")
        self._reduce_with(kinds[comm_hook_type])
        self._builtin_hook = str(comm_hook_type)

    def _reduce_with(self, reduction: Reduction) -> None:
        if self._builtin_hook is not None or isinstance(self.synchronizer.reduction, CommHook):
            raise MisuseError("register_comm_hook can only be called once")
        self.synchronizer.reduce_with(reduction)

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Step an optimizer bucket by bucket, as soon as a bucket's mean is there."""
        from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

        try:
            _as_overlapped_optim(optim, optim_params, *args, **kwargs).register_ddp(self)
        except NotImplementedError as error:
            raise ConfigurationError(f"torch cannot step {optim.__name__} bucket by bucket: {error}") from error

    def _remove_autograd_hooks(self) -> None:
        """Detach the engine from the model, which may then be wrapped again or trained alone."""
        self.synchronizer.detach()

    def _check_reducer_finalized(self) -> None:
        """Raise if the last backward has left a synchronization unfinished."""
        if self.synchronizer.busy:
            raise MisuseError(f"the last backward has not been brought to its end: {self.synchronizer!r}")

    # -- what has nothing to do here -------------------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        """Accept the setting, without effect: graphs may be static or not."""
        self.static_graph = True

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accept the setting, without effect: outputs are never cloned."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Check the rate, and ignore it: nothing is timed unless asked; :class:`~gradsync.Timeline` times every
        window."""
        if sample_rate < 1:
            raise ConfigurationError(f"the sample rate must be at least 1, got {sample_rate}")

    # -- facts -----------------------------------------------------------------------------------------------------

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Facts about this wrapper under the names torch uses for them."""
        layout = self.synchronizer.layout
        backend = "none" if self.process_group is None else dist.get_backend(self.process_group)
        return {
            "world_size": self.communicator.world_size,
            "rank": self.communicator.rank,
            "backend_name": backend,
            "module_name": type(self.module).__name__,
            "iteration": self.synchronizer.synchronizations,
            "bucket_cap_bytes": max(self.synchronizer.caps.caps),
            "bucket_sizes": ", ".join(str(plan.numel * plan.dtype.itemsize) for plan in layout.buckets),
            "num_buckets": len(layout.buckets),
            "num_parameter_tensors": len(layout.parameters) + len(layout.sparse),
            "total_parameter_size_bytes": sum(spec.nbytes for spec in self.replica.specs),
            "dtypes": ", ".join(sorted({str(spec.dtype).removeprefix("torch.") for spec in self.replica.specs})),
            "broadcast_buffers": self.forward_sync_buffers,
            "find_unused_parameters": self.find_unused_parameters,
            "gradient_as_bucket_view": True,
            "static_graph": self.static_graph,
            "device_ids": str(self.device_ids or ""),
            "output_device": -1 if self.output_device is None else self.output_device,
            "is_multi_device_module": self.is_multi_device_module,
            "has_sync_bn": any(isinstance(layer, nn.SyncBatchNorm) for layer in self.module.modules()),
            **{name: os.environ.get(name.upper(), "N/A") for name in _VARIABLES},
            **({} if (hook := self._hook_name()) is None else {"comm_hook": hook}),
        }

    def _hook_name(self) -> str | None:
        """The name of the hook; a plain mean has none."""
        reduction = self.synchronizer.reduction
        if self._builtin_hook is not None or isinstance(reduction, Mean):
            return self._builtin_hook
        return reduction.name if isinstance(reduction, CommHook) else repr(reduction)


# -- arguments -----------------------------------------------------------------------------------------------------


def checked_device_id(
    parameters: Sequence[nn.Parameter], device_ids: Sequence[Any] | None, output_device: Any
) -> int | None:
    """The number of the device that inputs and outputs are moved to; None where nothing is moved."""
    device = parameters[0].device
    if device_ids and len(device_ids) > 1:
        raise ConfigurationError(f"device_ids must be None or hold one device, got {list(device_ids)}")
    if device.type == "cpu" or len({p.device for p in parameters}) > 1:
        if device_ids or output_device is not None:
            raise ConfigurationError(
                "device_ids and output_device are for modules on one GPU; this module's parameters are on "
                f"{sorted({str(p.device) for p in parameters})}. Leave both out"
            )
        return None
    if not device_ids:
        return None
    index = torch.device(device_ids[0] if not isinstance(device_ids[0], int) else f"cuda:{device_ids[0]}").index
    if index is not None and index != device.index:
        raise ConfigurationError(
            f"device_ids is {list(device_ids)}, but the module is on {device}. Move it there before you wrap it"
        )
    return device.index


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


def default_reduction(mixed_precision: _MixedPrecision | None) -> Reduction:
    """The reduction used where none was given: narrow gradients, if ``mixed_precision`` asks for them."""
    dtype = None if mixed_precision is None else mixed_precision.reduce_dtype or mixed_precision.param_dtype
    return Mean() if dtype is None else Cast(dtype)


def refuse_cpu_sync_batch_norm(module: nn.Module, device_type: str) -> None:
    """Raise for layers that torch supports on GPUs only."""
    if device_type == "cpu" and any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        raise ConfigurationError(
            "SyncBatchNorm works on GPUs only, and this module is on the CPU. Move it to a GPU, or keep BatchNorm"
        )
