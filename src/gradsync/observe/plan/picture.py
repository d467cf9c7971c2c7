"""A plan as a picture: the step and its parts over the number of ranks, and what would be faster."""

from pathlib import Path
from typing import TYPE_CHECKING

from gradsync.base.errors import ConfigurationError
from gradsync.observe.charts.canvas import INK, PARTS, SOFT, canvas, colour, legend, require, style
from gradsync.observe.charts.numbers import compact, saving
from gradsync.observe.charts.page import svg_file
from gradsync.observe.plan.planner import Prediction
from gradsync.observe.plan.report import PlanReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_plan", "save_picture"]

BANDS = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "waits for the slowest": "waiting",
    "exposed wire": "exposed",
}
WIDE = 0.72


def draw_plan(report: PlanReport) -> "Figure":
    """Inside ``with style():``."""
    rows = [
        "a step, by the number of ranks",
        *([f"a micro-batch at {report.advice[0].at:,} ranks"] if report.advice else []),
    ]
    figure, axes = canvas(_title(report), panels=rows, height=4.4, shared=False)
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


def _title(report: PlanReport) -> str:
    last = report.predictions[-1]
    words = f"At {last.setting.ranks:,} ranks a step keeps {report.efficiency(last):.0%} of the speed of one"
    if report.advice:
        first = report.advice[0]
        words += f"; {first.words}: saves {saving(first.saved, first.gain)}"
    return words


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
