"""What is put on the wire: the interface that :class:`~gradsync.reduction.mean.Mean` documents by example."""

from typing import Protocol, runtime_checkable

from gradsync.bucket.bucket import Bucket
from gradsync.communicator import Communicator, Handle

__all__ = ["Reduction"]


@runtime_checkable
class Reduction(Protocol):
    """Turns a bucket of local gradients into the bucket of their mean over the ranks.

    One object serves all buckets of a model and may keep state per bucket index. It is called in the same order on
    all ranks.
    """

    @property
    def carries_tail(self) -> bool:
        """Whether :meth:`start` sends :meth:`Bucket.wire`, tail included, so that flags come out zero or positive.

        A reduction that would distort them says False; the engine then sends the tail in a small collective.
        """

    def landing_scale(self, bucket: Bucket, communicator: Communicator, divisor: float) -> float:
        """What gradients are multiplied with while they are gathered, before :meth:`start`."""

    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        """Put the bucket on the wire. After ``wait()`` it holds the sum over ranks divided by ``divisor``."""
