"""Answers for a plan: how long a step takes with a given number of ranks, what is best, how fast a link must be."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gradsync.base.errors import ConfigurationError
from gradsync.observe.charts.numbers import compact, count
from gradsync.observe.plan.calibration import Calibration
from gradsync.observe.plan.network import Overlap
from gradsync.observe.plan.simulator import SimulatedStep, simulate

__all__ = ["Prediction", "Setting", "best_setting", "extrapolation", "fit_own_seconds", "predict", "rate_for"]

MIB = 1024 * 1024
CHANCES = (0.05, 0.5, 0.95)
# A prediction is this uncertain where the numbers were measured, or taken from papers; and half as much again for every
# ten times as many ranks, or as fast or slow a link.
MEASURED, PUBLISHED, EACH_TENFOLD = 0.05, 0.15, 0.5
# Seconds of a rank's own are looked for up to this share of a step, and to a part of that for each bucket.
MOST_OF_ITS_OWN, EACH_BUCKET, HALVINGS = 0.05, 16, 7
BUCKET_SIZES_MB = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The choices of a plan. ``bucket_mb`` of None is one bucket for everything; ``rate`` of None the existing link."""

    ranks: int
    bucket_mb: float | None = 25.0
    overlap: Overlap = "backward"
    reduction: str = "mean"
    micro_batches: int = 1
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.bucket_mb is not None and not (math.isfinite(self.bucket_mb) and self.bucket_mb > 0):
            raise ConfigurationError(f"a bucket has a size above 0 MB, got {self.bucket_mb:g}")
        if self.overlap == "next-forward" and self.reduction != "mean":
            raise ConfigurationError(
                f"next-forward is what a sharded optimizer does, and that sends exact means; got {self.reduction!r}"
            )

    def __str__(self) -> str:
        words = ["one bucket" if self.bucket_mb is None else f"buckets of {self.bucket_mb:g} MB"]
        words += [{"backward": "plain", "none": "no overlap", "next-forward": "next-forward"}[self.overlap]]
        if self.reduction != "mean":
            words.append(self.reduction)
        if self.micro_batches > 1:
            words.append(f"accumulate {self.micro_batches}")
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of a step: the usual value, and the range that holds nine times out of ten."""

    setting: Setting
    step: float
    low: float
    high: float
    simulated: SimulatedStep = field(repr=False)
    extrapolates: str = ""

    @property
    def a_micro_batch(self) -> float:
        """The seconds of one micro-batch, which make settings with and without accumulation comparable."""
        return self.step / self.setting.micro_batches


def predict(calibration: Calibration, setting: Setting) -> Prediction:
    """Predict a step. Ranks are exchangeable, so it takes as long as with the slowest of them: what costs time here is
    the number of buckets, not that of ranks."""
    low, middle, high = (_simulated(calibration, setting, chance) for chance in CHANCES)
    tenfolds = math.log10(max(setting.ranks / calibration.transport.ranks, 1.0))
    tenfolds += abs(math.log10(setting.rate / calibration.link)) if setting.rate and calibration.link else 0.0
    unsure = (MEASURED if calibration.measured else PUBLISHED) * (1 + EACH_TENFOLD * tenfolds)
    return Prediction(
        setting=setting,
        step=middle.step,
        low=low.step / (1 + unsure),
        high=high.step * (1 + unsure),
        simulated=middle,
        extrapolates=extrapolation(calibration, setting),
    )


def _simulated(calibration: Calibration, setting: Setting, chance: float = CHANCES[1]) -> SimulatedStep:
    """Simulate the setting with the slowest rank as slow as it is with that chance, or less."""
    here = calibration if setting.rate is None else calibration.over(setting.rate)
    profile = here.profile.accumulating(setting.micro_batches)
    whole = max(1, profile.nbytes)
    cap = whole if setting.bucket_mb is None else max(1, int(setting.bucket_mb * MIB))
    slowest = here.jitter.quantile(chance, setting.ranks)
    return simulate(
        profile.in_buckets(cap).slowed(slowest),
        here.transport.among(setting.ranks),
        here.schedule(setting.overlap, setting.reduction),
    )


def extrapolation(calibration: Calibration, setting: Setting) -> str:
    """How far a setting lies from what was measured, in words; nothing if it does not."""
    words = []
    measured = calibration.transport.ranks
    if setting.ranks > measured:
        words.append(f"{compact(setting.ranks / measured)} times the {count(measured, 'rank')} it is calibrated on")
    if setting.rate and calibration.link and not math.isclose(setting.rate, calibration.link, rel_tol=0.01):
        times = setting.rate / calibration.link
        words.append(f"a link {compact(max(times, 1 / times))} times as {'fast' if times > 1 else 'slow'}")
    smallest = min((bucket.nbytes for bucket in calibration.profile.buckets), default=0)
    if setting.bucket_mb is not None and 0 < setting.bucket_mb * MIB < smallest:
        words.append(f"buckets smaller than the smallest that was measured ({smallest / MIB:.3g} MB)")
    return ", ".join(words)


def best_setting(
    calibration: Calibration,
    first: Setting,
    *,
    bucket_mb: Sequence[float] = BUCKET_SIZES_MB,
    micro_batches: Sequence[int] = (),
    reductions: Sequence[str] = (),
    overlaps: Sequence[Overlap] = (),
) -> Prediction:
    """The setting of all these with the shortest step a micro-batch; of those that are alike, what is named first.
    What is not named stays as ``first`` has it."""
    largest = calibration.profile.nbytes / MIB
    sizes = [size for size in bucket_mb if size < 2 * largest] or [largest]
    numbers, kinds = micro_batches or (first.micro_batches,), reductions or (first.reduction,)
    settings = (
        replace(first, bucket_mb=size, micro_batches=number, reduction=reduction, overlap=overlap)
        for number, reduction, overlap, size in itertools.product(numbers, kinds, overlaps or (first.overlap,), sizes)
        # A sharded optimizer sends exact means.
        if overlap != "next-forward" or reduction == "mean"
    )
    return predict(calibration, min(settings, key=lambda each: _simulated(calibration, each).step / each.micro_batches))


def fit_own_seconds(calibration: Calibration, measured: Sequence[tuple[Setting, float]]) -> Calibration:
    """Fit the ``fixed`` and ``host`` seconds of ranks that come closest to whole steps that were ``measured``: what
    lies between a model and a link that were measured by themselves."""
    compute = calibration.profile.compute

    def wrong(fixed: float, host: float) -> float:
        tried = replace(calibration, fixed=fixed, host=host)
        return sum((_simulated(tried, setting).step / seconds - 1) ** 2 for setting, seconds in measured)

    best = (0.0, 0.0)
    reach = MOST_OF_ITS_OWN * compute
    for _ in range(HALVINGS):
        around = [
            (max(0.0, best[0] + shift * reach), max(0.0, best[1] + other * reach / EACH_BUCKET))
            for shift, other in itertools.product((-1, 0, 1), repeat=2)
        ]
        best, reach = min(around, key=lambda each: wrong(*each)), reach / 2
    return replace(calibration, fixed=best[0], host=best[1])


def rate_for(calibration: Calibration, setting: Setting, loss: float) -> float | None:
    """Bytes a second a link must have so that a step takes at most ``loss`` (0.05 for 5 %) longer than without
    communication; None if no link is fast enough, since latency alone takes more, and 0 if any is: ranks of one host
    use none."""
    profile = calibration.profile.accumulating(setting.micro_batches)
    jitter = calibration.jitter.quantile(CHANCES[1], setting.ranks)
    bound = profile.slowed(jitter).compute * (1 + loss)

    def fits(rate: float) -> bool:
        return _simulated(calibration, replace(setting, rate=rate)).step <= bound

    low, high = 1e5, 1e13
    if not fits(high):
        return None
    if fits(low):
        return 0.0
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
