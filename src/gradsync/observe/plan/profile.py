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
from gradsync.core.bucket.layout import BucketCaps

__all__ = ["BucketProfile", "Jitter", "StepProfile", "steady_straggler"]

NORMAL = statistics.NormalDist()
# What a rank draws at most: a factor beyond it is no jitter but a fault.
MOST = 20.0
# A rank is slow for good, and not by chance, if it takes so many times as long as the median of the others, in such a
# share of at least so many steps. Nine of ten tosses of a fair coin fall alike once in 50 tries, and here each has to
# be a tenth apart, too.
STEADY, MOSTLY, FEWEST_STEPS = 1.1, 0.9, 10


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


# -- differences between ranks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """The factor by which a rank's compute in one step differs from its usual: log-normal with ``sigma``, median 1.

    With a chance of ``rare`` it is ``slow`` times as long on top: a collection of garbage, another process, a page that
    was not there.
    """

    sigma: float = 0.0
    rare: float = 0.0
    slow: float = 1.0

    def __post_init__(self) -> None:
        if not (self.sigma >= 0 and 0 <= self.rare < 1 and self.slow >= 1):
            raise ConfigurationError(
                "jitter has a sigma of 0 or more, a rare chance in [0, 1), and is slow by a factor of 1 or more; got "
                f"sigma={self.sigma}, rare={self.rare}, slow={self.slow}"
            )

    @classmethod
    def between(cls, ranks: Sequence[Sequence[float]]) -> "Jitter":
        """As far as ranks are apart in the same steps: for each rank its times, step by step. What slows all of them
        down at once makes no straggler."""
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
        """Of the slowest of so many ranks."""
        each = math.exp(math.log(chance) / ranks) if 0 < chance < 1 else chance
        return min(self._quantile_of_one(each), MOST)

    def _quantile_of_one(self, chance: float) -> float:
        if not self.sigma and not self.rare:
            return 1.0
        if not self.rare:
            return self._usual(chance)
        # By halving: a mixture has no inverse of its own.
        low, high = 1e-3, MOST
        for _ in range(60):
            middle = math.sqrt(low * high)
            below = (1 - self.rare) * self._below(middle) + self.rare * self._below(middle / self.slow)
            low, high = (middle, high) if below < chance else (low, middle)
        return high

    def _usual(self, chance: float) -> float:
        chance = min(max(chance, 1e-300), 1 - 1e-16)
        return math.exp(min(self.sigma * NORMAL.inv_cdf(chance), math.log(MOST))) if self.sigma else 1.0

    def _below(self, factor: float) -> float:
        return NORMAL.cdf(math.log(factor) / self.sigma) if self.sigma else float(factor >= 1.0)


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
