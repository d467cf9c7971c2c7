"""Round-robin over several communicators: the first collective runs on the first one, the next on the next.

A process group runs its collectives one after another, with a thread or a stream of its own. Where one group does not
saturate the link, several do.
"""

from collections.abc import Sequence
from typing import Self

import torch
import torch.distributed as dist

from gradsync.base.errors import ConfigurationError, GradsyncError
from gradsync.communicator.base import Communicator, Handle
from gradsync.communicator.base_communicator import BaseCommunicator, Here, Start
from gradsync.communicator.collective import Collective, copy_failure
from gradsync.communicator.device_stage import DeviceCollective
from gradsync.communicator.process_group import ProcessGroupCommunicator
from gradsync.communicator.topology import CommunicatorFactory, make_subgroups
from gradsync.communicator.transport_state import FailureDomain

__all__ = ["RoundRobinCommunicator"]


class RoundRobinCommunicator(BaseCommunicator):
    """Gives each collective to the next of ``communicators``, which all span the same ranks.

    Every rank starts the same collectives in the same order, so all ranks pick the same communicator. A collective may
    finish before one that was started earlier. When one of the communicators fails, all of them are given up.
    """

    tells_failures = True

    def __init__(self, communicators: Sequence[Communicator]) -> None:
        if not communicators:
            raise ConfigurationError("at least one communicator is expected, got none")
        places = {(each.rank, each.world_size) for each in communicators}
        if len(places) > 1:
            raise ConfigurationError(
                f"communicators over the same ranks are expected, but this process is {_described(places)} in them"
            )
        super().__init__(communicators[0].rank, communicators[0].world_size, communicators[0].group)
        self.communicators = tuple(communicators)
        self._turn = 0

    @classmethod
    def over(
        cls, group: dist.ProcessGroup, count: int, communicator: CommunicatorFactory = ProcessGroupCommunicator
    ) -> Self:
        """Create ``count`` new groups of the ranks of ``group``, with a ``communicator`` over each. Collective."""
        if count < 1:
            raise ConfigurationError(f"count must be at least 1, got {count}")
        everybody = range(dist.get_world_size(group))
        domain = FailureDomain(group)
        groups = [make_subgroups(domain, [everybody]) for _ in range(count)]
        return cls([communicator(made) for made in groups if made is not None])

    def __repr__(self) -> str:
        return f"RoundRobinCommunicator({len(self.communicators)} × {self.communicators[0]!r})"

    @property
    def device(self) -> torch.device:
        return self.communicators[0].device

    @property
    def failure(self) -> GradsyncError | None:
        return self.state.failure or next((each.failure for each in self.communicators if each.failure), None)

    @property
    def failure_flags(self) -> list[torch.Tensor]:
        below = [flag for each in self.communicators for flag in getattr(each, "failure_flags", ())]
        return [self.state.flag, *below]

    def averages(self, device: torch.device) -> bool:
        return all(each.averages(device) for each in self.communicators)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._allocate_below(self.communicators[0], numel, dtype, device)

    def _route(self, collective: Collective, tensor: torch.Tensor, elsewhere: Start, here: Here) -> Handle:
        """Have the communicator run it whose turn it is when it is issued, after the stages before it."""

        def work() -> Handle:
            handle = elsewhere(self.communicators[self._turn])
            # Only now: what is refused takes no turn.
            self._turn = (self._turn + 1) % len(self.communicators)
            return handle

        self._refuse_after_failure()
        if tensor.is_cpu:
            return self._issue(collective, work)
        return self._issue(DeviceCollective(self, collective, tensor.device), work, on_host=False)

    def explain(self, collective: Collective, error: BaseException) -> BaseException:
        if not isinstance(error, GradsyncError):
            return super().explain(collective, error)
        # The communicator that had the turn knows whether it is out of step.
        if self.failure is not None:
            error = self._add_watch_details(error)
            self._fail(error)
            self._tell_once(str(error))
        return error

    def _refuse_after_failure(self) -> None:
        if (failure := self.failure) is not None:
            raise copy_failure(failure)

    def _tell_others(self, reason: str) -> None:
        for each in self.communicators:
            each.abort(reason)


def _described(places: set[tuple[int, int]]) -> str:
    return ", ".join(f"rank {rank} of {world_size}" for rank, world_size in sorted(places))
