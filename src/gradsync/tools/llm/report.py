"""A run's folder as one page: ``write_report(folder)`` creates ``report.html`` from what :mod:`run_folder` wrote.

The numbers are computed here and drawn by :mod:`gradsync.observe.charts`; the sentences are in the templates. A page
without charts is better than none: if a chart cannot be drawn, the page says why.

Every key is optional. Besides the records of ``metrics.jsonl``, the page uses

- of ``config.json``: ``model``, ``data``, ``ranks``, ``grad_accum``, ``parameters`` (their number);
- of ``summary.json``: ``seconds``, ``validation_loss``, ``peak_memory_bytes``, ``digest`` of the parameters and
  ``replicas_equal`` (whether all ranks have that digest).

Everything else in them is shown in tables unchanged. A record may cover several steps: those since the previous record.
"""

import bisect
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsync.base.errors import ConfigurationError
from gradsync.observe.charts.canvas import PARTS, POINTS, SOFT, canvas, colour, legend, require, style
from gradsync.observe.charts.kinds import Point, Series, draw_columns, draw_lanes, draw_steps, thin
from gradsync.observe.charts.numbers import compact, count, duration, size
from gradsync.observe.charts.page import NAMES, page_svg, read_out, render, svg_file
from gradsync.observe.explain import Explanation
from gradsync.observe.explain.explanation import ADVICE_TITLE, gained
from gradsync.observe.explain.explanation import NAMES as LABELS
from gradsync.tools.llm.run_folder import Run, read_run, write_whole
from gradsync.tools.llm.time_shares import TimeShares, explain_run, first_step, lanes_of, names_of, shown_step
from gradsync.tools.llm.time_shares import time_shares as shares_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["write_report"]

# The widths charts are drawn for: the whole column, and half of it, which is also a telephone's.
FULL, HALF = 928, 448
AGAIN = "python -c \"from gradsync.tools.llm.report import write_report; write_report('FOLDER')\""
WORDS = {"None": "–", "True": "yes", "False": "no"}
FILTERS: dict[str, Callable[..., Any]] = {
    "compact": compact,
    "count": count,
    "digits": lambda value, number: f"{value:.{number}g}",
    "duration": duration,
    "exp": math.exp,
    "gained": gained,
    "finite": math.isfinite,
    "median": statistics.median,
    "plain": lambda value: f"{value:,}" if type(value) is int else WORDS.get(str(value), str(value)),
    "share": lambda value, decimals: f"{value:.{decimals}%}",
    "short": lambda value: compact(float(f"{value:.3g}")),
    "size": size,
    "whole": lambda value: f"{value:,.0f}",
}


@dataclass(kw_only=True)
class Chart:
    """A drawing, what is read out at places along x, and the facts for the sentence below it.

    ``draw`` returns how many outliers lie beyond it. ``svgs`` are its pictures by width, once it is drawn.
    """

    slug: str
    title: str
    facts: Mapping[str, Any]
    draw: "Callable[[Axes], int | None]"
    unit: str = ""
    height: float = 220
    half: bool = False
    hints: Mapping[float, str] = field(default_factory=dict)
    svgs: dict[int, str] = field(default_factory=dict)
    outliers: int = 0


def write_report(run_folder: Path) -> Path:
    """Makes the page from what the folder holds by now, and returns its path."""
    run = read_run(Path(run_folder))
    require("jinja2")
    losses = [loss for _, loss in run.series("loss")]
    explanation = explain_run(Path(run_folder))
    shares = shares_of(run, explanation)
    charts = [chart for make in (_loss, _throughput, _norm, _rate) for chart in make(run)]
    charts += [*_time(shares, explanation), *_ranks(run, explanation)]
    page = render(
        Path(__file__).parent / "templates" / "report.html",
        FILTERS,
        run=run,
        model=_name_of(run.config.get("model"), "language model"),
        data=_name_of(run.config.get("data"), ""),
        losses=losses,
        first_loss=next(filter(math.isfinite, losses), None),
        speeds=[speed for _, speed in run.series("tokens_per_second") if math.isfinite(speed)],
        tokens=sum(number for _, number in run.series("tokens")),
        seconds=_seconds(run),
        shares=shares,
        explanation=explanation,
        advice_title=ADVICE_TITLE,
        charts=charts,
        problem=_draw(charts),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path = Path(run_folder) / "report.html"
    write_whole(path, page)
    return path


def _draw(charts: Sequence[Chart]) -> str:
    """Gives charts their pictures. Returns why there are none, or nothing."""
    try:
        with style(size=12):
            for chart in charts:
                for width in (HALF,) if chart.half else (FULL, HALF):
                    slug = f"{chart.slug}-{width}"
                    figure, (axes,) = canvas(panels=[chart.unit], width=width / POINTS, height=chart.height / POINTS)
                    chart.outliers = chart.draw(axes) or 0
                    if len(axes.get_legend_handles_labels()[1]) > 1:
                        legend([axes], above=True, columns=5 if width == FULL else 3)
                    svg, title = svg_file(figure, slug), f"{chart.title}, over steps" if chart.unit else chart.title
                    hover = read_out(figure, chart.hints) if chart.hints else None
                    chart.svgs[width] = page_svg(svg, slug=slug, title=title, hover=hover)
    except ConfigurationError as error:
        return f"There are no charts on this page: {error} Then write it again: {AGAIN}"
    except Exception as error:
        # Whatever is wrong with a picture, the training that it shows has done its work.
        return f"Not all charts could be drawn: {type(error).__name__}: {error}"
    return ""


def _name_of(value: Any, otherwise: str) -> str:
    if isinstance(value, Mapping):
        value = value.get("name") or ", ".join(f"{key} {entry}" for key, entry in value.items())
    return str(value) if value else otherwise


def _seconds(run: Run) -> float:
    times = [0.0, *(now for _, now in run.series("time"))]
    # The clock of a resumed run may begin at 0 again.
    total = sum(now - before if now >= before else now for before, now in itertools.pairwise(times))
    # The summary knows what came after the last step, but of a resumed run only the last part.
    return max(total, float(run.summary.get("seconds") or 0.0))


# -- lines over steps -------------------------------------------------------------------------------------------------


def _loss(run: Run) -> Iterator[Chart]:
    raw = run.series("loss")
    checks = [(float(record["step"]), float(record["loss"])) for record in run.validations]
    if not raw and not checks:
        return
    finite = [(step, loss) for step, loss in raw if math.isfinite(loss)]
    halfway = None
    if len(finite) >= 20:
        # The step by which half of the fall was done.
        first, middle = finite[0][1], (finite[0][1] + finite[-1][1]) / 2
        halfway = next((step for step, loss in _smooth(finite) if loss <= middle < first), None)
    facts = {
        "finite": finite,
        "measured": [(loss, step) for step, loss in checks if math.isfinite(loss)],
        "gaps": [step for step, loss in raw if not math.isfinite(loss)],
        "tail": statistics.fmean(loss for _, loss in finite[-10:]) if len(finite) > 20 else None,
        "halfway": halfway,
    }
    lines = _smoothed("training", raw, "blue")
    if checks:
        lines.append(Series(label="validation", points=checks, colour=colour("vermillion"), style="dots"))
    yield _lines("loss", "Loss", "loss, nats per token", raw, lines, facts, form="loss {:.4f}", height=340)


def _throughput(run: Run) -> Iterator[Chart]:
    points = run.series("tokens_per_second")
    finite = sorted((speed, step) for step, speed in points if math.isfinite(speed))
    if finite:
        speeds = [speed for speed, _ in finite]
        quartiles = [speeds[len(speeds) * part // 4] for part in (1, 3)] if len(speeds) >= 4 else []
        facts = {"median": statistics.median(speeds), "quartiles": quartiles, "slowest": finite[0]}
        yield _lines("throughput", "Throughput", "tokens per second", points, _smoothed("", points, "green"), facts)


def _norm(run: Run) -> Iterator[Chart]:
    points = run.series("gradient_norm")
    finite = [(norm, step) for step, norm in points if math.isfinite(norm)]
    if finite:
        median = statistics.median(norm for norm, _ in finite)
        facts = {"median": median, "largest": max(finite), "gaps": len(points) - len(finite)}
        lines = _smoothed("", points, "pink")
        yield _lines("norm", "Gradient norm", "norm before clipping", points, lines, facts, half=True)


def _rate(run: Run) -> Iterator[Chart]:
    points = run.series("learning_rate")
    if points:
        largest, step = max((rate, -step) for step, rate in points)
        facts = {"largest": largest, "lowest": min(rate for _, rate in points), "step": -step, "last": points[-1][1]}
        line = Series(label="", points=points, colour=SOFT)
        yield _lines("rate", "Learning rate", "learning rate", points, [line], facts, half=True)


def _lines(
    slug: str,
    title: str,
    unit: str,
    raw: Sequence[Point],
    lines: Sequence[Series],
    facts: Mapping[str, Any],
    *,
    form: str = "",
    **looks: Any,
) -> Chart:
    """A chart of lines whose raw values are read out, in this form or as short as can be."""
    hints = {
        step: f"step {step:,.0f}: " + (form.format(value) if form and math.isfinite(value) else compact(value))
        for step, value in thin(raw)
    }
    draw = partial(draw_steps, series=lines, zero=slug != "loss")
    return Chart(slug=slug, title=title, unit=unit, facts=facts, draw=draw, hints=hints, **looks)


def _smoothed(name: str, points: list[Point], shade: str) -> list[Series]:
    """A line; of many points a smooth one in front of the points."""
    if len(points) < 60:
        return [Series(label=name, points=points, colour=colour(shade))]
    return [
        Series(label="each record", points=points, colour=colour(shade), style="faint"),
        Series(label=f"{name}, smoothed" if name else "smoothed", points=_smooth(points), colour=colour(shade)),
    ]


def _smooth(points: Sequence[Point]) -> list[Point]:
    """The mean of the middle half of each point's neighbours: smoother than a median, and no wild step bends it."""
    window: list[float] = []
    smooth, begin, end = [], 0, 0
    for index, (x, y) in enumerate(points):
        # As far ahead as back, so that the line lies in the middle of a steep beginning too.
        reach = min(index, len(points) // 30, 250)
        for _, value in points[end : index + reach + 1]:
            if math.isfinite(value):
                bisect.insort(window, value)
        for _, value in points[begin : index - reach]:
            if math.isfinite(value):
                window.pop(bisect.bisect_left(window, value))
        begin, end = index - reach, index + reach + 1
        middle = window[len(window) // 4 : len(window) - len(window) // 4]
        smooth.append((x, statistics.fmean(middle) if math.isfinite(y) else math.nan))
    return smooth


# -- where the time went ----------------------------------------------------------------------------------------------


def _time(shares: TimeShares | None, explanation: Explanation | None) -> Iterator[Chart]:
    if shares is None:
        return
    facts = {
        "parts": [
            (LABELS.get(name, name), seconds / shares.step, seconds, NAMES[PARTS[name]])
            for name, seconds in shares.parts.items()
        ],
        "step": shares.step,
        "waits": shares.waits,
        "per_column": shares.per_column,
        "hidden": None if explanation is None else explanation.split.mean.hidden,
        "usual": None if explanation is None else len(explanation.timeline.steps),
    }
    yield Chart(
        slug="time",
        title="Where the time went",
        unit="share of the step's time",
        facts=facts,
        draw=lambda axes: draw_columns(axes, shares.edges, shares.columns),
        height=250,
        hints=shares.hints,
    )


def _ranks(run: Run, explanation: Explanation | None) -> Iterator[Chart]:
    if explanation is None:
        return
    step, lanes = shown_step(explanation), lanes_of(explanation)
    last = step.collectives[-1] if step.collectives else ()
    facts = {
        "step": first_step(run, explanation) + step.number,
        "seconds": step.seconds,
        "ranks": len(step.ranks),
        "shown": sum(not lane.narrow for lane in lanes),
        "last": explanation.timeline.members[last[-1].last] if last else None,
        "error": max(each.header.clock.error or 0.0 for each in explanation.timeline.recordings),
    }
    draw = partial(draw_lanes, lanes=lanes, names=names_of())
    yield Chart(slug="ranks", title="All ranks in one step", facts=facts, draw=draw, height=110 + 24.0 * len(lanes))
