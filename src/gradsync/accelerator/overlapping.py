"""Chooses the kind of a prepared optimizer: plain, sharded, or one whose means travel behind the next forward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch.optim import Optimizer

from gradsync.base.errors import ConfigurationError
from gradsync.optim.sharded import OverlappedOptimizer, ShardedOptimizer
from gradsync.optim.sharded.bucket_optimizer import BucketOptimizer, Synchronized
from gradsync.optim.sharded.mode import Mode

__all__ = ["Overlap", "Overlapping"]

# What the wire works behind: backward alone, the next forward too, or whatever is faster.
Overlap = Literal["backward", "next-forward", "auto"]


@dataclass(frozen=True, kw_only=True)
class Overlapping:
    """``shard_optimizer`` and ``overlap`` of an accelerator."""

    shards: bool = False
    overlap: Overlap | None = None

    def __post_init__(self) -> None:
        if self.overlap is not None and self.overlap not in get_args(Overlap):
            raise ConfigurationError(f"overlap must be one of {', '.join(get_args(Overlap))}, got {self.overlap!r}")
        if self.shards and self.overlap == "backward":
            raise ConfigurationError(
                "shard_optimizer=True and overlap='backward' exclude each other: new parameters of a sharded optimizer "
                "are gathered behind the next forward. Leave one of them out"
            )

    def apply(self, optimizer: Optimizer, models: Sequence[Synchronized]) -> Optimizer:
        """``optimizer`` of one of ``models``, as it was asked for."""
        mode: Mode = "auto" if self.overlap == "auto" else "next-forward"
        if isinstance(optimizer, BucketOptimizer) or not (self.shards or self.overlap in ("next-forward", "auto")):
            return optimizer
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owners = [each for each in models if not trained.isdisjoint(map(id, each.synchronizer.parameters))]
        if len(owners) != 1:
            asked = "shard_optimizer=True" if self.shards else f"overlap={self.overlap!r}"
            raise ConfigurationError(
                f"{asked} needs an optimizer of one prepared model, and this one has parameters of {len(owners)}. "
                "Prepare model and optimizer together, and give every model its own optimizer"
            )
        if self.shards:
            return ShardedOptimizer.of(optimizer, owners[0], mode)
        return OverlappedOptimizer(owners[0], optimizer, mode=mode)
