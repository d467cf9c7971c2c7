"""The exact mean: on every rank by one all-reduce per bucket, or each rank's share of it by a reduce-scatter.

A reduce-scatter is half of an all-reduce. The other half is an all-gather. In an all-reduce it carries gradients; where
an optimizer updates every rank's share, it carries new parameters, later.
"""

import torch

from gradsync.communicator import Communicator, Handle, HandleGroup, HandleWithFinish, ReduceOp
from gradsync.core.bucket import Bucket
from gradsync.core.reduction.base import Reduction
from gradsync.core.reduction.quantize import Cast

__all__ = ["Mean", "ScatteredMean", "collective_divides"]


class Mean(Reduction):
    """The sum over the ranks divided by the divisor, in the gradients' own precision.

    The division needs no extra pass: the collective does it where the backend can (NCCL), otherwise it is folded into
    the copy that gathers the gradients into the bucket. Dividing before summing also keeps float16 sums in range.
    """

    carries_tail = True

    def __repr__(self) -> str:
        return "Mean()"

    def prescale(self, bucket: Bucket, communicator: Communicator, divisor: float) -> float:
        return 1.0 if collective_divides(bucket, communicator, divisor) else 1.0 / divisor

    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        op: ReduceOp = "average" if collective_divides(bucket, communicator, divisor) else "sum"
        flat, piece = bucket.flat, bucket.plan.piece
        if flat.numel() <= piece:
            return communicator.all_reduce(flat, op)
        return HandleGroup([communicator.all_reduce(part, op) for part in flat.split(piece)])


def collective_divides(bucket: Bucket, communicator: Communicator, divisor: float) -> bool:
    """Whether the collective divides, so that gradients are gathered unscaled."""
    # Not with a single rank: NCCL would run over the whole bucket to divide it by one.
    return divisor == communicator.world_size > 1 and communicator.averages(bucket.plan.device)


class ScatteredMean(Reduction):
    """The sum over the ranks divided by the divisor, in this rank's share of the bucket.

    Gradients are sent and summed in ``dtype``, by default their own, over ``communicator`` if one is given (it must
    have the same ranks), else over the engine's.
    """

    carries_tail = False
    scatters = True

    def __init__(self, dtype: torch.dtype | None = None, communicator: Communicator | None = None) -> None:
        self.dtype, self._communicator = dtype, communicator

    def __repr__(self) -> str:
        return "ScatteredMean()" if self.dtype is None else f"ScatteredMean({self.dtype})"

    @property
    def whole(self) -> Reduction:
        """The same reduction of every gradient on every rank: what a wrapper without a sharded optimizer uses."""
        return Mean() if self.dtype is None else Cast(self.dtype)

    def prescale(self, bucket: Bucket, communicator: Communicator, divisor: float) -> float:
        return 1.0 if collective_divides(bucket, communicator, divisor) else 1.0 / divisor

    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        op: ReduceOp = "average" if collective_divides(bucket, communicator, divisor) else "sum"
        chosen = communicator if self._communicator is None else self._communicator
        payload = bucket.flat[: bucket.plan.payload]
        own = bucket.plan.share_of(communicator.rank)
        if self.dtype is None or self.dtype == payload.dtype:
            return chosen.reduce_scatter(payload[own], payload, op)
        cast = payload.to(self.dtype)
        return HandleWithFinish(chosen.reduce_scatter(cast[own], cast, op), lambda: payload[own].copy_(cast[own]))
