"""Optimizers whose bytes travel behind the next forward: shared out over the ranks, or whole on each of them."""

from gradsync.optim.sharded.optimizer import ShardedOptimizer
from gradsync.optim.sharded.overlapped import OverlappedOptimizer

__all__ = ["OverlappedOptimizer", "ShardedOptimizer"]
