"""``join``: ranks whose data ran out shadow the collectives of those that go on (torch's ``Join`` protocol).

[Note: forwards in step] In a join every forward of a rank with data is matched with one of every other rank, and a rank
that has left follows along. So ranks with data must run equally many forwards between two synchronizations. A
micro-batch of ``accumulate()`` without a forward stands in for one, but nothing stands in for a micro-batch that does
not exist. Ranks count what each is about to do along with who has data: where some end their window and some do not,
all of them raise.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook

from gradsync.base.errors import MisuseError
from gradsync.communicator import Communicator
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.parallel.buffer_sync import BufferSync
from gradsync.parallel.replica import agree_on_rank, broadcast_tensors

__all__ = ["GradientJoinHook", "UnevenInputs"]


@dataclass(frozen=True, kw_only=True)
class Turnout:
    """What all ranks report about a forward: how many have data, will synchronize (``active``), and are framed by
    ``accumulate()``."""

    present: int
    active: int
    framed: int

    @classmethod
    def count(
        cls, communicator: Communicator, *, has_data: bool = False, synchronizes: bool = False, framed: bool = False
    ) -> "Turnout":
        """Sum the reports of all ranks; by default this one has left the loop. Collective."""
        counts = torch.tensor([int(has_data), int(synchronizes), int(framed)], device=communicator.device)
        communicator.all_reduce(counts).wait()
        present, active, inside = counts.tolist()
        return cls(present=present, active=active, framed=inside)

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


class UnevenInputs(BufferSync):
    """Mixin of the wrapper for ranks that run out of data at different times: ``join`` and the collectives of a
    forward."""

    synchronizer: Synchronizer
    process_group: Any
    device: torch.device
    divide_by_initial_world_size: bool

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
        if self.synchronizer.engine.store.has_sharing_client:
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
        turnout = Turnout.count(
            self.communicator,
            has_data=True,
            synchronizes=learning and synchronizer.enabled,
            framed=synchronizer.in_block,
        )
        turnout.require_in_step(synchronizer)
        self._divide_by(turnout.active)

    def _divide_by(self, active: int) -> None:
        count = self.communicator.world_size if self.divide_by_initial_world_size else active
        self.synchronizer.engine.exchange.divisor = float(count)

    def _miss_forward(self) -> bool:
        """In a join a rank without a forward takes part in what the others do: they count which ranks have data."""
        if not self._join_config.enable:
            return False
        self._prepare_ranks(learning=True)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        self.require_forward_param_sync = self.synchronizer.enabled
        return True


class GradientJoinHook(JoinHook):
    """What a rank does repeatedly after its own data has run out."""

    def __init__(self, model: "UnevenInputs") -> None:
        super().__init__()
        self._model = model
        self._shadowed = False

    def main_hook(self) -> None:
        """Shadow one iteration of the ranks that still have data: their buffers, their count, their gradients."""
        model = self._model
        if model._check_sync_bufs_pre_fwd():
            model._sync_buffers(has_data=False)
        turnout = Turnout.count(model.communicator)
        turnout.require_in_step(model.synchronizer)
        if model._check_sync_bufs_post_fwd():
            model._sync_buffers(has_data=False)
        # As in a rank with data: after a backward without synchronization the next forward broadcasts nothing.
        model.require_forward_param_sync = turnout.active > 0
        if turnout.active:
            model._divide_by(turnout.active)
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
