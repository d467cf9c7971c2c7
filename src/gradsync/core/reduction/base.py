"""The ``Reduction`` interface, which :class:`~gradsync.core.reduction.mean.Mean` documents by example.

:class:`Compressing` is the base class of lossy ones: they send fewer bytes, and account exactly for what is
lost. The sum over the ranks of the inputs is the result plus the sum over the ranks of what was ``lost``, but for the
rounding of these sums in float32, or in float64 for float64 gradients. Because of this rule,
:class:`~gradsync.core.reduction.error_feedback.ErrorFeedback` can add the lost part to the next window; the tests check
it for each reduction.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator, Handle
from gradsync.core.bucket import Bucket, BucketLayout
from gradsync.core.bucket.layout import ParameterSpec

__all__ = ["Compressing", "Reduction", "sends_nothing", "wide_values"]


@runtime_checkable
class Reduction(Protocol):
    """Turns a bucket of local gradients into the bucket of their mean over the ranks.

    One object serves all buckets of a model. It is called in the same order on all ranks. Derived classes need only
    :attr:`carries_tail`, :meth:`prescale` and :meth:`start`; the rest is for those with state.

    [Note: state of a reduction] Buckets are rebuilt when ranks agree on a different order of gradients, when better
    sizes are found, or when parameters begin or cease to be trained. So state (residuals, factors) belongs to
    parameters: key it by ``bucket.specs[slot].name``. :meth:`rebuilt` tells when anything kept by the index or the
    shape of a bucket has become invalid. State that cannot be split by parameter declares this with
    :attr:`keeps_layout`.
    """

    @property
    def carries_tail(self) -> bool:
        """Whether :meth:`start` sends :attr:`Bucket.flat`, tail included, so that flags come out zero or positive.

        For a reduction that would distort them, return False; the engine then sends the tail in a small collective.
        """

    @property
    def scatters(self) -> bool:
        """Whether each rank gets the mean of only its own share of the bucket, :meth:`Bucket.share`.

        Then payloads divide into equal shares, the rest of the bucket is meaningless afterwards, and a sharded
        optimizer uses the share. Tails are summed on all ranks all the same.
        """
        return False

    @property
    def keeps_layout(self) -> bool:
        """Whether there is state that would become invalid if buckets were rebuilt. The same on all ranks.

        Then neither a different order of gradients nor better bucket sizes are a reason to do so, once the order has
        been learned in the first window.
        """
        return False

    def unit(self, ranks: int) -> int:
        """The number of elements that belong together: payloads are padded to a multiple of it, which saves copies."""
        return 1

    def examine(self, specs: Sequence[ParameterSpec]) -> None:
        """Raise ConfigurationError for parameters that the reduction cannot handle. Called once, when it is set."""
        return

    def reconsider(self, window: int, buckets: Sequence[Bucket], communicator: Communicator) -> bool:
        """Switch to a different reduction, if this one can: True if it has.

        Then buckets are rebuilt, and all properties of the reduction read again. Called on all ranks alike while they
        negotiate before the first bucket of ``window``; collectives are allowed here.
        """
        return False

    def prescale(self, bucket: Bucket, communicator: Communicator, divisor: float) -> float:
        """The factor by which gradients are multiplied while they are gathered, before :meth:`start`."""

    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        """Start reducing the bucket, and return a handle at once. After its ``wait()`` the bucket holds the mean.

        What was gathered is already multiplied by :meth:`prescale`: with ``1 / divisor`` only the sum over ranks
        remains to be computed; with 1 it must be divided by ``divisor``, too.
        """

    def window_ended(self, *, succeeded: bool, correction: float | torch.Tensor = 1.0) -> None:
        """Commit or drop what was prepared, now that all buckets of a window have ended.

        Unless it ``succeeded`` on all ranks, the means are worthless, and state must be what it was before the window.

        ``correction`` is what the means were multiplied by after they had come: weights of a window are known late. On
        an accelerator the end is known late, too, but always before a bucket of the next window starts.
        """
        return

    def rescaled(self, factor: float | torch.Tensor) -> None:
        """Adapt to a change of the loss scale: later gradients are ``factor`` times as large as they would have been.

        Called between two windows; multiply what is kept of earlier gradients by it.
        """
        return

    def rebuilt(self, layout: BucketLayout) -> None:
        """Adapt to buckets that were built or rebuilt; indices and shapes are those of ``layout`` from now on."""
        return

    def state_dict(self) -> dict[str, Any]:
        """This rank's state as plain values and tensors, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the saved state."""
        return


class Compressing(Reduction):
    """Base class of lossy reductions: they divide before sending, so that what is lost is a part of the mean.

    Derived classes implement :meth:`send`. It would not preserve flags and votes, so these are sent separately.
    """

    carries_tail = False

    def examine(self, specs: Sequence[ParameterSpec]) -> None:
        for spec in specs:
            if not spec.bucket_dtype.is_floating_point:
                raise ConfigurationError(
                    f"{self!r} compresses floating-point gradients, and {spec.name!r} is of {spec.dtype}. Use the "
                    "exact mean for this model"
                )

    def prescale(self, bucket: Bucket, communicator: Communicator, divisor: float) -> float:
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
        """Sum ``values`` over the ranks, in place, with the same bits on all of them.

        ``values`` has the length of the bucket's payload. ``lost`` gets the part of this rank's values that is not in
        the result, before the handle is done.
        """


def sends_nothing(bucket: Bucket, communicator: Communicator) -> bool:
    """Whether there is no other rank, or nothing to send: only parameters without elements."""
    return communicator.world_size == 1 or not bucket.payload.numel()


def wide_values(bucket: Bucket) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """The bucket's payload, in float32 at least for computing, and a function that copies it back if it is a copy."""
    payload = bucket.payload.data
    if payload.dtype in (torch.float32, torch.float64):
        return payload, None
    values = payload.float()

    def put_back() -> None:
        payload.copy_(values)

    return values, put_back
