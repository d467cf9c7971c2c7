"""One look for all pictures: the palette, the canvas, and the few kinds of drawing that scenarios need.

Colours are those of Okabe and Ito, which people with any colour vision tell apart; a peer has the same one in every
picture, and gradsync is always the blue. A title says what the picture shows, and values stand beside what they belong
to.
"""

import io
import itertools
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

__all__ = [
    "COLOURS",
    "INK",
    "PARTS",
    "SOFT",
    "Series",
    "canvas",
    "colour_of",
    "draw_bars",
    "draw_lines",
    "draw_stacks",
    "limit_line",
    "save",
]

INK, SOFT, GRID = "#1b2230", "#5b6474", "#e3e5e9"
COLOURS = {
    "gradsync": "#0072B2",
    "DDP stock": "#E69F00",
    "DDP tuned": "#D55E00",
    "DDP": "#E69F00",
    "Accelerate": "#009E73",
    "Lightning Fabric": "#CC79A7",
    "FSDP2 replicate": "#56B4E9",
    "naive": "#6b6b6b",
    "bucketed": "#a3a3a3",
    "no wrapper": "#c3c7cf",
}
PARTS = {"forward": "#9fc9e8", "backward": "#56a0d3", "exposed communication": "#D55E00", "optimizer": "#b8b8b8"}

STYLE: dict[Any, Any] = {
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "figure.dpi": 100,
    "savefig.dpi": 160,
    # Letters as outlines: the page looks the same where the font is missing.
    "svg.fonttype": "path",
}
WIDTH, CHARACTERS = 9.4, 82
# Whiskers may rise this far above the highest bar, and are cut there.
MOST_ABOVE = 1.3


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values of one name over the positions of an axis; ``None`` where there is none. ``spans`` are low and high."""

    label: str
    values: Sequence[float | None]
    spans: Sequence[tuple[float, float] | None] = ()
    colour: str | None = None
    dashed: bool = False


def colour_of(name: str) -> str:
    """A peer's own colour, also where a setting is added to its name."""
    known = [key for key in COLOURS if name == key or name.startswith(f"{key} ")]
    return COLOURS[max(known, key=len)] if known else SOFT


def canvas(
    title: str, *, panels: Sequence[str] = ("",), height: float = 4.2, shared: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure with its message on top and one set of axes a panel, each with a line that says what it is."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.08, wspace=0.04))
        # A number and its unit stay together.
        lines = textwrap.wrap(re.sub(r"(?<=\d) (?=\S)", "\u00a0", title), CHARACTERS)
        figure.suptitle("\n".join(lines), x=0.012, ha="left", fontsize=13.5, fontweight="bold", color=INK)
        axes = figure.subplots(1, len(panels), sharey=shared, squeeze=False)[0]
        for each, name in zip(axes, panels, strict=True):
            each.set_title(name, loc="left", fontsize=11, color=SOFT)
            each.tick_params(length=0)
        return figure, list(axes)


def draw_bars(axes: Axes, groups: Sequence[str], series: Sequence[Series], *, form: str = "{:.2f}") -> None:
    """Bars side by side for every group, each with its value above and a whisker for its span."""
    width = 0.8 / max(len(series), 1)
    highest = max((value for one in series for value in one.values if value is not None), default=1.0)
    # A rare disturbance must not press all bars to the ground.
    top = min(max((high for one in series for high in _tops(one)), default=1.0), highest * MOST_ABOVE)
    for number, one in enumerate(series):
        for place, value in enumerate(one.values):
            x = place + (number - (len(series) - 1) / 2) * width
            if value is None:
                axes.text(x, top * 0.015, "n/a", ha="center", va="bottom", fontsize=8.5, color=SOFT)
                continue
            span = one.spans[place] if one.spans else None
            colour = one.colour or colour_of(one.label)
            axes.bar(x, value, width * 0.92, color=colour, label=one.label if place == _first(one) else None)
            if span is not None:
                axes.plot([x, x], span, color=INK, linewidth=1, alpha=0.65, solid_capstyle="butt")
            label = axes.text(x, value + top * 0.012, form.format(value), ha="center", va="bottom", fontsize=8.5)
            # The whisker passes behind the number.
            label.set_path_effects([patheffects.withStroke(linewidth=3, foreground="white")])
    axes.set_xticks(range(len(groups)), [_broken(group) for group in groups], fontsize=9)
    axes.set_ylim(0, top * 1.08)
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)


def _tops(one: Series) -> list[float]:
    spans = [span[1] for span in one.spans if span is not None]
    return [value for value in one.values if value is not None] + spans


def _first(one: Series) -> int:
    return next((place for place, value in enumerate(one.values) if value is not None), 0)


def _broken(label: str, width: int = 13) -> str:
    return "\n".join(textwrap.wrap(label, width)) or label


def draw_stacks(axes: Axes, rows: Sequence[str], parts: Mapping[str, Sequence[float]], totals: Sequence[str]) -> None:
    """Bars of parts laid end to end, one a row, from the top down; ``totals`` stand at their ends."""
    left = [0.0] * len(rows)
    largest = max((sum(values) for values in zip(*parts.values(), strict=True)), default=1.0)
    places = [len(rows) - 1 - number for number in range(len(rows))]
    for name, values in parts.items():
        axes.barh(places, values, 0.62, left=left, color=PARTS.get(name, SOFT), label=name)
        for place, start, value in zip(places, left, values, strict=True):
            if value > largest * 0.075:
                colour = "white" if name == "exposed communication" else INK
                axes.text(
                    start + value / 2, place, f"{value:.2f}", ha="center", va="center", fontsize=8.5, color=colour
                )
        left = [start + value for start, value in zip(left, values, strict=True)]
    for place, end, total in zip(places, left, totals, strict=True):
        text = axes.text(end + largest * 0.015, place, total, ha="left", va="center", fontsize=9, color=INK)
        text.set_path_effects([patheffects.withStroke(linewidth=3, foreground="white")])
    axes.set_yticks(places, list(rows))
    axes.set_xlim(0, largest * 1.16)
    axes.grid(axis="x")
    axes.spines["bottom"].set_visible(False)


def draw_lines(axes: Axes, ticks: Sequence[str], series: Sequence[Series], *, form: str = "{:.2f}") -> None:
    """Lines over named positions with a band for the span; names stand at the right ends, kept apart."""
    top = max((high for one in series for high in _tops(one)), default=1.0)
    ends: list[tuple[float, str, str, float]] = []
    for one in series:
        colour = one.colour or colour_of(one.label)
        points = [(place, value) for place, value in enumerate(one.values) if value is not None]
        if not points:
            continue
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour, linewidth=2, marker="o", markersize=4.5, linestyle="--" if one.dashed else "-")
        spans = [one.spans[place] if one.spans else None for place in xs]
        known = [(x, *span) for x, span in zip(xs, spans, strict=True) if span is not None]
        if known:
            places, lows, highs = zip(*known, strict=True)
            axes.fill_between(places, lows, highs, color=colour, alpha=0.15, linewidth=0)
        ends.append((ys[-1], f"{one.label} {form.format(ys[-1])}", colour, xs[-1]))
    for y, (_, text, colour, x) in zip(_apart([end[0] for end in ends], top * 0.07), ends, strict=True):
        axes.text(x + 0.08, y, text, color=colour, va="center", ha="left", fontsize=9.5, fontweight="bold")
    axes.set_xticks(range(len(ticks)), list(ticks))
    axes.set_xlim(-0.15, len(ticks) - 1 + 0.9)
    axes.set_ylim(0, top * 1.08)
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """The heights, moved so that neighbours are ``least`` apart, in the same order and with the same middle."""
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    moved = list(heights)
    for lower, upper in itertools.pairwise(order):
        moved[upper] = max(moved[upper], moved[lower] + least)
    shift = sum(moved[number] - heights[number] for number in order) / max(len(order), 1)
    return [height - shift for height in moved]


def limit_line(axes: Axes, value: float, text: str) -> None:
    """A dashed line across a panel of bars, with its name at the right."""
    axes.axhline(value, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.text(1.01, value, text, transform=axes.get_yaxis_transform(), ha="left", va="center", fontsize=8.5)


def save(figure: Figure, folder: Path, slug: str) -> str:
    """Writes ``slug.svg`` and ``slug.png``, and returns the former for a page."""
    with matplotlib.rc_context(STYLE):
        svg = _svg(figure, slug)
        (folder / f"{slug}.svg").write_text(svg)
        figure.savefig(folder / f"{slug}.png", format="png", facecolor="white")
    return svg


def _svg(figure: Figure, slug: str) -> str:
    """Without the head of a file, and with names that no other picture on the page has."""
    target = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": slug}):
        figure.savefig(target, format="svg", metadata={"Date": None}, transparent=True)
    text = target.getvalue()
    return text[text.index("<svg") :]
