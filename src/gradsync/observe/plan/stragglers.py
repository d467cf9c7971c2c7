"""Models random differences between ranks: how much slower the slowest of many is, and how certain that is.

A step waits for its slowest rank. If each rank's compute is multiplied by a factor drawn from a distribution F, the
slowest of p ranks has the distribution F^p, whose quantiles are those of F at q^(1/p): no rank needs to be drawn, and
ten thousand cost no more than two.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gradsync.base.errors import ConfigurationError

__all__ = ["Jitter", "steady_straggler"]

NORMAL = statistics.NormalDist()
# What a rank draws at most: a factor beyond it is no jitter but a fault.
MOST = 20.0
# A rank is slow for good, and not by chance, if it takes so many times as long as the median of the others, in such a
# share of at least so many steps. Nine of ten tosses of a fair coin fall alike once in 50 tries, and here each has to
# be a tenth apart, too.
STEADY, MOSTLY, FEWEST_STEPS = 1.1, 0.9, 10


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
