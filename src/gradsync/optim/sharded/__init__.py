"""Optimizers that communicate behind the next forward: sharded over the ranks, or whole on each of them."""

from gradsync.optim.sharded.optimizer import ShardedOptimizer
from gradsync.optim.sharded.overlapped import OverlappedOptimizer

__all__ = ["OverlappedOptimizer", "ShardedOptimizer"]
