"""What is put on the wire: the interface that :class:`~gradsync.core.reduction.mean.Mean` documents by example."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from gradsync.communicator import Communicator, Handle
from gradsync.core.bucket import Bucket, BucketLayout
from gradsync.core.bucket.layout import ParameterSpec

__all__ = ["Reduction"]


@runtime_checkable
class Reduction(Protocol):
    """Turns a bucket of local gradients into the bucket of their mean over the ranks.

    One object serves all buckets of a model. It is called in the same order on all ranks. Classes that derive from this
    one need only :attr:`carries_tail`, :meth:`landing_scale` and :meth:`start`; the rest is for those with state.

    [Note: state of a reduction] Buckets are laid out anew when ranks agree on another order of gradients, when better
    sizes are found, or when parameters begin or cease to be trained. So state (residuals, factors) belongs to
    parameters: it is keyed by ``bucket.specs[slot].name``, and :meth:`rebuilt` tells when everything that was kept by
    the index or the shape of a bucket has lost its meaning. State that cannot be taken apart like that says so with
    :attr:`keeps_layout`.
    """

    @property
    def carries_tail(self) -> bool:
        """Whether :meth:`start` sends :attr:`Bucket.wire`, tail included, so that flags come out zero or positive.

        A reduction that would distort them says False; the engine then sends the tail in a small collective.
        """

    @property
    def scatters(self) -> bool:
        """Whether a rank gets the mean of its own share of the bucket only, :meth:`Bucket.share`.

        Then payloads divide into equal shares, what lies elsewhere in the bucket means nothing afterwards, and an
        optimizer of shares makes something of it. Tails are summed on all ranks all the same.
        """
        return False

    @property
    def keeps_layout(self) -> bool:
        """Whether there is state that would lose its meaning if buckets were laid out anew. The same on all ranks.

        Then neither another order of gradients nor better bucket sizes are a reason to do so, once the order has been
        learned in the first window.
        """
        return False

    def unit(self, ranks: int) -> int:
        """How many numbers belong together: buckets are filled up to a multiple of it, which spares copies."""
        return 1

    def examine(self, specs: Sequence[ParameterSpec]) -> None:
        """Raise ConfigurationError if it cannot serve a model of these parameters. Called once, when it is set."""
        return

    def reconsider(self, window: int, buckets: Sequence[Bucket], communicator: Communicator) -> bool:
        """Ranks meet before the first bucket of ``window``: True if buckets must be laid out anew, and the reduction
        be asked again for everything that is known of it. On all ranks alike; collectives are allowed here."""
        return False

    def landing_scale(self, bucket: Bucket, communicator: Communicator, divisor: float) -> float:
        """What gradients are multiplied with while they are gathered, before :meth:`start`."""

    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        """Put the bucket on the wire. After ``wait()`` it holds the sum over ranks divided by ``divisor``."""

    def ended(self, *, well: bool, correction: float | torch.Tensor = 1.0) -> None:
        """All buckets of a window have come to their end. Unless it ended ``well`` on all ranks, the means are
        worthless, and state must be what it was before the window.

        ``correction`` is what the means were multiplied with after they had come: weights of a window are known late.
        On an accelerator the end is known late, too, but always before a bucket of the next window starts.
        """
        return

    def rescaled(self, factor: float | torch.Tensor) -> None:
        """Gradients to come are ``factor`` times as large as they would have been: the scale of the loss has changed.

        Called between two windows; what is kept of earlier gradients is to be multiplied with it.
        """
        return

    def rebuilt(self, layout: BucketLayout) -> None:
        """Buckets were laid out, for the first time or anew; indices and shapes are those of ``layout`` from now on."""
        return

    def state_dict(self) -> dict[str, Any]:
        """This rank's state as plain values and tensors, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the state that was saved."""
        return
