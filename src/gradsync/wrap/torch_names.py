"""The names by which torch's compiler and other libraries know a wrapped model, beside those that do the work.

They are here so that gradsync's class may stand in the place of torch's::

    torch.nn.parallel.DistributedDataParallel = gradsync.DistributedDataParallel

Whoever looked the class up before still holds torch's own (the compiler, where it was imported earlier). So torch's is
taken when gradsync is imported, by whatever name it goes later, and both are told of the model whose forward runs.
"""

from typing import Any

import torch.distributed as dist
from torch import nn

from gradsync.communicator import Communicator
from gradsync.engine.synchronizer import Synchronizer
from gradsync.wrap.replica import MIB, Replica

__all__ = ["TorchDDP", "TorchNames"]

TorchDDP: Any = nn.parallel.DistributedDataParallel


class TorchNames:
    """What a wrapper shows of itself under torch's names."""

    module: nn.Module
    replica: Replica
    synchronizer: Synchronizer
    communicator: Communicator
    process_group: Any
    device_ids: list[int] | None
    find_unused_parameters: bool
    static_graph: bool
    forward_sync_buffers: bool

    @property
    def bucket_bytes_cap(self) -> int:
        """Where the compiler cuts the graph of a compiled module: at the largest cap, or the least that it takes."""
        return max(*self.synchronizer.caps.caps, MIB)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward would synchronize now: the attribute that other libraries set and read."""
        return self.synchronizer.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.synchronizer.enabled = value

    @property
    def broadcast_buffers(self) -> bool:
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Any) -> None:
        """Name parameters and buffers to leave alone; call it before wrapping."""
        TorchDDP._set_params_and_buffers_to_ignore_for_model(module, params_and_buffers_to_ignore)

    def _set_static_graph(self) -> None:
        """Nothing to do: graphs may be static or not."""
        self.static_graph = True

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
            "comm_hook": repr(self.synchronizer.reduction),
            "broadcast_buffers": self.forward_sync_buffers,
            "find_unused_parameters": self.find_unused_parameters,
            "gradient_as_bucket_view": True,
            "static_graph": self.static_graph,
            "device_ids": str(self.device_ids or ""),
        }
