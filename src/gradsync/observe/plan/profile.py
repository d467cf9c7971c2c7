"""What one rank does in a step without the others: its compute time, and when each bucket is ready and needed.

::

    forward   0 ──── need of the last bucket … need of the first ────▶ forward
    backward  0 ──── ready of the first bucket … ready of the last ──▶ backward

Buckets are in the order in which they start. What is ready last is mostly needed first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradsync.base.errors import ConfigurationError
from gradsync.core.bucket.layout import BucketCaps

__all__ = ["BucketProfile", "StepProfile"]


@dataclass(frozen=True, kw_only=True)
class BucketProfile:
    """Gradients that cross the wire together. ``ready`` is in seconds since the last backward of a window began, with
    nothing in its way; ``need`` in seconds since a forward began: when the first of its parameters is used."""

    index: int
    nbytes: int
    ready: float
    need: float = 0.0

    def __post_init__(self) -> None:
        if self.nbytes < 0 or not (math.isfinite(self.ready) and self.ready >= 0 and self.need >= 0):
            raise ConfigurationError(
                f"a bucket has bytes, and times from 0 on; got nbytes={self.nbytes}, ready={self.ready}, "
                f"need={self.need} for bucket {self.index}"
            )


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """The step of one rank, in seconds: ``data``, ``forward`` and ``backward`` of one micro-batch, and ``optimizer``
    of a window. ``micro_batches`` is how many a window had when this was measured."""

    forward: float
    backward: float
    data: float = 0.0
    optimizer: float = 0.0
    buckets: tuple[BucketProfile, ...] = ()
    micro_batches: int = 1

    def __post_init__(self) -> None:
        parts = {name: getattr(self, name) for name in ("data", "forward", "backward", "optimizer")}
        wrong = [f"{name}={value}" for name, value in parts.items() if not (math.isfinite(value) and value >= 0)]
        if wrong or self.micro_batches < 1:
            raise ConfigurationError(
                f"a step has parts of 0 seconds or more, and at least one micro-batch; got {', '.join(wrong)}"
                f"{'' if self.micro_batches >= 1 else f' micro_batches={self.micro_batches}'}"
            )

    @property
    def nbytes(self) -> int:
        """Of all gradients."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def compute(self) -> float:
        """What a window takes without a wire."""
        return self.micro_batches * (self.data + self.forward + self.backward) + self.optimizer

    def slowed(self, factor: float, *, data: float = 1.0) -> "StepProfile":
        """A rank that takes that many times as long to compute, and ``data`` times as long to load."""
        buckets = tuple(replace(each, ready=each.ready * factor, need=each.need * factor) for each in self.buckets)
        return replace(
            self,
            data=self.data * data,
            forward=self.forward * factor,
            backward=self.backward * factor,
            optimizer=self.optimizer * factor,
            buckets=buckets,
        )

    def accumulating(self, micro_batches: int) -> "StepProfile":
        """The same micro-batches, so many of them in a window."""
        return replace(self, micro_batches=micro_batches)

    def in_buckets(self, caps: BucketCaps | int) -> "StepProfile":
        """The same gradients in other buckets, as the engine lays them out: neighbours together up to the cap.

        What is there is taken as the smallest there is. It may be single parameters, which the engine does not cut
        either; or buckets of a recording, and then smaller ones are had by :meth:`cut`.
        """
        if isinstance(caps, int):
            caps = BucketCaps.uniform(caps)
        pieces = list(self.buckets[::-1] if caps.from_the_end else self.buckets)
        groups: list[list[BucketProfile]] = []
        used = 0
        for piece in pieces:
            if groups and used + piece.nbytes <= caps.cap(len(groups) - 1):
                groups[-1].append(piece)
                used += piece.nbytes
            else:
                groups.append([piece])
                used = piece.nbytes
        return replace(self, buckets=_joined(groups[::-1] if caps.from_the_end else groups))

    def cut(self, most: int) -> "StepProfile":
        """The same gradients in pieces of at most so many bytes, which become ready one after the other between the
        bucket before and their own. For recordings, which know no more of what is inside a bucket."""
        pieces: list[BucketProfile] = []
        before, later = 0.0, self.forward
        for bucket in self.buckets:
            number = max(1, -(-bucket.nbytes // most))
            reached = max(before, bucket.ready)
            needed = min(later, bucket.need)
            for place in range(1, number + 1):
                share = place / number
                pieces.append(
                    BucketProfile(
                        index=len(pieces),
                        nbytes=bucket.nbytes * place // number - bucket.nbytes * (place - 1) // number,
                        ready=before + (reached - before) * share,
                        need=later - (later - needed) * share,
                    )
                )
            before, later = reached, needed
        return replace(self, buckets=tuple(pieces))


def _joined(groups: Sequence[Sequence[BucketProfile]]) -> tuple[BucketProfile, ...]:
    return tuple(
        BucketProfile(
            index=index,
            nbytes=sum(each.nbytes for each in group),
            ready=max(each.ready for each in group),
            need=min(each.need for each in group),
        )
        for index, group in enumerate(groups)
    )
