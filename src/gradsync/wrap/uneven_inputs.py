"""``join``: ranks whose data ran out shadow the collectives of those that go on (torch's ``Join`` protocol)."""

from typing import Protocol

import torch
from torch.distributed.algorithms.join import JoinHook

from gradsync.communicator import Communicator
from gradsync.engine.synchronizer import Synchronizer
from gradsync.wrap.replica import Replica
from gradsync.wrap.replica_state import agree_on_rank, broadcast_tensors

__all__ = ["GradientJoinHook", "JoinedModel", "count_active", "set_divisor"]


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
    """What a rank does, over and over, after its own data has run out."""

    def __init__(self, model: JoinedModel) -> None:
        super().__init__()
        self._model = model
        self._shadowed = False

    def main_hook(self) -> None:
        """One iteration of the ranks that still have data: their buffers, their count, their gradients."""
        model = self._model
        if model._check_sync_bufs_pre_fwd():
            model._sync_buffers(has_data=False)
        active = count_active(model.communicator, active=False)
        if model._check_sync_bufs_post_fwd():
            model._sync_buffers(has_data=False)
        # As in a rank with data: after a backward without synchronization the next forward broadcasts nothing.
        model.require_forward_param_sync = active > 0
        if active:
            set_divisor(model, active)
            self._shadowed = True
            model.synchronizer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Everybody has run out: all take the final model of one that ran to the end."""
        model = self._model
        source = agree_on_rank(model.communicator, candidate=is_last_joiner)
        buffers = model.replica.buffers if model.forward_sync_buffers else []
        broadcast_tensors([*model.replica.parameters, *buffers], model.communicator, source)
        model.synchronizer.engine.divide_by(model.communicator.world_size)
        if self._shadowed:
            # The last mean was that of the others. The first gradient of the next epoch would be added to it.
            model.synchronizer.clear()


def set_divisor(model: JoinedModel, active: int) -> None:
    world_size = model.communicator.world_size
    model.synchronizer.engine.divide_by(world_size if model.divide_by_initial_world_size else active)


def count_active(communicator: Communicator, *, active: bool) -> int:
    """How many ranks have data and will synchronize this iteration. Collective."""
    count = torch.tensor([int(active)], device=communicator.device)
    communicator.all_reduce(count).wait()
    return int(count)
