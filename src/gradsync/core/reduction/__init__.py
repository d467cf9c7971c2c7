"""Gradient reductions: one small class per way of reducing a bucket, all behind :class:`Reduction`."""

from gradsync.core.reduction.auto import Auto
from gradsync.core.reduction.base import Reduction
from gradsync.core.reduction.cast import Cast
from gradsync.core.reduction.comm_hook import CommHook, GradBucket
from gradsync.core.reduction.compressing import Compressing
from gradsync.core.reduction.error_feedback import ErrorFeedback
from gradsync.core.reduction.low_rank import LowRank
from gradsync.core.reduction.mean import Mean
from gradsync.core.reduction.names import reduction_by_name
from gradsync.core.reduction.quantize import Quantize, Sign
from gradsync.core.reduction.scattered import ScatteredMean
from gradsync.core.reduction.top_k import TopK

__all__ = [
    "Auto",
    "Cast",
    "CommHook",
    "Compressing",
    "ErrorFeedback",
    "GradBucket",
    "LowRank",
    "Mean",
    "Quantize",
    "Reduction",
    "ScatteredMean",
    "Sign",
    "TopK",
    "reduction_by_name",
]
