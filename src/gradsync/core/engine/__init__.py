"""The engine from ``backward()`` to averaged gradients: autograd hooks, the bucket pipeline, work between backwards.

Stages 1, 3 and 5 on the path of a gradient; docs/architecture.md says which file does what.
"""

from gradsync.core.engine.observer import Observer
from gradsync.core.engine.policy import (
    BucketSize,
    ParameterKeeper,
    PolicySettings,
    Schedule,
    SynchronizerOptions,
    SyncPolicy,
)
from gradsync.core.engine.synchronizer import Synchronizer, synchronizer_of
from gradsync.core.window.replica_check import ReplicaCheck

__all__ = [
    "BucketSize",
    "Observer",
    "ParameterKeeper",
    "PolicySettings",
    "ReplicaCheck",
    "Schedule",
    "SyncPolicy",
    "Synchronizer",
    "SynchronizerOptions",
    "synchronizer_of",
]
