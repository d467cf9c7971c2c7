"""Any ``torch.distributed`` process group: NCCL, Gloo, MPI, UCC. The default."""

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradsync.communicator.base import Handle, ReduceOp

__all__ = ["ProcessGroupCommunicator"]

# Backends that divide while they reduce. Gloo and MPI would divide in a pass of their own.
AVERAGING_BACKENDS = frozenset({"nccl", "rccl", "xccl", "hccl"})


class ProcessGroupCommunicator:
    """The collectives of one process group.

    They are called on the group itself and not through ``torch.distributed``'s functions: those cost tens of
    microseconds of checks a call, and a bucket's start lies on the path of backward.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: Any = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._averaging: dict[torch.device, bool] = {}

    def __repr__(self) -> str:
        return f"ProcessGroupCommunicator({self.backend}, rank {self.rank} of {self.world_size})"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @functools.cached_property
    def backend(self) -> str:
        return str(dist.get_backend(self.group))

    @functools.cached_property
    def device(self) -> torch.device:
        # The device torch itself uses for object collectives: the CPU where the group has a CPU backend.
        name = dist.distributed_c10d._get_object_coll_device(self.group)
        return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)

    @property
    def timeout(self) -> float:
        """Seconds after which a collective that not all ranks join is given up."""
        limit: timedelta = self.group._get_backend(self.device).options._timeout
        return limit.total_seconds()

    def averages(self, device: torch.device) -> bool:
        if device not in self._averaging:
            backend = self.group._get_backend(device)
            self._averaging[device] = backend.name() in AVERAGING_BACKENDS
        return self._averaging[device]

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Handle:
        options = dist.AllreduceOptions()
        options.reduceOp = _OPERATIONS[op]
        handle: Handle = self.group.allreduce([tensor], options)
        return handle

    def broadcast(self, tensor: torch.Tensor, source: int) -> Handle:
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        handle: Handle = self.group.broadcast([tensor], options)
        return handle

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        handle: Handle = self.group._allgather_base(output, tensor, _AllgatherOptions())
        return handle

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        handle: Handle = self.group._reduce_scatter_base(output, tensor, dist.ReduceScatterOptions())
        return handle


# torch exports the options of the other collectives by name, but not these.
_AllgatherOptions: Any = vars(dist.distributed_c10d)["AllgatherOptions"]

_OPERATIONS: dict[ReduceOp, Any] = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
}
