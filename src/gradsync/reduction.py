"""What ranks send of a bucket: see :mod:`gradsync.core.reduction`."""

from gradsync.core.reduction import (
    Auto,
    Cast,
    CommHook,
    Compressing,
    ErrorFeedback,
    GradBucket,
    LowRank,
    Mean,
    Quantize,
    Reduction,
    ScatteredMean,
    Sign,
    TopK,
    reduction_by_name,
)

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
