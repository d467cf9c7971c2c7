"""The kinds of chart that reports need, each drawn onto axes of :mod:`canvas`.

Values are written next to what they belong to, and omissions are stated. A value that is not finite is a gap.
"""

import itertools
import math
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gradsync.observe.charts.canvas import INK, PARTS, SOFT, colour
from gradsync.observe.charts.numbers import tick_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    *("HINT", "Lane", "Point", "Series", "Stretch", "draw_bars", "draw_columns", "draw_curves", "draw_lanes"),
    *("draw_rows", "draw_stacks", "draw_steps", "name_ends", "thin"),
]

Point = tuple[float, float]
# An artist whose name begins so reads out the rest of it when a pointer rests on it.
HINT = "hint:"
THINNED = 800
# Whiskers may rise this far above the highest bar, and are cut there.
MOST_ABOVE = 1.3
# Rows end here, as a multiple of the longest but one; a longer one is cut and marked.
LONGEST = 1.5
# The width of a character of a label, on average, and the height of its line. Generous: no label may touch the next.
CHARACTER, LINE = 8, 16
# Heights of a lane, to the distance of two.
WIDE, NARROW = 0.8, 0.5
LOOKS: dict[str, dict[str, Any]] = {
    "line": {"solid_capstyle": "round"},
    "dashed": {"linestyle": "--"},
    "faint": {"linestyle": "none", "marker": "o", "markersize": 3, "markeredgewidth": 0, "alpha": 0.45},
    "band": {"linewidth": 0.8, "alpha": 0.35},
    "dots": {"linestyle": "none", "marker": "o", "markersize": 7, "markeredgecolor": colour("card"), "zorder": 3},
}


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one name. ``spans`` are low and high around each; ``faint`` stands behind a line, ``dots`` alone."""

    label: str
    points: Sequence[Point]
    colour: str
    spans: Sequence[tuple[float, float]] = ()
    style: Literal["line", "dashed", "faint", "band", "dots"] = "line"
    width: float = 2.0


def _plain(axes: "Axes", grid: Literal["x", "y"]) -> None:
    """Draw grid lines behind the values, and no spine where they begin."""
    axes.grid(True, axis=grid)
    axes.spines["left" if grid == "y" else "bottom"].set_visible(False)


# -- bars and rows ----------------------------------------------------------------------------------------------------


def draw_bars(axes: "Axes", groups: Sequence[str], series: Sequence[Series], *, form: str = "{:.2f}") -> None:
    """Draw bars side by side for every group, each with its value above and a whisker for its span."""
    width = 0.8 / max(len(series), 1)
    highest = max((value for one in series for _, value in one.points), default=1.0)
    # A rare disturbance must not press all bars to the ground.
    top = min(max((high for one in series for _, high in one.spans), default=highest), highest * MOST_ABOVE)
    top = max(top, highest)
    for number, one in enumerate(series):
        known, shift = dict(one.points), (number - (len(series) - 1) / 2) * width
        axes.bar([place + shift for place in known], list(known.values()), width * 0.92, color=one.colour)
        axes.bar(0, 0, color=one.colour, label=one.label)
        for (place, value), span in itertools.zip_longest(known.items(), one.spans):
            if span is not None:
                axes.plot([place + shift] * 2, span, color=INK, linewidth=1, alpha=0.65, solid_capstyle="butt")
            _value(axes, (place + shift, value), form.format(value), (0, 3), ha="center", va="bottom", fontsize=8.5)
        for place in set(range(len(groups))) - set(known):
            _value(axes, (place + shift, 0), "n/a", (0, 2), ha="center", va="bottom", fontsize=8.5, color=SOFT)
    axes.set_xticks(range(len(groups)), ["\n".join(textwrap.wrap(group, 13)) or group for group in groups], fontsize=9)
    axes.set_ylim(0, top * 1.1)
    _plain(axes, "y")


def _value(axes: "Axes", at: Point, text: str, offset: tuple[float, float], **looks: Any) -> None:
    """Write a number beside its mark. Lines pass behind it."""
    box = {"facecolor": colour("card"), "edgecolor": "none", "pad": 0.6}
    axes.annotate(text, at, offset, textcoords="offset points", bbox=box, **looks)


def draw_rows(
    axes: "Axes", rows: Mapping[str, float | str], colours: Mapping[str, str], *, form: str, bold: str = ""
) -> None:
    """Draw one bar a row, from the top down, its value at its end; or words that say why it has none."""
    ordered = sorted(value for value in rows.values() if not isinstance(value, str))
    # One that is many times as long as the others would make them unreadable.
    end = min(ordered[-1], LONGEST * ordered[-2]) if len(ordered) > 1 else max(ordered, default=1.0)
    for place, (name, value) in enumerate(rows.items()):
        if isinstance(value, str):
            axes.text(0, place, f" {value}", va="center", fontsize=8.5, color=SOFT)
            continue
        axes.barh(place, min(value, end), 0.7, color=colours[name])
        text = form.format(value) + (" →" if value > end else "")
        weight = "bold" if name == bold else "normal"
        _value(axes, (min(value, end), place), text, (4, 0), va="center", fontsize=9, fontweight=weight)
    _downward(axes, rows, end * 1.22 or 1.0)


def draw_stacks(axes: "Axes", rows: Sequence[str], parts: Mapping[str, Sequence[float]], totals: Sequence[str]) -> None:
    """Draw bars of parts laid end to end, one a row, from the top down; ``totals`` stand at their ends."""
    left = [0.0] * len(rows)
    largest = max((sum(values) for values in zip(*parts.values(), strict=True)), default=1.0)
    for name, values in parts.items():
        bars = axes.barh(range(len(rows)), values, 0.62, left=left, color=PARTS.get(name, SOFT), label=name)
        texts = [f"{value:.2f}" if value > largest * 0.075 else "" for value in values]
        dark = name == "exposed communication"
        axes.bar_label(bars, texts, label_type="center", fontsize=8.5, color="white" if dark else "#10151f")
        left = [start + value for start, value in zip(left, values, strict=True)]
    for place, (end, total) in enumerate(zip(left, totals, strict=True)):
        _value(axes, (end, place), total, (5, 0), ha="left", va="center", fontsize=9)
    _downward(axes, rows, largest * 1.16)


def _downward(axes: "Axes", rows: Collection[str], end: float) -> None:
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, end)
    _plain(axes, "x")


# -- lines ------------------------------------------------------------------------------------------------------------


def draw_curves(axes: "Axes", series: Sequence[Series], **looks: Any) -> None:
    """Draw lines through points, with a band for the span where there is one."""
    for one in series:
        xs, ys = zip(*one.points, strict=True) if one.points else ((), ())
        settings = {"color": one.colour, "linewidth": one.width, "label": one.label, **LOOKS[one.style], **looks}
        axes.plot(xs, ys, **settings)
        if one.spans:
            lows, highs = zip(*one.spans, strict=True)
            axes.fill_between(xs, lows, highs, color=one.colour, alpha=0.15, linewidth=0)
    _plain(axes, "y")


def name_ends(axes: "Axes", ticks: Sequence[str], series: Sequence[Series], *, form: str, room: float = 0.9) -> None:
    """Draw curves over named positions, whose names and last values stand at the right ends, kept apart."""
    known = [one for one in series if one.points]
    draw_curves(axes, known, marker="o", markersize=4.5)
    top = max((high for one in known for high in (*dict(one.points).values(), *(s[1] for s in one.spans))), default=1.0)
    heights = _apart([one.points[-1][1] for one in known], top * 0.07)
    for y, one in zip(heights, known, strict=True):
        x, value = one.points[-1]
        text = f"{one.label} {form.format(value)}"
        _value(axes, (x, y), text, (7, 0), color=one.colour, va="center", fontsize=9.5, fontweight="bold")
    axes.set_xticks(range(len(ticks)), list(ticks))
    axes.set_xlim(-0.15, len(ticks) - 1 + room)
    axes.set_ylim(0, top * 1.08)


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """The heights, moved so that neighbours are ``least`` apart, in the same order and with the same middle."""
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    moved = list(heights)
    for lower, upper in itertools.pairwise(order):
        moved[upper] = max(moved[upper], moved[lower] + least)
    shift = sum(moved[number] - heights[number] for number in order) / max(len(order), 1)
    return [height - shift for height in moved]


def draw_steps(axes: "Axes", series: Sequence[Series], *, zero: bool = False) -> int:
    """Draw lines over steps; ``zero`` lets the axis begin at 0. Outliers that would flatten the rest lie beyond its
    top.

    Returns how many of the first series do.
    """
    ticks = _round_ends([[y for _, y in one.points] for one in series], zero=zero)
    top = ticks[-1]
    for one in series:
        points = thin(one.points)
        # Of thinned points there are only the lowest and the highest: the band between them.
        style = "band" if one.style == "faint" and len(points) < len(one.points) else one.style
        inside = [(x, min(y, top) if style in ("line", "band") or y <= top else math.nan) for x, y in points]
        drawn = Series(label=one.label, points=inside, colour=one.colour, style=style, width=1.8)
        # A point between two gaps, or the only one, has no stroke to show it.
        there = [False, *(math.isfinite(y) for _, y in inside), False]
        around = zip(there, there[1:], there[2:], strict=False)
        alone = [place for place, each in enumerate(around) if style == "line" and each == (False, True, False)]
        looks = {"marker": "o", "markersize": 5, "markevery": alone} if alone else {}
        draw_curves(axes, [drawn], clip_on=False, **looks)
        above = [x for x, y in points if math.isfinite(y) and y > top]
        if above:
            axes.plot(above, [top] * len(above), "^", color=one.colour, markersize=6, clip_on=False)
    axes.set_yticks(ticks, tick_labels(ticks))
    axes.set_ylim(ticks[0], top)
    _step_axis(axes, [x for one in series for x, _ in one.points])
    return sum(top < y < math.inf for _, y in series[0].points)


def thin(points: Sequence[Point]) -> list[Point]:
    """At most THINNED points of the same outline: of each stretch the lowest, the highest, and one gap if it has any.

    An average would hide the one step that went wrong, which is the one to see.
    """
    if len(points) <= THINNED:
        return list(points)
    kinds = 3 if any(not math.isfinite(y) for _, y in points) else 2
    stretch = math.ceil(len(points) / (THINNED // kinds))
    kept: list[Point] = []
    for begin in range(0, len(points), stretch):
        part = points[begin : begin + stretch]
        finite = sorted((point for point in part if math.isfinite(point[1])), key=lambda point: point[1])
        gaps = [point for point in part if not math.isfinite(point[1])]
        kept += sorted({*finite[:1], *finite[-1:], *gaps[:1]})
    return kept


def _round_ends(values: Sequence[Sequence[float]], *, zero: bool) -> list[float]:
    """Round numbers that frame these values."""
    from matplotlib.ticker import MaxNLocator

    low = min((y for ys in values for y in ys if math.isfinite(y)), default=0.0)
    high = max(map(_usual_top, values), default=1.0)
    low = min(low, 0.0) if zero else low
    if high <= low:  # One value, or none that is finite.
        pad = abs(low) * 0.05 or 1.0
        low, high = (low - pad if low else 0.0), low + pad
    return [float(tick) for tick in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high)]


def _usual_top(values: Iterable[float]) -> float:
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < 20:
        return finite[-1] if finite else -math.inf
    low, usual = finite[len(finite) // 50], finite[-1 - len(finite) // 50]
    # A run's first steps may well be this much higher than the others; what is beyond is no part of the curve.
    bound = usual + 1.5 * (usual - low)
    return finite[-1] if usual == low else max(value for value in finite if value <= bound)


def _step_axis(axes: "Axes", steps: Sequence[float]) -> None:
    """Label the axis with as many whole steps as fit beside each other."""
    from matplotlib.ticker import MaxNLocator

    low, high = (min(steps), max(steps)) if steps else (0.0, 1.0)
    low, high = (low, high) if high > low else (low - 0.5, low + 0.5)
    axes.set_xlim(low, high)
    room = axes.figure.bbox.width / (len(f"{high:,.0f}  ") * CHARACTER * 2)
    axes.xaxis.set_major_locator(MaxNLocator(max(2, int(room)), integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("step", loc="right")


# -- shares and buckets -----------------------------------------------------------------------------------------------


def draw_columns(axes: "Axes", edges: Sequence[float], parts: Mapping[str, Sequence[float]]) -> None:
    """Draw columns of shares on top of each other, as wide as the steps they stand for; ``edges`` frames them all."""
    # The last edge has no column of its own, and repeats the one before it.
    tops = [[*shares, shares[-1]] for shares in parts.values()]
    axes.stackplot(edges, *tops, colors=[PARTS[name] for name in parts], step="post", linewidth=0)
    _step_axis(axes, edges)
    marks = [0.0, 0.25, 0.5, 0.75, 1.0]
    axes.set_yticks(marks, [f"{mark:.0%}" for mark in marks])
    axes.set_ylim(0, 1)
    _plain(axes, "y")
    # The columns fill the whole plot and would hide the lines.
    axes.set_axisbelow(False)
    axes.grid(True, axis="y", color=colour("card"), alpha=0.5)


# -- lanes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A stretch from ``begin`` to ``end`` of a lane, in seconds, in a colour; ``hint`` is read out below a pointer."""

    begin: float
    end: float
    colour: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One row of stretches. A narrow one belongs to the row above it."""

    name: str
    stretches: Sequence[Stretch]
    narrow: bool = False


def draw_lanes(axes: "Axes", lanes: Sequence[Lane], names: Mapping[str, str]) -> None:
    """Draw lanes from the top down; ``names`` are what colours mean, for the legend."""
    from matplotlib.ticker import MaxNLocator

    last = max((stretch.end for lane in lanes for stretch in lane.stretches), default=1.0) or 1.0
    factor, unit = next((f, u) for f, u in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")) if last * f >= 2 or u == "µs")
    for name, shade in names.items():
        axes.barh(0, 0, color=shade, label=name)
    for row, lane in enumerate(lanes):
        for stretch in lane.stretches:
            # At least a hair: what took no time at this scale was there all the same.
            length = max(stretch.end - stretch.begin, last / 1500) * factor
            height = NARROW if lane.narrow else WIDE
            looks: dict[str, Any] = {"color": stretch.colour, "gid": HINT + stretch.hint, "zorder": 2}
            # Neighbours of one colour are told apart.
            looks |= {"edgecolor": colour("card"), "linewidth": 0.6}
            axes.barh(row, length, height, left=stretch.begin * factor, **looks)
    axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes])
    for tick, lane in zip(axes.get_yticklabels(), lanes, strict=True):
        tick.set_color(SOFT if lane.narrow else tick.get_color())
    axes.set_ylim(len(lanes) - 0.5, -0.6)
    axes.set_xlim(0, last * factor)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.set_xlabel(f"{unit} since the step began", loc="right")
    _plain(axes, "x")
    axes.spines["left"].set_visible(False)
