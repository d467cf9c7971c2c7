"""HTML without network, font or accompanying file: whole pages from templates and pictures, and parts for notebooks.

On a page a picture is embedded as SVG. Its colours become names that the page defines for light and dark, its text
takes the page's font, and its ids are unique on the page. The same numbers give the same text.

A notebook gets no scripts and no style sheets either. It is light or dark and has its own font, so text inherits both
from it, and only bars have colours. Everything that comes from a model, such as the names of its parameters, is
escaped.
"""

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from gradsync.observe.charts.canvas import PALETTE, require
from gradsync.observe.charts.kinds import HINT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    *("NAMES", "Piece", "frame", "heading", "legend", "lines", "page_svg", "read_out", "render", "strip", "svg_file"),
    "table",
]

# What a page calls the shades that drawings hold.
NAMES = {light: f"var(--{name})" for name, (light, _) in PALETTE.items()}


def svg_file(figure: "Figure", slug: str) -> str:
    """A picture as the text of a file of its own, for a light or a dark background."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    for paper in (figure.patch, *(axes.patch for axes in figure.axes)):
        paper.set(facecolor="none", edgecolor="none")
    target = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": slug}):
        # Figure.savefig writes the same, and draws everything twice for it.
        FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None})
    svg = target.getvalue()
    return svg.replace("</style>", f"{_on_dark_paper(svg)}</style>", 1)


def _on_dark_paper(svg: str) -> str:
    """CSS rules for a dark background, for readers that know of it; others see what was drawn."""
    rules = [
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}'
        for light, dark in PALETTE.values()
        for kind in ("fill", "stroke")
        if f"{kind}: {light}" in svg
    ]
    return f":root {{ color-scheme: light dark }} @media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}"


def read_out(figure: "Figure", words: Mapping[float, str]) -> dict[str, Any]:
    """What a page says below the pointer, by places along x, for a picture that was drawn just now."""
    axes, height = figure.axes[0], figure.bbox.height
    frame, xs = axes.get_window_extent(), axes.transData.transform([(place, 0.0) for place in words])[:, 0]
    rows = [[round(float(x), 1), said] for x, said in zip(xs, words.values(), strict=True)]
    # From the top down, as SVG counts.
    return {"top": round(height - frame.y1, 1), "bottom": round(height - frame.y0, 1), "rows": rows}


def page_svg(svg: str, *, slug: str, title: str, hover: Mapping[str, Any] | None = None) -> str:
    """What :func:`svg_file` drew as a part of a page, where it goes by its ``slug``."""
    root = ElementTree.fromstring(svg)
    for element in list(root.iter()):
        _clean(element)
    root.attrib = {"class": "chart", "role": "img", "viewBox": root.attrib["viewBox"]}
    root.set("aria-labelledby", f"{slug}-title")
    if hover is not None:
        root.set("data-hover", json.dumps(hover, ensure_ascii=False, separators=(",", ":")))
    named = ElementTree.Element("title", {"id": f"{slug}-title"})
    named.text = title
    root.insert(0, named)
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: ElementTree.Element) -> None:
    """Remove namespaces, which a page's own SVG does without, and names that nothing refers to."""
    element.tag = element.tag.rpartition("}")[2]
    for child in [each for each in element if each.tag.endswith(("}metadata", "}style"))]:
        element.remove(child)
    attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    if element.tag == "g":
        name = attributes.pop("id", "")
        if name.startswith(HINT):
            ElementTree.SubElement(element, "title").text = name.removeprefix(HINT)
        looks = {child.get("style", "") for child in element}
        if len(element) > 1 and len(looks) == 1 and "" not in looks:
            # Many marks that look the same say so once.
            attributes["style"] = looks.pop()
            for child in element:
                del child.attrib["style"]
    if "style" in attributes:
        plain = re.sub(r" font-family: [^;]*;?", "", f" {attributes['style']}")
        attributes["style"] = re.sub(r"#[0-9a-f]{6}", lambda found: NAMES.get(found[0], found[0]), plain).strip()
    if attributes.get("transform", "").startswith("rotate(-0 "):
        del attributes["transform"]
    for key in {"d", "x", "y"} & attributes.keys():
        rounded = re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.4g}", attributes[key])
        attributes[key] = " ".join(rounded.split())
    element.attrib = attributes
    # Between words of a text a space counts; between shapes it only takes room.
    element.text = element.text if element.tag in ("text", "title") else None
    element.tail = None


def render(template: Path, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any) -> str:
    """A page from a template, which may build on those beside this file."""
    require("jinja2")
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent / "templates"]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters or {})
    return environment.get_template(template.name).render(palette=PALETTE, **values)


# -- parts for notebooks ----------------------------------------------------------------------------------------------

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
