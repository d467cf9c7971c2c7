"""Parallel lanes over one time axis: what several ranks did in a step, and what was on the wire."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradsync.observe.charts.canvas import SOFT, colour
from gradsync.observe.charts.kinds import HINT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Lane", "Stretch", "draw_lanes"]

# Heights of a lane, to the distance of two.
WIDE, NARROW = 0.8, 0.5


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """From ``begin`` to ``end``, in seconds, in this colour; ``hint`` is read out below a pointer."""

    begin: float
    end: float
    colour: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One row. A narrow one belongs to the row above it."""

    name: str
    stretches: Sequence[Stretch]
    narrow: bool = False


def draw_lanes(axes: "Axes", lanes: Sequence[Lane], names: Mapping[str, str]) -> None:
    """Lanes from the top down; ``names`` are what colours mean, for the legend."""
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
            axes.barh(
                row, length, height, left=stretch.begin * factor, edgecolor=colour("card"), linewidth=0.6, **looks
            )
    axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes])
    for tick, lane in zip(axes.get_yticklabels(), lanes, strict=True):
        tick.set_color(SOFT if lane.narrow else tick.get_color())
    axes.set_ylim(len(lanes) - 0.5, -0.6)
    axes.set_xlim(0, last * factor)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.set_xlabel(f"{unit} since the step began", loc="right")
    axes.grid(True, axis="x")
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
