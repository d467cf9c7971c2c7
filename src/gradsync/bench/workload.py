"""The model every variant trains: a profile of layers whose computation is emulated, wrapped the same way for all."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from gradsync.bench.peers import Peer, Wrapped
from gradsync.bench.record import Cell
from gradsync.bench.statistics import wire_seconds
from gradsync.lab.emulated import EmulatedModel
from gradsync.lab.profile import Profile
from gradsync.lab.rate import Rate

__all__ = ["Workload"]

FLOAT_BYTES = 4
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A profile, and what is known of it before anything runs."""

    profile: Profile

    @property
    def nbytes(self) -> int:
        """Of the gradients."""
        return self.profile.parameters * FLOAT_BYTES

    def wrap(self, peer: Peer, *, window: int = 1) -> Wrapped:
        """The same weights for everyone."""
        torch.manual_seed(SEED)
        optimizer = partial(torch.optim.SGD, lr=1e-4, foreach=True)
        return peer.wrap(EmulatedModel(self.profile), optimizer, window=window)

    def wire_seconds(self, cell: Cell, *, synchronizations: int = 1) -> float:
        """What so many synchronizations of all gradients take, at least, on the links of the cell."""
        rate = None if cell.rate is None else Rate.parse(cell.rate).bytes_per_second
        return wire_seconds(self.nbytes, cell.ranks, rate) * synchronizations

    @staticmethod
    def forward(model: torch.nn.Module) -> torch.Tensor:
        """The gradients of rank r are r + 1 times those of rank 0, so that a mean differs from each of them."""
        loss: torch.Tensor = model(torch.tensor(float(dist.get_rank() + 1)))
        return loss
