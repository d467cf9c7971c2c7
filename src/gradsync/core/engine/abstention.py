"""Enforces that a rank abstains at most once per window: anything later belongs to the next window, or is refused.

[Note: the same window] A rank that abstains takes part at once, where its backward would have: so the other ranks have
ended the window, too. If the rank abstained a second time, or ran the backward of its forward after all, that would
count as its part in their next window, and from then on it would be one window ahead. No rank can tell alone whether a
further ``abstain()`` is meant for the same window or the next. So there must be evidence that the window has ended here
too: a step, gradients that were zeroed, a forward, or a block of ``accumulate()``.
"""

from collections.abc import Iterable, Sequence

import torch

from gradsync.base.errors import MisuseError
from gradsync.core.bucket import Bucket
from gradsync.core.window import TamperCheck

__all__ = ["Abstention", "Offer"]


class Offer:
    """The forwards of this rank until it abstains. Their backwards are expected unless the offer is withdrawn."""

    __slots__ = ("withdrawn",)

    def __init__(self) -> None:
        self.withdrawn = False


class Abstention:
    """Records that this rank has abstained from a window, until there is evidence that the window has ended here."""

    def __init__(self) -> None:
        self.offer = Offer()
        # Whether the last failure was this rank's abstention, or it has abstained after that failure.
        self.answers_failure = False
        self._stands = False
        # What the window has left behind, to detect that it is zeroed.
        self._left = TamperCheck()

    def told(self, buckets: Sequence[Bucket], outside: Iterable[torch.nn.Parameter]) -> None:
        """All ranks know of it, and the window is over for them."""
        self.offer.withdrawn = True
        self.offer = Offer()
        self._stands = self.answers_failure = True
        self._left.note(buckets, outside)

    def end(self) -> None:
        """Everything from here on belongs to a different window."""
        self._stands = False
        self._left.forget()

    @property
    def stands(self) -> bool:
        """Whether this rank may no longer contribute to the window."""
        if self._stands and (self._left.has_lost or self._left.has_changed):
            self.end()
        return self._stands

    def refuse_another(self) -> None:
        """Raise if this rank has already abstained."""
        if self.stands:
            raise MisuseError(
                "abstain() was called a second time in one window, of which all ranks have heard by the first, or by "
                "an error in backward. If it is meant for the next window, end this one first: call optimizer.step() "
                "on this rank as on the others (it changes nothing where the window is skipped), or zero_grad()"
            )

    def refuse_backward(self) -> None:
        """Refuse the backward of a forward that ran before the abstention."""
        raise MisuseError(
            "a backward has reached a forward from which this rank has abstained: abstain() stands in the place of the "
            "backward, and the other ranks have ended the window by now. Drop this loss, and end the window on this "
            "rank as on the others, with optimizer.step() or zero_grad()"
        )
