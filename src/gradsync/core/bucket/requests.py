"""Requests of one rank to all others, sent at the end of the last bucket.

Sometimes only one rank knows that a parameter is trained again, that it counts micro-batches in a window where none did
before, or that its own gradients must not be used. It must not start a collective for that: the others would not. So
each kind of request has a place in the ballot, a rank that needs it sets a mark there, and all ranks read the same sum
and do the same after the buckets.

On an accelerator reading would make the host wait, so only those ranks read at once that have a request, or have
nothing else to do. They mark that, too, and every rank marks one more place: where both sums are equal, all ranks know
the requests and can carry them out.

[Note: late failures] For the same reason ranks learn of a failed backward only in the next window, and raise at its
end. The rank that failed does not raise again. To keep replicas equal, no rank may step on that window, so the ranks
that are about to raise mark it as late.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

__all__ = ["Requests"]


@dataclass(frozen=True, kw_only=True)
class Requests:
    """The requests to carry out after the buckets. ``weights``: sums of weights; ``trained``: which parameters are
    trained; ``vetoed``: which ranks reject the window, and why. ``late``: no rank steps on it;
    see [Note: late failures]. ``known``: this rank reads the ballot at once, or, if it was read, all ranks do."""

    weights: bool = False
    trained: bool = False
    vetoed: bool = False
    late: bool = False
    known: bool = True

    # How many places they take in the ballot, and which of them signals a veto.
    PLACES: ClassVar[int] = 6
    VETO: ClassVar[int] = -5
    # Places of what all ranks must know, and of the ranks that confirm that they do; see
    # :mod:`gradsync.core.engine.step_gate`.
    LATE: ClassVar[int] = -6
    KNOWN: ClassVar[int] = -2
    EVERYBODY: ClassVar[int] = -1

    @classmethod
    def read(cls, ballot: Sequence[float]) -> Self:
        """The requests of all ranks, and whether all ranks know of them."""
        late, vetoed, weights, trained, reading, everybody = ballot[-cls.PLACES :]
        asked = {"weights": weights > 0, "trained": trained > 0, "vetoed": vetoed > 0}
        return cls(**asked, late=late > 0, known=reading == everybody)

    @property
    def unheard(self) -> bool:
        """Whether there is a request that not all ranks know of."""
        return (self.weights or self.trained or self.vetoed) and not self.known

    @property
    def marked(self) -> list[int]:
        """The places that this rank marks, counted from the end of the ballot: every rank marks the last one."""
        asked = (
            (self.LATE, self.late),
            (self.VETO, self.vetoed),
            (-4, self.weights),
            (-3, self.trained),
            (self.KNOWN, self.known),
            (self.EVERYBODY, True),
        )
        return [place for place, is_marked in asked if is_marked]
