"""What is put on the wire: one small class per way of reducing a bucket, all behind :class:`Reduction`."""

from gradsync.reduction.base import Reduction
from gradsync.reduction.cast import Cast
from gradsync.reduction.comm_hook import CommHook, GradBucket
from gradsync.reduction.mean import Mean
from gradsync.reduction.scattered import ScatteredMean

__all__ = ["Cast", "CommHook", "GradBucket", "Mean", "Reduction", "ScatteredMean"]
