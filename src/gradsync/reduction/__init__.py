"""What is put on the wire: one small class per way of reducing a bucket, all behind :class:`Reduction`."""

from gradsync.reduction.auto import Auto
from gradsync.reduction.base import Reduction
from gradsync.reduction.cast import Cast
from gradsync.reduction.comm_hook import CommHook, GradBucket
from gradsync.reduction.compressing import Compressing
from gradsync.reduction.error_feedback import ErrorFeedback
from gradsync.reduction.low_rank import LowRank
from gradsync.reduction.mean import Mean
from gradsync.reduction.names import reduction_by_name
from gradsync.reduction.quantize import Quantize, Sign
from gradsync.reduction.scattered import ScatteredMean
from gradsync.reduction.top_k import TopK

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
