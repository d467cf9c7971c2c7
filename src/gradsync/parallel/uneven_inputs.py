"""``join``: ranks whose data ran out shadow the collectives of those that go on (torch's ``Join`` protocol).

[Note: forwards in step] In a join every forward of a rank with data is matched with one of every other rank, and a rank
that has left follows along. So ranks with data must run equally many forwards between two synchronizations. A
micro-batch of ``accumulate()`` without a forward stands in for one, but nothing stands in for a micro-batch that does
not exist. Ranks count what each is about to do along with who has data: where some end their window and some do not,
all of them raise.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.algorithms.join import JoinHook

from gradsync.base.errors import MisuseError
from gradsync.communicator import Communicator
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.parallel.replica import Replica
from gradsync.parallel.replica_state import agree_on_rank, broadcast_tensors

__all__ = ["Attendance", "GradientJoinHook", "JoinedModel", "Turnout", "set_divisor"]


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """What a rank reports about a forward: that it has data, that it will synchronize, that accumulate() frames it."""

    has_data: bool
    synchronizes: bool
    framed: bool

    @classmethod
    def of(cls, synchronizer: Synchronizer, *, learning: bool) -> "Attendance":
        return cls(has_data=True, synchronizes=learning and synchronizer.enabled, framed=synchronizer.in_block)


# The report of a rank that has left the loop.
GONE = Attendance(has_data=False, synchronizes=False, framed=False)


@dataclass(frozen=True, kw_only=True)
class Turnout:
    """What all ranks report about a forward: how many have data, will synchronize (``active``), and are framed."""

    present: int
    active: int
    framed: int

    @classmethod
    def count(cls, communicator: Communicator, mine: Attendance) -> "Turnout":
        """Sum the reports of all ranks. Collective."""
        said = [int(mine.has_data), int(mine.synchronizes), int(mine.framed)]
        counts = torch.tensor(said, device=communicator.device)
        communicator.all_reduce(counts).wait()
        present, active, framed = counts.tolist()
        return cls(present=present, active=active, framed=framed)

    def require_in_step(self, synchronizer: Synchronizer) -> None:
        """Raise on all ranks if they could no longer get back in step. See [Note: forwards in step]."""
        if self.framed and 0 < self.active < self.present:
            synchronizer.engine.raised_on_all()
            raise MisuseError(
                f"of {self.present} ranks with data in join(), {self.active} have come to the last micro-batch of "
                "their window and the others have not. In a join ranks may have different numbers of windows, but each "
                "window must have as many micro-batches on all of them (one may leave out its forward). For windows of "
                "different lengths leave join() out: accumulate() lets ranks have any number of micro-batches, or none"
            )


class JoinedModel(Protocol):
    """The wrapper, as the hook sees it."""

    replica: Replica
    synchronizer: Synchronizer
    communicator: Communicator
    require_forward_param_sync: bool
    forward_sync_buffers: bool
    divide_by_initial_world_size: bool

    def _check_sync_bufs_pre_fwd(self) -> bool:
        """Whether buffers are synchronized before the next forward."""

    def _check_sync_bufs_post_fwd(self) -> bool:
        """Whether buffers are synchronized after it."""

    def _sync_buffers(self, *, has_data: bool = True) -> None:
        """Synchronize them, with those of a rank that has data."""


class GradientJoinHook(JoinHook):
    """What a rank does repeatedly after its own data has run out."""

    def __init__(self, model: JoinedModel) -> None:
        super().__init__()
        self._model = model
        self._shadowed = False

    def main_hook(self) -> None:
        """Shadow one iteration of the ranks that still have data: their buffers, their count, their gradients."""
        model = self._model
        if model._check_sync_bufs_pre_fwd():
            model._sync_buffers(has_data=False)
        turnout = Turnout.count(model.communicator, GONE)
        turnout.require_in_step(model.synchronizer)
        if model._check_sync_bufs_post_fwd():
            model._sync_buffers(has_data=False)
        # As in a rank with data: after a backward without synchronization the next forward broadcasts nothing.
        model.require_forward_param_sync = turnout.active > 0
        if turnout.active:
            set_divisor(model, turnout.active)
            self._shadowed = True
            model.synchronizer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have run out of data: all take the final model of one that ran to the end."""
        model = self._model
        source = agree_on_rank(model.communicator, candidate=is_last_joiner)
        buffers = model.replica.buffers if model.forward_sync_buffers else []
        broadcast_tensors([*model.replica.parameters, *buffers], model.communicator, source)
        model.synchronizer.engine.exchange.divisor = float(model.communicator.world_size)
        if self._shadowed:
            # The last mean was for the others. The first gradient of the next epoch would be added to it.
            model.synchronizer.clear()


def set_divisor(model: JoinedModel, active: int) -> None:
    world_size = model.communicator.world_size
    model.synchronizer.engine.exchange.divisor = float(world_size if model.divide_by_initial_world_size else active)
