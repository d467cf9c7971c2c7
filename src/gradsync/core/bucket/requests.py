"""What a rank asks all others for, at the end of the last bucket.

A rank alone may know that a parameter is trained again, that it counts micro-batches in a window where nobody did
before, or that its own gradients are not to be used. It must not start a collective for that: the others would not. So
each such thing has a place in the ballot, a rank that needs it puts a mark there, and all ranks read the same sum and
do the same after the buckets.

On an accelerator reading would stop the host, so only those read at once that have asked, or have nothing else to do.
They mark that, too, and every rank marks one place more: where both have the same sum, all ranks know what was asked
for, and can do it.

[Note: late failures] For the same reason ranks hear there of a failed backward only in the next window, and raise at
its end. The rank that failed does not raise again. For replicas to stay equal nobody may step on that window, so those
who are about to raise mark it as late.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

__all__ = ["Requests"]


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What must follow the buckets. ``weights``: sums of weights; ``trained``: which parameters are trained;
    ``vetoed``: who does not want the window, and why. ``late``: nobody steps on it; see [Note: late failures].
    ``known``: this rank reads the ballot at once, or, of one that was read, all ranks do."""

    weights: bool = False
    trained: bool = False
    vetoed: bool = False
    late: bool = False
    known: bool = True

    # How many places they take in the ballot, and which of them says that there is a veto.
    PLACES: ClassVar[int] = 6
    VETO: ClassVar[int] = -5
    # Places of what all ranks must know of, and of those that say that they do; see
    # :mod:`gradsync.core.engine.step_gate`.
    LATE: ClassVar[int] = -6
    KNOWN: ClassVar[int] = -2
    EVERYBODY: ClassVar[int] = -1

    @classmethod
    def read(cls, ballot: Sequence[float]) -> Self:
        """What any rank has asked for, and whether all know of it."""
        late, vetoed, weights, trained, reading, everybody = ballot[-cls.PLACES :]
        asked = {"weights": weights > 0, "trained": trained > 0, "vetoed": vetoed > 0}
        return cls(**asked, late=late > 0, known=reading == everybody)

    @property
    def unheard(self) -> bool:
        """Whether something was asked for of which not all ranks know."""
        return (self.weights or self.trained or self.vetoed) and not self.known

    @property
    def marked(self) -> list[int]:
        """The places that this rank marks, counted from the end of the ballot: the last is everybody's."""
        asked = (
            (self.LATE, self.late),
            (self.VETO, self.vetoed),
            (-4, self.weights),
            (-3, self.trained),
            (self.KNOWN, self.known),
            (self.EVERYBODY, True),
        )
        return [place for place, is_marked in asked if is_marked]
