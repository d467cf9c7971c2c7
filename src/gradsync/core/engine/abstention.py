"""A rank abstains once a window: what follows is of another window, or refused.

[Note: the same window] Who abstains has said what it has to say, and takes part at once where its backward would have:
the other ranks have ended the window, too. If the rank abstained a second time, or ran the backward of its forward
after all, that would be its part in their next window, and from there on it would be one ahead of them. No rank knows
alone whether a further ``abstain()`` is meant for the same window or for the next. So it must be seen that the window
has ended here, too: by a step, by gradients that were zeroed, by a forward, by a block of ``accumulate()``.
"""

from collections.abc import Iterable, Sequence

import torch

from gradsync.base.errors import MisuseError
from gradsync.core.bucket import Bucket
from gradsync.core.window import TamperCheck

__all__ = ["Abstention", "Offer"]


class Offer:
    """The forwards of this rank until it abstains. Their backwards are expected, as long as it is not withdrawn."""

    __slots__ = ("withdrawn",)

    def __init__(self) -> None:
        self.withdrawn = False


class Abstention:
    """That this rank has abstained from a window, until it is seen that the window has ended here."""

    def __init__(self) -> None:
        self.offer = Offer()
        # Whether the last failure was this rank's abstention, or it has abstained after it.
        self.answers_failure = False
        self._stands = False
        # What the window has left, by which it is seen that somebody zeroes it.
        self._left = TamperCheck()

    def told(self, buckets: Sequence[Bucket], outside: Iterable[torch.nn.Parameter]) -> None:
        """All ranks have heard of it, and the window is over for them."""
        self.offer.withdrawn = True
        self.offer = Offer()
        self._stands = self.answers_failure = True
        self._left.note(buckets, outside)

    def end(self) -> None:
        """Whatever comes now is of another window."""
        self._stands = False
        self._left.forget()

    @property
    def stands(self) -> bool:
        """Whether this rank has nothing more to say in the window."""
        if self._stands and (self._left.has_lost or self._left.has_changed):
            self.end()
        return self._stands

    def refuse_another(self) -> None:
        """Raise if this rank has abstained already."""
        if self.stands:
            raise MisuseError(
                "abstain() was called a second time in one window, of which all ranks have heard by the first, or by "
                "an error in backward. If it is meant for the next window, end this one first: call optimizer.step() "
                "on this rank as on the others (it changes nothing where the window is skipped), or zero_grad()"
            )

    def refuse_backward(self) -> None:
        """A backward has come of a forward from before."""
        raise MisuseError(
            "a backward has reached a forward from which this rank has abstained: abstain() stands in the place of the "
            "backward, and the other ranks have ended the window by now. Drop this loss, and end the window on this "
            "rank as on the others, with optimizer.step() or zero_grad()"
        )
