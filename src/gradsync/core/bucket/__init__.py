"""Where gradients lie: plans of buckets, the buckets themselves, and how large and in which order they are.

Stop 2 of a gradient's walk. ``layout`` is pure data; a ``bucket`` is memory for one plan of it, cut into ``chunk``\\ s
that are gathered at once; ``arrangement`` makes buckets from the agreed ``order``, with sizes that ``cost_model``
guesses and the ``tuner`` tries.
"""

from gradsync.core.bucket.bucket import Bucket
from gradsync.core.bucket.layout import BucketCaps, BucketLayout, BucketPlan, ParameterSpec, Slot, plan_layout

__all__ = [
    "Bucket",
    "BucketCaps",
    "BucketLayout",
    "BucketPlan",
    "ParameterSpec",
    "Slot",
    "plan_layout",
]
