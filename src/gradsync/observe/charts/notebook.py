"""HTML of explanations and timelines for a notebook, without scripts, style sheets or anything to load.

A notebook is light or dark and has its own font, so text inherits both from it, and only bars have colours. Everything
that comes from a model, such as the names of its parameters, is escaped.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

__all__ = ["Piece", "frame", "heading", "legend", "lines", "strip", "table"]

# From where to where, as shares of the width; colour; what to say below a pointer.
Piece = tuple[float, float, str, str]

HEIGHT = 14
CELL = "padding:2px 12px 2px 0;text-align:{};vertical-align:top;border:none;background:none"


def frame(*parts: str) -> str:
    """All ``parts`` as one element, which scrolls where the notebook is narrow."""
    style = "font-size:13px;line-height:1.45;font-variant-numeric:tabular-nums;overflow-x:auto"
    return f'<div style="{style}">{"".join(parts)}</div>'


def heading(words: str) -> str:
    return f'<div style="font-weight:600;margin:8px 0 4px">{escape(words)}</div>'


def lines(texts: Iterable[str]) -> str:
    """The texts as HTML, a line each; blanks at the beginning indent it."""
    return f'<div style="white-space:pre-wrap;margin:6px 0">{"<br>".join(map(escape, texts))}</div>'


def legend(names: Mapping[str, str]) -> str:
    """A legend that says what colours mean."""
    return "".join(
        f'<span style="margin-right:14px;white-space:nowrap"><svg width="11" height="11" style="margin-right:5px">'
        f'<rect width="11" height="11" fill="{colour}"/></svg>{escape(name)}</span>'
        for name, colour in names.items()
    )


def strip(pieces: Iterable[Piece], *, width: int = 640, marks: Iterable[float] = ()) -> str:
    """One bar of ``width`` pixels, with pieces at their places and thin lines at the ``marks``."""
    drawn = "".join(
        f'<rect x="{begin * width:.1f}" y="0" width="{max((end - begin) * width, 1.0):.1f}" height="{HEIGHT}" '
        f'fill="{colour}"><title>{escape(hint)}</title></rect>'
        for begin, end, colour, hint in pieces
        if end > begin
    )
    drawn += "".join(
        f'<rect x="{mark * width - 1:.1f}" y="0" width="1" height="{HEIGHT}" fill="currentColor"/>' for mark in marks
    )
    return f'<svg width="{width}" height="{HEIGHT}" style="vertical-align:middle;max-width:none">{drawn}</svg>'


def table(rows: Iterable[Sequence[str]], *, header: Sequence[str] = (), right: Sequence[int] = ()) -> str:
    """Cells that begin with ``<svg`` are drawings, all others are text; columns ``right`` are numbers."""

    def cells(row: Sequence[str], tag: str) -> str:
        weight = ";font-weight:600" if tag == "th" else ";font-weight:400"
        return "".join(
            f'<{tag} style="{CELL.format("right" if place in right else "left")}{weight}">'
            f"{cell if cell.startswith('<svg') else escape(cell)}</{tag}>"
            for place, cell in enumerate(row)
        )

    head = f"<tr>{cells(header, 'th')}</tr>" if header else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<table style="border-collapse:collapse;border:none;margin:4px 0;font-size:13px">{head}{body}</table>'
