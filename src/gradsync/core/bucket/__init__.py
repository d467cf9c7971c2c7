"""Gradient buckets: their plans, their memory, their sizes and their order.

Stage 2 on the path of a gradient. ``layout`` is pure data; a ``bucket`` is memory for one plan of it, cut into
``chunk``\\ s that are gathered at once; ``arrangement`` makes buckets from the agreed order of gradients, with
``sizes`` that are estimated and tried. Nothing here starts a collective.
"""

from gradsync.core.bucket.bucket import Bucket
from gradsync.core.bucket.layout import BucketCaps, BucketLayout, BucketPlan, ParameterSpec, plan_layout

__all__ = [
    "Bucket",
    "BucketCaps",
    "BucketLayout",
    "BucketPlan",
    "ParameterSpec",
    "plan_layout",
]
