"""Several communicators in turn: the first collective on the first one, the next on the next.

A process group works on its collectives one after the other, with a thread or a stream of its own. Where one of them
does not fill the link, several do.
"""

from collections.abc import Sequence
from typing import Self

import torch
import torch.distributed as dist

from gradsync.communicator.base import Communicator, Handle, ReduceOp
from gradsync.communicator.process_group import ProcessGroupCommunicator
from gradsync.communicator.subgroups import CommunicatorFactory, make_subgroups
from gradsync.errors import ConfigurationError

__all__ = ["RoundRobinCommunicator"]


class RoundRobinCommunicator:
    """Gives each collective to the next of ``communicators``, which are over the same ranks.

    Every rank starts the same collectives in the same order, so that all of them take the same turn. A collective may
    be done before one that was started earlier.
    """

    def __init__(self, communicators: Sequence[Communicator]) -> None:
        if not communicators:
            raise ConfigurationError("at least one communicator is expected, got none")
        places = {(each.rank, each.world_size) for each in communicators}
        if len(places) > 1:
            raise ConfigurationError(
                f"communicators over the same ranks are expected, but this process is {_described(places)} in them"
            )
        self.communicators = tuple(communicators)
        self._turn = 0

    @classmethod
    def over(
        cls, group: dist.ProcessGroup, count: int, communicator: CommunicatorFactory = ProcessGroupCommunicator
    ) -> Self:
        """``count`` new groups of the ranks of ``group``, with a ``communicator`` over each. A collective."""
        if count < 1:
            raise ConfigurationError(f"count must be at least 1, got {count}")
        everybody = range(dist.get_world_size(group))
        groups = [make_subgroups(group, [everybody]) for _ in range(count)]
        return cls([communicator(made) for made in groups if made is not None])

    def __repr__(self) -> str:
        return f"RoundRobinCommunicator({len(self.communicators)} × {self.communicators[0]!r})"

    @property
    def rank(self) -> int:
        return self.communicators[0].rank

    @property
    def world_size(self) -> int:
        return self.communicators[0].world_size

    @property
    def device(self) -> torch.device:
        return self.communicators[0].device

    def averages(self, device: torch.device) -> bool:
        return all(each.averages(device) for each in self.communicators)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.communicators[0].allocate(numel, dtype, device)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Handle:
        return self._next().all_reduce(tensor, op)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Handle:
        return self._next().broadcast(tensor, source)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        return self._next().all_gather(output, tensor)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        return self._next().reduce_scatter(output, tensor)

    def _next(self) -> Communicator:
        turn = self._turn
        self._turn = (turn + 1) % len(self.communicators)
        return self.communicators[turn]


def _described(places: set[tuple[int, int]]) -> str:
    return ", ".join(f"rank {rank} of {world_size}" for rank, world_size in sorted(places))
