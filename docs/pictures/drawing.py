"""Strokes that the pictures beside it share. A picture is text, with a white ground that is legible on any page."""

from collections.abc import Iterable
from pathlib import Path

INK, MUTED, LINE, PANEL = "#1f2937", "#6b7280", "#d1d5db", "#f3f4f6"
FORWARD_FILL, BACKWARD_FILL, WIRE_FILL, STEP_FILL = "#dbeafe", "#60a5fa", "#f59e0b", "#10b981"

HEIGHT = 36


def text(
    x: float, y: float, words: str, *, size: int = 13, fill: str = INK, anchor: str = "middle", mono: bool = False
) -> str:
    family = ' font-family="ui-monospace, monospace"' if mono else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{family}>{words}</text>'
    )


def box(x: float, y: float, width: float, fill: str, height: float = HEIGHT, *, stroke: str = "") -> str:
    edge = f' stroke="{stroke}"' if stroke else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="4" fill="{fill}"{edge}/>'


def line(x: float, y: float, to_x: float, to_y: float, *, stroke: str = LINE, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<path d="M{x:.1f} {y:.1f} L{to_x:.1f} {to_y:.1f}" stroke="{stroke}" stroke-width="2"{dashes}/>'


def arrow(x: float, y: float, to_x: float, to_y: float, *, stroke: str = MUTED) -> str:
    """A straight arrow, to the right or left, up or down."""
    dx, dy = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
    back_x, back_y = to_x - 7 * dx, to_y - 7 * dy
    tip = (
        f'<path d="M{to_x:.1f} {to_y:.1f} L{back_x + 4 * dy:.1f} {back_y + 4 * dx:.1f} '
        f'L{back_x - 4 * dy:.1f} {back_y - 4 * dx:.1f} Z" fill="{stroke}"/>'
    )
    return line(x, y, back_x, back_y, stroke=stroke) + tip


def stop(x: float, y: float, number: int) -> str:
    """The number of a stop of a gradient's walk."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="11" fill="{INK}"/>' + text(x, y + 4.5, str(number), fill="white")


def legend(x: float, y: float, entries: Iterable[tuple[str, str]]) -> list[str]:
    parts = []
    for fill, words in entries:
        parts += [box(x, y, 14, fill, 14), text(x + 20, y + 12, words, size=12, fill=MUTED, anchor="start")]
        x += 36 + 6.6 * len(words)
    return parts


def write(script: str, width: float, height: float, parts: Iterable[str]) -> None:
    """Write the picture beside the script that draws it, under its name."""
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="system-ui, sans-serif"><rect width="100%" height="100%" fill="white"/>'
        + "".join(parts)
        + "</svg>\n"
    )
    Path(script).with_suffix(".svg").write_text(svg, encoding="utf-8")
