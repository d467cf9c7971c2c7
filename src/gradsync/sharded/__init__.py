"""An optimizer whose work and state are shared out over the ranks, and whose bytes travel behind the next forward."""

from gradsync.sharded.optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
