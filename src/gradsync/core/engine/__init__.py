"""The engine from ``backward()`` to averaged gradients: autograd hooks, the bucket pipeline, work between backwards.

Stages 1, 3 and 5 on the path of a gradient. ``ready_hooks`` listens to autograd, ``backward`` decides, ``pipeline``
starts and finishes buckets, ``synchronization`` is what all ranks do together, ``failed_backwards`` handles failures,
and ``synchronizer`` is the object that wrappers hold.
"""

from gradsync.core.engine.fingerprints import Fingerprints
from gradsync.core.engine.keeper import ParameterKeeper
from gradsync.core.engine.observer import Observer
from gradsync.core.engine.options import SynchronizerOptions
from gradsync.core.engine.policy import BucketSize, PolicySettings, Schedule, SyncPolicy
from gradsync.core.engine.synchronizer import Synchronizer, synchronizer_of

__all__ = [
    "BucketSize",
    "Fingerprints",
    "Observer",
    "ParameterKeeper",
    "PolicySettings",
    "Schedule",
    "SyncPolicy",
    "Synchronizer",
    "SynchronizerOptions",
    "synchronizer_of",
]
