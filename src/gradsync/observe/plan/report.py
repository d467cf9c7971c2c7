"""A plan as data and text: steps with several numbers of ranks, what would be faster, what a link needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gradsync.observe.plan.calibration import Calibration
from gradsync.observe.plan.planner import Prediction, Setting, best_setting, predict, rate_for

__all__ = ["Advice", "PlanReport", "make_report", "rate_words"]

# What is tried, beside what was asked for.
ACCUMULATIONS = (2, 4, 8)
REDUCTIONS = ("bf16", "int8", "int4")
# Gains below it are no advice.
WORTH_SAYING = 0.01


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A setting that is faster at ``at`` ranks, and by how much it shortens a micro-batch."""

    at: int
    prediction: Prediction
    gain: float
    # What to change, and the line that does.
    words: str
    line: str
    # Seconds of a step, for the samples that one has now.
    saved: float


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan's results. ``alone`` is a step of one rank, without communication."""

    calibration: Calibration
    alone: float
    predictions: tuple[Prediction, ...]
    advice: tuple[Advice, ...]
    loss: float
    needed: float | None

    def efficiency(self, prediction: Prediction) -> float:
        """Of N ranks, N times the work of one in the same time is 1."""
        micro = prediction.setting.micro_batches
        alone = self.calibration.profile.accumulating(micro).compute
        return alone / prediction.step

    def cost(self, prediction: Prediction, price: float) -> float:
        """Of 1,000 steps, for a ``price`` a rank and hour."""
        return prediction.step * 1000 / 3600 * price * prediction.setting.ranks


def make_report(
    calibration: Calibration, ranks: Sequence[int], setting: Setting, *, choose_size: bool, loss: float = 0.05
) -> PlanReport:
    """The plan for each of ``ranks``; with ``choose_size`` buckets are as large as is best at each."""
    predictions = []
    for number in ranks:
        wanted = replace(setting, ranks=number)
        predictions.append(best_setting(calibration, wanted) if choose_size else predict(calibration, wanted))
    last = predictions[-1]
    return PlanReport(
        calibration=calibration,
        alone=calibration.profile.accumulating(setting.micro_batches).compute,
        predictions=tuple(predictions),
        advice=tuple(_advice(calibration, last, best_setting if choose_size else predict)),
        loss=loss,
        needed=rate_for(calibration, last.setting, loss),
    )


def _advice(
    calibration: Calibration, now: Prediction, judge: Callable[[Calibration, Setting], Prediction]
) -> list[Advice]:
    """Each change by itself, the one that gains most first."""
    setting = now.setting
    found = []
    if setting.overlap != "next-forward" and setting.reduction == "mean":
        better = judge(calibration, replace(setting, overlap="next-forward"))
        line = 'optimizer = ShardedOptimizer.of(optimizer, model, mode="next-forward")'
        found.append(("send new parameters behind the next forward", line, better))
    for name in REDUCTIONS:
        if name != setting.reduction and setting.overlap != "next-forward":
            better = judge(calibration, replace(setting, reduction=name))
            line = f'model = DistributedDataParallel(model, reduction="{name}")'
            found.append((f"send gradients as {name}", line, better))
    for number in ACCUMULATIONS:
        if number > setting.micro_batches:
            better = judge(calibration, replace(setting, micro_batches=number))
            line = f"with model.accumulate(last=…):  # {number} micro-batches a step"
            found.append((f"accumulate {number} micro-batches", line, better))
    best = best_setting(calibration, setting)
    if best.setting.bucket_mb != setting.bucket_mb:
        line = f"model = DistributedDataParallel(model, bucket_cap_mb={best.setting.bucket_mb:g})"
        found.append((f"buckets of {best.setting.bucket_mb:g} MB", line, best))
    advice = [
        Advice(
            at=setting.ranks,
            prediction=better,
            gain=1 - better.a_micro_batch / now.a_micro_batch,
            saved=now.step * (1 - better.a_micro_batch / now.a_micro_batch),
            words=words,
            line=line,
        )
        for words, line, better in found
    ]
    return sorted((each for each in advice if each.gain >= WORTH_SAYING), key=lambda each: -each.gain)


def rate_words(rate: float) -> str:
    """Bytes a second as a link's rate: ``12.5 Gbit/s``."""
    bits = rate * 8
    for name, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size:
            return f"{bits / size:.3g} {name}"
    return f"{bits / 1e3:.3g} kbit/s"
