"""Base class of lossy reductions: they send fewer bytes, and account exactly for what is lost.

The loss is well defined. Every such reduction can state it to the last bit: the sum over the ranks of its inputs is the
result plus the sum over the ranks of what was ``lost``. Because of this rule,
:class:`~gradsync.core.reduction.error_feedback.ErrorFeedback` can add the lost part to the next window; the tests check
it for each reduction.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator, Handle
from gradsync.core.bucket import Bucket
from gradsync.core.bucket.layout import ParameterSpec
from gradsync.core.reduction.base import Reduction

__all__ = ["Compressing", "sends_nothing", "wide_values"]


class Compressing(Reduction):
    """Divides gradients before they are sent, so that what is lost is a part of the mean.

    Derived classes implement :meth:`send`. It would not preserve flags and votes, so these are sent separately.
    """

    carries_tail = False

    def examine(self, specs: Sequence[ParameterSpec]) -> None:
        for spec in specs:
            if not spec.wire_dtype.is_floating_point:
                raise ConfigurationError(
                    f"{self!r} compresses floating-point gradients, and {spec.name!r} is of {spec.dtype}. Use the "
                    "exact mean for this model"
                )

    def landing_scale(self, bucket: Bucket, communicator: Communicator, divisor: float) -> float:
        return 1.0 / divisor

    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        if sends_nothing(bucket, communicator):
            # A single rank already has its mean. For an empty bucket a collective must still run.
            return communicator.all_reduce(bucket.payload.data if bucket.payload.numel() else bucket.tail.new_zeros(1))
        values, put_back = wide_values(bucket)
        handle = self.send(values, bucket, communicator)
        return handle if put_back is None else handle.then(put_back)

    @abstractmethod
    def send(
        self, values: torch.Tensor, bucket: Bucket, communicator: Communicator, lost: torch.Tensor | None = None
    ) -> Handle:
        """Sum ``values``, which has the length of the bucket's payload, over the ranks, in place, with the same bits on
        all of them.

        ``lost`` gets the part of this rank's values that is not in the result, before the handle is done.
        """


def sends_nothing(bucket: Bucket, communicator: Communicator) -> bool:
    """Whether there is no other rank, or nothing to send: only parameters without elements."""
    return communicator.world_size == 1 or not bucket.payload.numel()


def wide_values(bucket: Bucket) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """The bucket's payload in float32 for computing, and a function that copies it back if it is a copy."""
    payload = bucket.payload.data
    if payload.dtype == torch.float32:
        return payload, None
    values = payload.float()

    def put_back() -> None:
        payload.copy_(values)

    return values, put_back
