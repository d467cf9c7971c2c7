"""The common look of all pictures: the palette, the canvas, the legend.

The colours are those of Okabe and Ito, which people with any colour vision can distinguish, and greys. Each has a name
and a shade for light and for dark backgrounds: drawings hold the light one, and a page substitutes the name, so that
the reader's browser chooses.

Draw pictures inside ``with style():``. Nothing here touches pyplot, whose state belongs to the calling program.
"""

import importlib.util
import re
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsync.base.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["INK", "PALETTE", "PARTS", "SOFT", "canvas", "colour", "legend", "limit_line", "require", "style"]

# Light and dark. No two names share a light shade: it is what a drawing is read back by.
PALETTE = {
    "ink": ("#1b2230", "#e8eaee"),
    "soft": ("#5b6474", "#a2abb9"),
    "rule": ("#e3e5e9", "#2c323d"),
    "card": ("#ffffff", "#1a1e26"),
    "blue": ("#0072b2", "#4aa6dd"),
    "mid-blue": ("#56a0d3", "#4189be"),
    "light-blue": ("#9fc9e8", "#86b9dd"),
    "sky": ("#56b4e9", "#7cc8f2"),
    "green": ("#009e73", "#2dba90"),
    "light-green": ("#86cbb3", "#6fb79f"),
    "orange": ("#e69f00", "#e9a827"),
    "vermillion": ("#d55e00", "#ea7a2a"),
    "pink": ("#cc79a7", "#d88fb6"),
    "dark-grey": ("#6b6b6b", "#9a9fa8"),
    "grey": ("#8a8f99", "#7d8593"),
    "light-grey": ("#a3a3a3", "#6b7280"),
    "pale": ("#c3c7cf", "#565e6c"),
    "palest": ("#dfe2e7", "#3a414d"),
}
INK, SOFT = (PALETTE[name][0] for name in ("ink", "soft"))


def colour(name: str) -> str:
    """The shade to draw with."""
    return PALETTE[name][0]


# The parts of a step have the same colours in every picture: of a training, a benchmark and a plan. Whatever is called
# waiting has that of "waiting".
PARTS = {
    "data": colour("pale"),
    "loop": colour("light-grey"),
    "forward": colour("light-blue"),
    "backward": colour("mid-blue"),
    "synchronization": colour("vermillion"),
    "exposed communication": colour("vermillion"),
    "update": colour("light-green"),
    "optimizer": colour("light-green"),
    "waiting": colour("orange"),
    "turn": colour("pink"),
    "exposed": colour("vermillion"),
    "other": colour("palest"),
    "hidden": colour("green"),
}
LOOK = Path(__file__).parent / "templates" / "look.mplstyle"
WIDTH, CHARACTERS = 9.4, 82
POINTS = 72


def require(*packages: str) -> None:
    """Raise at once if a package is missing, before work is done whose result could not be shown."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"pictures and pages need {' and '.join(missing)}, not found here. "
            "Install what is missing with pip install 'gradsync[train]'."
        )


def style(size: float = 11) -> AbstractContextManager[None]:
    """The look of everything drawn inside, with letters of ``size`` points."""
    require("matplotlib")
    import matplotlib

    return matplotlib.rc_context({"font.size": size}, LOOK)


def canvas(
    title: str = "", *, panels: Sequence[str] = ("",), width: float = WIDTH, height: float = 4.2, shared: bool = True
) -> "tuple[Figure, list[Axes]]":
    """A figure in inches, its message on top, and one set of axes per panel with a line that says what it is."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.08, wspace=0.04))
    if title:
        # A number and its unit stay together.
        lines = textwrap.wrap(re.sub(r"(?<=\d) (?=\S)", "\u00a0", title), CHARACTERS)
        figure.suptitle("\n".join(lines), x=0.012, ha="left", fontsize=13.5, fontweight="bold")
    axes = list(figure.subplots(1, len(panels), sharey=shared, squeeze=False)[0])
    for each, name in zip(axes, panels, strict=True):
        each.set_title(name)
    return figure, axes


def legend(axes: "Sequence[Axes]", *, above: bool = False, columns: int = 5) -> None:
    """The names of everything drawn in the panels, each once, in a row below or above them."""
    names = {name: handle for each in axes for handle, name in zip(*each.get_legend_handles_labels(), strict=True)}
    place: Any = "outside upper left" if above else "outside lower left"
    box = axes[0].figure.legend(list(names.values()), list(names), loc=place, ncols=min(columns, len(names) or 1))
    for line in box.get_lines():
        # What is a speck among many is to be seen where it stands alone.
        line.set_markersize(max(line.get_markersize(), 5))


def limit_line(axes: "Axes", value: float, text: str = "", *, across: bool = True, label: str | None = None) -> None:
    """A dashed line at a value, with its name at the right if it has one; upright where values lie along x."""
    (axes.axhline if across else axes.axvline)(value, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), label=label)
    if text:
        axes.text(1.01, value, text, transform=axes.get_yaxis_transform(), ha="left", va="center", fontsize=8.5)
