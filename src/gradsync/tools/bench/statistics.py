"""Statistics of samples: medians, spreads, ratios with their uncertainty, and the limit no step can beat.

Pure functions of numbers. Samples of variants that ran in the same rounds are compared round by round: whatever
disturbed the machine in a round disturbed both.
"""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradsync.base.errors import ConfigurationError

__all__ = ["Ratio", "Summary", "percent", "percentile", "ratio", "ring_bytes", "summarize", "wire_seconds"]

RESAMPLES = 1000
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The samples of one variant: the median, and the range of nine in ten of them."""

    median: float
    p5: float
    p95: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The median of per-round ratios, with the 95 % interval of that median under resampling of the rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie, interpolated between neighbours."""
    if not values or not 0 <= share <= 1:
        raise ConfigurationError(f"a percentile needs values and a share in 0…1, got {len(values)} values and {share}")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = min(int(place), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    # Not low + (high − low)·part: rounding may carry that beyond high.
    return min(max(low + (high - low) * (place - below), low), high)


def summarize(values: Sequence[float]) -> Summary:
    return Summary(
        median=statistics.median(values), p5=percentile(values, 0.05), p95=percentile(values, 0.95), count=len(values)
    )


def ratio(times: Mapping[int, float], baseline: Mapping[int, float]) -> Ratio:
    """``times`` over ``baseline`` in the rounds that have both; keys are the numbers of the rounds."""
    common = sorted(times.keys() & baseline.keys())
    if not common:
        raise ConfigurationError("a ratio needs at least one round in which both variants ran, got none")
    ratios = [times[number] / baseline[number] for number in common]
    draw = random.Random(SEED)
    medians = [statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)]
    middle = statistics.median(ratios)
    # With few rounds the resampled medians may all lie on one side.
    low, high = min(percentile(medians, 0.025), middle), max(percentile(medians, 0.975), middle)
    return Ratio(median=middle, low=low, high=high)


def ring_bytes(size: int, ranks: int) -> float:
    """Bytes every rank must send, at least, to all-reduce ``size`` bytes."""
    return 2 * (ranks - 1) / ranks * size


def wire_seconds(size: int, ranks: int, bytes_per_second: float | None) -> float:
    """What all-reducing ``size`` bytes takes on a link that is always full; without a rate the wire is no limit."""
    return 0.0 if bytes_per_second is None else ring_bytes(size, ranks) / bytes_per_second
