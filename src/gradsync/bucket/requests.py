"""What a rank asks all others for, at the end of the last bucket.

A rank alone may know that a parameter is trained again, or that it counts micro-batches in a window where nobody did
before. It must not start a collective for that: the others would not. So each such thing has a place in the ballot, a
rank that needs it puts a mark there, and all ranks read the same sum and do the same after the buckets.

On an accelerator reading would stop the host, so only those read at once that have asked. That is enough where all
have: beside the requests there is a place that every rank marks, and what has the same sum was asked for by all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

__all__ = ["Requests"]


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What must follow the buckets. ``weights``: sums of weights; ``trained``: which parameters are trained.
    ``unanimous``: what any rank has asked for was asked for by all."""

    weights: bool = False
    trained: bool = False
    unanimous: bool = True

    # How many places they take in the ballot.
    PLACES: ClassVar[int] = 3

    @classmethod
    def read(cls, ballot: Sequence[float]) -> Self:
        """What any rank has asked for."""
        weights, trained, everybody = ballot[-cls.PLACES :]
        unanimous = {weights, trained} <= {0.0, everybody}
        return cls(weights=weights > 0, trained=trained > 0, unanimous=unanimous)

    def __bool__(self) -> bool:
        return self.weights or self.trained

    @property
    def marked(self) -> list[int]:
        """The places of what is asked for, counted from the end of the ballot, and the one that everybody marks."""
        return [-1, *(place for place, asked in ((-3, self.weights), (-2, self.trained)) if asked)]
