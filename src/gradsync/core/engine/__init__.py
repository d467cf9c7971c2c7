"""The engine from ``backward()`` to averaged gradients: autograd hooks, the bucket pipeline, work between backwards.

Stages 1, 3 and 5 on the path of a gradient; docs/architecture.md says which file does what.
"""

from gradsync.core.engine.policy import SyncPolicy
from gradsync.core.window.replica_check import ReplicaCheck

__all__ = ["ReplicaCheck", "SyncPolicy"]
