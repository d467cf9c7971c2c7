"""The plain mean: one all-reduce per bucket. Exact, and the model for every other reduction."""

from gradsync.communicator import Communicator, Handle, ReduceOp, Together
from gradsync.core.bucket import Bucket
from gradsync.core.reduction.base import Reduction

__all__ = ["Mean", "divides_on_the_wire"]


class Mean(Reduction):
    """The sum over the ranks divided by the divisor, in the gradients' own precision.

    The division needs no extra pass: the collective does it where the backend can (NCCL), otherwise it is folded into
    the copy that gathers the gradients into the bucket. Dividing before summing also keeps float16 sums in range.
    """

    carries_tail = True

    def __repr__(self) -> str:
        return "Mean()"

    def landing_scale(self, bucket: Bucket, communicator: Communicator, divisor: float) -> float:
        return 1.0 if divides_on_the_wire(bucket, communicator, divisor) else 1.0 / divisor

    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        op: ReduceOp = "average" if divides_on_the_wire(bucket, communicator, divisor) else "sum"
        wire, piece = bucket.wire, bucket.plan.piece
        if wire.numel() <= piece:
            return communicator.all_reduce(wire, op)
        return Together([communicator.all_reduce(part, op) for part in wire.split(piece)])


def divides_on_the_wire(bucket: Bucket, communicator: Communicator, divisor: float) -> bool:
    """Whether the collective divides, so that gradients are gathered unscaled."""
    # Not with a single rank: NCCL would run over the whole bucket to divide it by one.
    return divisor == communicator.world_size > 1 and communicator.averages(bucket.plan.device)
