"""What one rank does in a step without the others: its compute time, and when each bucket is ready and needed; and by
how much ranks differ.

::

    forward   0 ──── need of the last bucket … need of the first ────▶ forward
    backward  0 ──── ready of the first bucket … ready of the last ──▶ backward

Buckets are in the order in which they start. What is ready last is mostly needed first.

A step waits for its slowest rank. If each rank's compute is multiplied by a factor drawn from a distribution F, the
slowest of p ranks has the distribution F^p, whose quantiles are those of F at q^(1/p): no rank needs to be drawn, and
ten thousand cost no more than two.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradsync.base.errors import ConfigurationError

__all__ = ["BucketProfile", "Jitter", "StepProfile", "steady_straggler"]

NORMAL = statistics.NormalDist()
# What a rank draws at most: a factor beyond it is no jitter but a fault.
MOST = 20.0
# A rank is slow for good, and not by chance, if it takes STEADY times as long as the median of the others, in a share
# MOSTLY of at least FEWEST_STEPS steps. Nine of ten tosses of a fair coin fall alike once in 50 tries, and here each
# has to be a tenth apart, too.
STEADY, MOSTLY, FEWEST_STEPS = 1.1, 0.9, 10


@dataclass(frozen=True, kw_only=True)
class BucketProfile:
    """Gradients that cross the link together. ``ready`` is in seconds since the last backward of a window began, with
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
        """The bytes of all gradients."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def compute(self) -> float:
        """The seconds that a window takes without communication."""
        return self.micro_batches * (self.data + self.forward + self.backward) + self.optimizer

    def slowed(self, factor: float) -> "StepProfile":
        """The profile of a rank that takes that many times as long to compute."""
        return replace(
            self,
            forward=self.forward * factor,
            backward=self.backward * factor,
            optimizer=self.optimizer * factor,
            buckets=tuple(replace(each, ready=each.ready * factor, need=each.need * factor) for each in self.buckets),
        )

    def accumulating(self, micro_batches: int) -> "StepProfile":
        """The profile with that many of the same micro-batches in a window."""
        return replace(self, micro_batches=micro_batches)

    def in_buckets(self, cap: int) -> "StepProfile":
        """The profile with the same gradients in other buckets, as the engine lays them out: neighbours together up to
        the cap.

        Existing pieces are not cut: single parameters, which the engine does not cut either, or buckets of a recording.
        """
        groups: list[list[BucketProfile]] = []
        used = 0
        for piece in self.buckets:
            used += piece.nbytes
            if not groups or used > cap:
                groups.append([])
                used = piece.nbytes
            groups[-1].append(piece)
        joined = []
        for index, group in enumerate(groups):
            nbytes = sum(each.nbytes for each in group)
            ready, need = max(each.ready for each in group), min(each.need for each in group)
            joined.append(BucketProfile(index=index, nbytes=nbytes, ready=ready, need=need))
        return replace(self, buckets=tuple(joined))


# -- differences between ranks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """The factor by which a rank's compute in one step differs from its usual: log-normal with ``sigma``, median 1."""

    sigma: float = 0.0

    def __post_init__(self) -> None:
        if not self.sigma >= 0:
            raise ConfigurationError(f"jitter has a sigma of 0 or more, got sigma={self.sigma}")

    @classmethod
    def between(cls, ranks: Sequence[Sequence[float]]) -> "Jitter":
        """The jitter by which ranks differ in the same steps: for each rank its times, step by step. What slows all of
        them down at once makes no straggler."""
        number = len(ranks)
        if number < 2:
            return cls()
        logs = [[math.log(each) for each in step] for step in zip(*ranks, strict=False) if min(step) > 0]
        apart = [abs(each - statistics.fmean(step)) for step in logs for each in step]
        if len(apart) < 2 * number:
            return cls()
        # Half of all are within 0.67 sigma of the middle; the mean of so few ranks takes a part of it away.
        usual = statistics.median(apart) / NORMAL.inv_cdf(0.75)
        return cls(sigma=usual * math.sqrt(number / (number - 1)))

    def quantile(self, chance: float, ranks: int = 1) -> float:
        """The factor that the slowest of ``ranks`` ranks stays below with that chance."""
        if not self.sigma:
            return 1.0
        each = math.exp(math.log(chance) / ranks) if 0 < chance < 1 else chance
        each = min(max(each, 1e-300), 1 - 1e-16)
        return min(math.exp(min(self.sigma * NORMAL.inv_cdf(each), math.log(MOST))), MOST)


def steady_straggler(ranks: Sequence[Sequence[float]]) -> tuple[int, float] | None:
    """The rank that is slow for good, and how many times as long it takes as the median of the others: for each rank
    its times, step by step. None where there is none: then ranks differ by chance, as :class:`Jitter` has it."""
    steps = list(zip(*ranks, strict=False))
    if len(ranks) < 2 or len(steps) < FEWEST_STEPS:
        return None
    for rank in range(len(ranks)):
        factors = [step[rank] / statistics.median([*step[:rank], *step[rank + 1 :]]) for step in steps if min(step) > 0]
        if factors and sum(factor >= STEADY for factor in factors) >= MOSTLY * len(steps):
            return rank, statistics.median(factors)
    return None
