"""From ``backward()`` to averaged gradients: autograd's hooks, the pipeline of buckets, what lies between backwards.

Stops 1, 3 and 5 of a gradient's walk. ``ready_hooks`` hears autograd, ``backward`` decides, ``pipeline`` starts and
finishes buckets, ``synchronization`` is what all ranks do together, ``failed_backwards`` what is done where that does
not go well, ``synchronizer`` is what wrappers hold.
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
