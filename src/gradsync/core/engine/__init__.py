"""The engine from ``backward()`` to averaged gradients: autograd hooks, the bucket pipeline, work between backwards.

Stages 1, 3 and 5 on the path of a gradient. ``ready_hooks`` listens to autograd, ``backward`` decides, ``pipeline``
starts and finishes buckets, ``exchange`` is what all ranks do together, and ``synchronizer`` is what wrappers hold.
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
