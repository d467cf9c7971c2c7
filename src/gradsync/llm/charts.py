"""Charts as SVG text, drawn from numbers: lines, stacked columns, a bar of shares, the walk of buckets.

No library is needed. Colours are names of custom properties of the page (``var(--loss)``), so one drawing serves light
and dark; every size is in the drawing's own units, so a page shows a chart at about the width it was drawn for.
A value that is not finite is a gap.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

__all__ = [
    "Bar",
    "Line",
    "Segment",
    "compact",
    "duration",
    "line_chart",
    "share_bar",
    "size",
    "stacked_chart",
    "thin",
    "ticks",
    "timeline_chart",
    "y_axis",
]

Point = tuple[float, float]
# The average width of a character, in shares of the font's size. Generous: no label may touch the next.
CHARACTER = 0.58
SMALL = 12
THINNED = 800


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series. ``faint`` is for points that stand behind a line, ``dots`` for a few that were measured apart."""

    name: str
    points: Sequence[Point]
    color: str
    style: Literal["line", "faint", "dots"] = "line"


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One part of a whole: its share of 1, and its shares over time where there are columns."""

    name: str
    color: str
    share: float
    label: str = ""
    columns: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One row of a timeline: waits from ``ready`` on, is under way from ``start`` to ``finish``."""

    name: str
    ready: float
    start: float
    finish: float
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Where values lie in the drawing."""

    left: float
    top: float
    width: float
    height: float
    xs: tuple[float, float]
    ys: tuple[float, float] = field(default=(0.0, 1.0))

    def x(self, value: float) -> float:
        return self.left + (value - self.xs[0]) / (self.xs[1] - self.xs[0]) * self.width

    def y(self, value: float) -> float:
        return self.top + self.height - (value - self.ys[0]) / (self.ys[1] - self.ys[0]) * self.height


def ticks(low: float, high: float, *, count: int = 5, whole: bool = False) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``count`` of them: steps of 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    step = _round_step((high - low) / max(count, 1))
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # A product of a whole number, then rounded: a sum of steps would end at 0.30000000000000004.
    digits = max(0, -math.floor(math.log10(step)) + 1)
    return [round(number * step, digits) for number in range(first, last + 1)]


def _round_step(rough: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def compact(value: float) -> str:
    """A number as short as it can be read: 0.0003, 1.25, 850, 12k, 3.4M."""
    if not math.isfinite(value):
        return "not finite"
    for least, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.4g}{letter}".replace("-", "−")
    if value and abs(value) < 1e-3:
        return _with_exponent(value)
    return f"{value:.4g}".replace("-", "−")


def _with_exponent(value: float) -> str:
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}".replace("-", "−")


def duration(seconds: float) -> str:
    """As 2 h 05 min, 12 s, 3.4 ms or 56 µs."""
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    if seconds >= 60:
        return f"{seconds // 60:.0f} min {math.floor(seconds % 60):02d} s"
    factor, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * factor:.3g} {unit}"


def size(nbytes: float) -> str:
    """As 1.5 GiB."""
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
    factor, unit = next((factor, unit) for factor, unit in units if nbytes >= factor or factor == 1)
    return f"{nbytes / factor:.4g} {unit}" if nbytes / factor >= 1000 else f"{nbytes / factor:.3g} {unit}"


def _tick_labels(values: Sequence[float]) -> list[str]:
    """All alike: 2.0, 2.5, 3.0, or 0, 5e−4, 1e−3."""
    labels = [compact(value) for value in values]
    if any("e" in label for label in labels):
        return [_with_exponent(value) if value else "0" for value in values]
    if any(letter in label for label in labels for letter in "kMG"):
        return labels
    decimals = max((len(label.partition(".")[2]) for label in labels), default=0)
    return [f"{value:.{decimals}f}".replace("-", "−") for value in values]


def thin(points: Sequence[Point], limit: int = THINNED) -> list[Point]:
    """At most ``limit`` points of the same outline: of each stretch the lowest, the highest, and one gap if it has any.

    An average would hide the one step that went wrong, which is the one to see.
    """
    if len(points) <= limit:
        return list(points)
    kinds = 3 if any(not math.isfinite(y) for _, y in points) else 2
    stretch = math.ceil(len(points) / max(limit // kinds, 1))
    kept: list[Point] = []
    for begin in range(0, len(points), stretch):
        part = range(begin, min(begin + stretch, len(points)))
        finite = [index for index in part if math.isfinite(points[index][1])]
        gap = next((index for index in part if not math.isfinite(points[index][1])), None)
        chosen = {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])} if finite else set()
        kept += [points[index] for index in sorted(chosen | ({gap} if gap is not None else set()))]
    return kept


def y_axis(lines: Sequence[Line], *, zero: bool) -> tuple[tuple[float, float], list[float]]:
    """The round ends of an axis for these lines, and its ticks. Outliers that would flatten the rest lie beyond it."""
    low = min((y for line in lines for _, y in line.points if math.isfinite(y)), default=0.0)
    high = max((_usual_top([y for _, y in line.points]) for line in lines), default=1.0)
    low = min(low, 0.0) if zero else low
    if high <= low:  # One value, or none that is finite.
        high = low
        pad = abs(low) * 0.05 or 1.0
        low, high = (low - pad if low else 0.0), high + pad
    step = _round_step((high - low) / 5)
    ends = (math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step)
    return ends, ticks(*ends, count=5)


def _usual_top(values: Iterable[float]) -> float:
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < 20:
        return finite[-1] if finite else -math.inf
    low, usual = finite[len(finite) // 50], finite[-1 - len(finite) // 50]
    # A run's first steps may well be this much higher than the others; what is beyond is no part of the curve.
    bound = usual + 1.5 * (usual - low)
    return finite[-1] if usual == low else max(value for value in finite if value <= bound)


def line_chart(
    *,
    slug: str,
    title: str,
    description: str,
    lines: Sequence[Line],
    y_label: str,
    width: int,
    height: int,
    zero: bool = False,
    hover: Sequence[tuple[float, str]] = (),
) -> str:
    """Lines over steps. ``zero`` lets the axis begin at 0; ``hover`` is what is read out at each step."""
    ys, y_ticks = y_axis(lines, zero=zero)
    labels = _tick_labels(y_ticks)
    left = 14 + max((len(label) for label in labels), default=1) * SMALL * CHARACTER
    legend, legend_rows = _legend([(line.name, line.color) for line in lines], y_label, width, lines)
    top = 12 + 20 * legend_rows
    xs = _span([x for line in lines for x, _ in line.points])
    frame = Frame(left=left, top=top, width=width - left - 14, height=height - top - 40, xs=xs, ys=ys)
    parts = [*legend, *_grid(frame, y_ticks, labels), *_step_axis(frame)]
    for line in lines:
        parts += _draw(frame, line)
    return _svg(slug, title, description, width, height, parts, frame=frame, hover=hover)


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _legend(
    names: Sequence[tuple[str, str]], y_label: str, width: int, lines: Sequence[Line] = ()
) -> tuple[list[str], int]:
    """The axis' unit at the left, the series at the right of the same row; or below it where that would not fit."""
    parts = [_text(0, 14, y_label, css="axis")]
    if len(names) < 2:
        return parts, 1
    lengths = [26 + len(name) * SMALL * CHARACTER for name, _ in names]
    rows = 1 if sum(lengths) + len(y_label) * SMALL * CHARACTER + 24 < width else 2
    x, y = (width - sum(lengths) if rows == 1 else 0.0), 14 + 20 * (rows - 1)
    for number, (name, color) in enumerate(names):
        if lines and lines[number].style != "line":
            solid = ' fill-opacity="0.45"' if lines[number].style == "faint" else ""
            parts.append(f'<circle cx="{x + 6:.1f}" cy="{y - 4}" r="3.5" fill="var(--{color})"{solid}/>')
        else:
            parts.append(f'<rect x="{x:.1f}" y="{y - 6}" width="12" height="4" rx="2" fill="var(--{color})"/>')
        parts.append(_text(x + 17, y, name))
        x += lengths[number]
    return parts, rows


def _grid(frame: Frame, values: Sequence[float], labels: Sequence[str]) -> list[str]:
    parts = []
    for value, label in zip(values, labels, strict=True):
        y = frame.y(value)
        parts.append(f'<path class="grid" d="M{frame.left:.1f} {y:.1f}h{frame.width:.1f}"/>')
        parts.append(_text(frame.left - 8, y + 4, label, anchor="end"))
    return parts


def _step_axis(frame: Frame, name: str = "step", *, whole: bool = True, factor: float = 1.0) -> list[str]:
    """The axis below: as many labels as fit beside each other, and its unit at the end of the row beneath them."""
    widest = max(len(compact(end * factor)) for end in frame.xs) + 2
    count = max(2, int(frame.width / (widest * SMALL * CHARACTER * 2)))
    bottom = frame.top + frame.height
    parts = [f'<path class="base" d="M{frame.left:.1f} {bottom:.1f}h{frame.width:.1f}"/>']
    marks = ticks(frame.xs[0] * factor, frame.xs[1] * factor, count=count, whole=whole)
    labels = [f"{mark:,.0f}" for mark in marks] if whole else _tick_labels(marks)
    for mark, label in zip(marks, labels, strict=True):
        x = frame.x(mark / factor)
        # A label at the very end stays inside the drawing.
        x_label = min(x, frame.left + frame.width + 12 - len(label) * SMALL * CHARACTER / 2)
        parts.append(f'<path class="base" d="M{x:.1f} {bottom:.1f}v4"/>')
        parts.append(_text(x_label, bottom + 18, label, anchor="middle"))
    parts.append(_text(frame.left + frame.width, bottom + 35, name, anchor="end", css="axis"))
    return parts


def _draw(frame: Frame, line: Line) -> list[str]:
    points = thin(line.points)
    inside = [(x, y) for x, y in points if math.isfinite(y) and y <= frame.ys[1]]
    above = [x for x, y in points if math.isfinite(y) and y > frame.ys[1]]
    fill = f'fill="var(--{line.color})"'
    beyond = [f'<path class="beyond" {fill} d="M{frame.x(x):.1f} {frame.top - 2:.1f}l4 7h-8z"/>' for x in above]
    if line.style == "line":
        path = _path(frame, points)
        parts = [f'<path class="line" stroke="var(--{line.color})" d="{path}"/>'] if path else []
        # A point between two gaps, or the only one, has no stroke to show it.
        parts += [_circle(frame, point, 3.5, fill) for point in _alone(points) if point[1] <= frame.ys[1]]
        return parts + beyond
    if line.style == "dots":
        return [_circle(frame, point, 4, fill + ' class="dot"') for point in inside]
    # One path of dots: a short stroke with round ends each, a tenth of the text that circles would be. Of thinned
    # points there are only the lowest and the highest: the band between them.
    css, path = "faint", "".join(f"M{frame.x(x):.1f} {frame.y(y):.1f}h0" for x, y in inside)
    if len(points) < len(line.points):
        css, path = "band", _path(frame, points)
    return ([f'<path class="{css}" stroke="var(--{line.color})" d="{path}"/>'] if path else []) + beyond


def _circle(frame: Frame, point: Point, radius: float, attributes: str) -> str:
    return f'<circle cx="{frame.x(point[0]):.1f}" cy="{frame.y(point[1]):.1f}" r="{radius}" {attributes}/>'


def _path(frame: Frame, points: Sequence[Point]) -> str:
    path, pen = [], "M"
    for x, y in points:
        if not math.isfinite(y):
            pen = "M"
            continue
        path.append(f"{pen}{frame.x(x):.1f} {frame.y(min(y, frame.ys[1])):.1f}")
        pen = "L"
    return "".join(path)


def _alone(points: Sequence[Point]) -> list[Point]:
    finite = [False, *(math.isfinite(y) for _, y in points), False]
    return [
        point
        for number, point in enumerate(points, start=1)
        if finite[number] and not finite[number - 1] and not finite[number + 1]
    ]


def stacked_chart(
    *,
    slug: str,
    title: str,
    description: str,
    edges: Sequence[float],
    segments: Sequence[Segment],
    width: int,
    height: int,
    hover: Sequence[tuple[float, str]] = (),
) -> str:
    """Columns of shares on top of each other, as wide as the steps they stand for; ``edges`` frames them all."""
    frame = Frame(left=46, top=32, width=width - 60, height=height - 72, xs=_span(edges))
    marks = [0.0, 0.25, 0.5, 0.75, 1.0]
    parts = [_text(0, 14, "share of the step's time", css="axis")]
    base = [0.0] * (len(edges) - 1)
    for segment in segments:
        tops = [low + share for low, share in zip(base, segment.columns, strict=True)]
        # Along the tops to the right, back along the bottoms.
        steps = [(edges[i + end], tops[i]) for i in range(len(tops)) for end in (0, 1)]
        steps += [(edges[i + end], base[i]) for i in reversed(range(len(tops))) for end in (1, 0)]
        outline = "L".join(f"{frame.x(x):.1f} {frame.y(min(y, 1.0)):.1f}" for x, y in steps)
        parts.append(f'<path fill="var(--{segment.color})" d="M{outline}z"/>')
        base = tops
    # The grid comes last: the columns fill the whole plot and would hide it.
    parts += [*_grid(frame, marks, [f"{mark:.0%}" for mark in marks]), *_step_axis(frame)]
    return _svg(slug, title, description, width, height, parts, frame=frame, hover=hover)


def share_bar(*, slug: str, title: str, description: str, segments: Sequence[Segment], width: int) -> str:
    """One bar cut into shares, each named below it: the legend of the columns, and the sum over them."""
    x, parts = 0.0, []
    for segment in segments:
        length = segment.share * width
        parts.append(
            f'<rect x="{x:.1f}" y="0" width="{max(length - 1, 0):.1f}" height="30" fill="var(--{segment.color})">'
            f"<title>{escape(segment.name)}: {escape(segment.label)}</title></rect>"
        )
        words = f"{segment.share:.0%}"
        if length > len(words) * SMALL * CHARACTER + 10:
            parts.append(_text(x + length / 2, 19.5, words, anchor="middle", css="inside"))
        x += length
    x, y = 0.0, 52
    for segment in segments:
        length = 17 + (len(segment.name) + len(segment.label) + 1) * SMALL * CHARACTER + 14
        if x and x + length - 14 > width:
            x, y = 0.0, y + 22
        parts.append(f'<rect x="{x:.1f}" y="{y - 10}" width="11" height="11" rx="2" fill="var(--{segment.color})"/>')
        name = f'{escape(segment.name)} <tspan class="strong">{escape(segment.label)}</tspan>'
        parts.append(f'<text x="{x + 17:.1f}" y="{y}">{name}</text>')
        x += length
    return _svg(slug, title, description, width, y + 8, parts)


def timeline_chart(
    *, slug: str, title: str, description: str, bars: Sequence[Bar], backward: tuple[float, float], width: int
) -> str:
    """One row a bucket: a thin line while it waits, a bar while it is on the wire, cut where backward ends."""
    last = max([backward[1], *(bar.finish for bar in bars)])
    row = min(24.0, max(7.0, 560 / (len(bars) + 1)))
    left = 16 + max(len(name) for name in ["backward", *(bar.name for bar in bars)]) * SMALL * CHARACTER
    factor, unit = next((f, u) for f, u in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")) if last * f >= 2 or u == "µs")
    names = [("ready, waits", "waiting"), ("on the wire behind backward", "hidden"), ("exposed", "synchronization")]
    legend, rows = _legend(names, "", width)
    top, tall = 30 + 20 * rows, row * (len(bars) + 1)
    span = (min([backward[0], *(bar.ready for bar in bars)]), last or 1.0)
    frame = Frame(left=left, top=top, width=width - left - 14, height=tall, xs=_span(span))
    end = frame.x(backward[1])
    parts = [*legend, *_bar(frame, backward[0], backward[1], top + 1, row - 2, "backward", "backward computes")]
    parts.append(_text(left - 8, top + row / 2 + 4, "backward", anchor="end"))
    every, gap = math.ceil(16 / row), min(2.0, row / 8)
    for number, bar in enumerate(bars):
        y = top + row * (number + 1)
        # Counted with the row of backward, which has its name too.
        if (number + 1) % every == 0:
            parts.append(_text(left - 8, y + row / 2 + 4, bar.name, anchor="end"))
        parts += _bar(frame, bar.ready, bar.start, y + row / 2 - 1.5, 3, "waiting", bar.hint)
        parts += _bar(frame, bar.start, min(bar.finish, backward[1]), y + gap, row - 2 * gap, "hidden", bar.hint)
        parts += _bar(
            frame, max(bar.start, backward[1]), bar.finish, y + gap, row - 2 * gap, "synchronization", bar.hint
        )
        parts.append(f'<path class="ready" d="M{frame.x(bar.ready):.1f} {y + gap:.1f}v{row - 2 * gap:.1f}"/>')
    parts.append(f'<path class="end" d="M{end:.1f} {top - 6:.1f}v{tall + 6:.1f}"/>')
    # To the left of the line unless there is no room.
    anchor = "end" if end - left > 110 else "start"
    parts.append(_text(end + (4 if anchor == "start" else 0), top - 10, "end of backward", anchor=anchor, css="strong"))
    parts += _step_axis(frame, f"{unit} since backward began", whole=False, factor=factor)
    return _svg(slug, title, description, width, int(top + tall + 42), parts)


def _bar(frame: Frame, begin: float, end: float, y: float, height: float, color: str, hint: str) -> list[str]:
    if end <= begin:
        return []
    # At least a hair: a bucket that took no time at this scale was there all the same.
    length = max(frame.x(end) - frame.x(begin), 0.8)
    return [
        f'<rect x="{frame.x(begin):.1f}" y="{y:.1f}" width="{length:.1f}" height="{height:.1f}" rx="1.5" '
        f'fill="var(--{color})"><title>{escape(hint)}</title></rect>'
    ]


def _text(x: float, y: float, words: str, *, anchor: str = "start", css: str = "") -> str:
    attributes = (f' text-anchor="{anchor}"' if anchor != "start" else "") + (f' class="{css}"' if css else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(words)}</text>' if words else ""


def _svg(
    slug: str,
    title: str,
    description: str,
    width: int,
    height: int,
    parts: Iterable[str],
    *,
    frame: Frame | None = None,
    hover: Sequence[tuple[float, str]] = (),
) -> str:
    name, data = f"{slug}-{width}", ""
    if frame is not None and hover:
        rows = [[round(frame.x(x), 1), words] for x, words in hover]
        read_out = {"top": frame.top, "bottom": frame.top + frame.height, "rows": rows}
        data = f' data-hover="{escape(json.dumps(read_out, ensure_ascii=False, separators=(",", ":")))}"'
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {width} {height}"{data}'
        f' aria-labelledby="{name}-title" aria-describedby="{name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>'
        + "".join(parts)
        + "</svg>"
    )
