"""A plan as data and as a picture: steps with several numbers of ranks, what would be faster, what a link needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gradsync.base.errors import ConfigurationError
from gradsync.observe.charts.canvas import INK, PARTS, SOFT, canvas, colour, legend, require, style
from gradsync.observe.charts.numbers import compact, saving
from gradsync.observe.charts.page import svg_file
from gradsync.observe.plan.calibration import Calibration
from gradsync.observe.plan.planner import Prediction, Setting, best_setting, predict, rate_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PlanReport", "draw_plan", "make_report", "rate_words", "save_picture"]

# What is tried, beside what was asked for.
ACCUMULATIONS = (2, 4, 8)
REDUCTIONS = ("bf16", "int8", "int4")
# Gains below it are no advice.
WORTH_SAYING = 0.01
BANDS = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "waits for the slowest": "waiting",
    "exposed communication": "exposed",
}
WIDE = 0.72


@dataclass(frozen=True, kw_only=True)
class PlanAdvice:
    """A setting that is faster at ``at`` ranks, and by how much it shortens a micro-batch."""

    at: int
    prediction: Prediction
    gain: float
    # What to change, and the line that does; seconds of a step saved, for the samples that one has now.
    words: str
    line: str
    saved: float


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan's results. ``alone`` is a step of one rank, without communication."""

    calibration: Calibration
    alone: float
    predictions: tuple[Prediction, ...]
    advice: tuple[PlanAdvice, ...]
    loss: float
    needed: float | None

    def efficiency(self, prediction: Prediction) -> float:
        """The efficiency of a prediction: 1 if N ranks do N times the work of one in the same time."""
        return self.calibration.profile.accumulating(prediction.setting.micro_batches).compute / prediction.step

    def cost(self, prediction: Prediction, price: float) -> float:
        """The cost of 1,000 steps, for a ``price`` a rank and hour."""
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
) -> list[PlanAdvice]:
    """The advice, each change by itself, the one that gains most first."""
    setting = now.setting
    found = []
    if setting.overlap != "next-forward" and setting.reduction == "mean":
        better = judge(calibration, replace(setting, overlap="next-forward"))
        line = 'optimizer = ShardedOptimizer(optimizer, model, mode="next-forward")'
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
    advice = []
    for words, line, better in found:
        gain = 1 - better.a_micro_batch / now.a_micro_batch
        saved = now.step * gain
        advice.append(PlanAdvice(at=setting.ranks, prediction=better, gain=gain, saved=saved, words=words, line=line))
    return sorted((each for each in advice if each.gain >= WORTH_SAYING), key=lambda each: -each.gain)


def rate_words(rate: float) -> str:
    """A number of bytes a second as a link's rate: ``12.5 Gbit/s``."""
    bits = rate * 8
    for name, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size:
            return f"{bits / size:.3g} {name}"
    return f"{bits / 1e3:.3g} kbit/s"


# -- the picture ------------------------------------------------------------------------------------------------------


def draw_plan(report: PlanReport) -> "Figure":
    """Draw the picture of a plan. Call it inside ``with style():``."""
    last, rows = report.predictions[-1], ["a step, by the number of ranks"]
    title = f"At {last.setting.ranks:,} ranks a step keeps {report.efficiency(last):.0%} of the speed of one"
    if report.advice:
        first = report.advice[0]
        title += f"; {first.words}: saves {saving(first.saved, first.gain)}"
        rows.append(f"a micro-batch at {first.at:,} ranks")
    figure, axes = canvas(title, panels=rows, height=4.4, shared=False)
    _draw_steps(axes[0], report)
    if report.advice:
        _draw_advice(axes[1], report)
    legend(axes[:1])
    return figure


def save_picture(report: PlanReport, path: Path) -> None:
    require("matplotlib")
    if path.suffix not in (".svg", ".png"):
        raise ConfigurationError(f"a picture is drawn into a .svg or a .png, got {path.name!r}")
    with style():
        figure = draw_plan(report)
        if path.suffix == ".svg":
            path.write_text(svg_file(figure, "plan"))
        else:
            figure.savefig(path, dpi=144)


def _draw_steps(axes: "Axes", report: PlanReport) -> None:
    predictions = report.predictions
    factor, unit = (1.0, "s") if max(each.high for each in predictions) >= 2 else (1e3, "ms")
    bottoms = [0.0] * len(predictions)
    for name, part in BANDS.items():
        values = [_part(each, part) * factor for each in predictions]
        if part == "waiting" and not any(value > 1e-9 for value in values):
            continue
        axes.bar(range(len(values)), values, WIDE, bottom=bottoms, color=PARTS[part], label=name)
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    for place, each in enumerate(predictions):
        axes.plot([place] * 2, [each.low * factor, each.high * factor], color=INK, linewidth=1.1, alpha=0.7)
    axes.axhline(report.alone * factor, color=SOFT, linewidth=1.2, linestyle=(0, (4, 3)), label="one rank alone")
    axes.set_xticks(
        range(len(predictions)), [f"{each.setting.ranks:,}" for each in predictions], rotation=45, ha="right"
    )
    axes.set_ylabel(unit)
    axes.grid(True, axis="y")
    axes.set_axisbelow(True)


def _part(prediction: Prediction, name: str) -> float:
    parts = prediction.simulated.slowest
    value: float = getattr(parts, name)
    # A step is a little longer than its parts where ranks have work of their own for each bucket.
    return value + (parts.host + parts.data if name == "forward" else 0.0)


def _draw_advice(axes: "Axes", report: PlanReport) -> None:
    now = report.predictions[-1]
    rows = [("change nothing", now), *((each.words, each.prediction) for each in report.advice)]
    factor, unit = (1.0, "s") if now.a_micro_batch >= 2 else (1e3, "ms")
    values = [each.a_micro_batch * factor for _, each in rows]
    colours = [colour("grey"), *[colour("blue")] * (len(rows) - 1)]
    axes.barh(range(len(rows)), values, 0.62, color=colours)
    for place, value in enumerate(values):
        axes.annotate(
            compact(float(f"{value:.3g}")), (value, place), (4, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(
        range(len(rows)), [words.replace("send new parameters behind the", "parameters in the") for words, _ in rows]
    )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, max(values) * 1.18)
    axes.set_xlabel(unit, loc="right")
    axes.grid(True, axis="x")
    axes.set_axisbelow(True)
