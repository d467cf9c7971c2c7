"""What a rank asks all others for, at the end of the last bucket.

A rank alone may know that a parameter is trained again, or that it counts micro-batches in a window where nobody did
before. It must not start a collective for that: the others would not. So each such thing has a place in the ballot, a
rank that needs it puts a mark there, and all ranks read the same sum and do the same after the buckets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

__all__ = ["Requests"]


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What must follow the buckets. ``weights``: sums of weights; ``trained``: which parameters are trained."""

    weights: bool = False
    trained: bool = False

    # How many places they take in the ballot.
    PLACES: ClassVar[int] = 2

    @classmethod
    def read(cls, ballot: Sequence[float]) -> Self:
        """What any rank has asked for."""
        weights, trained = ballot[-cls.PLACES :]
        return cls(weights=weights > 0, trained=trained > 0)

    @property
    def marked(self) -> list[int]:
        """The places of what is asked for, counted from the end of the ballot."""
        return [place for place, asked in ((-2, self.weights), (-1, self.trained)) if asked]
