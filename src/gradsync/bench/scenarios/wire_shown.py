"""What the wire scenario shows: times and bandwidths of each place, lines fitted to them, log-log pictures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradsync.bench.record import Cell, CellRecord
from gradsync.bench.scenario import MISSING, Picture, Table
from gradsync.bench.statistics import percent, ring_bytes
from gradsync.charts.canvas import canvas, colour, legend, limit_line
from gradsync.charts.kinds import Series, draw_curves
from gradsync.charts.words import size as size_words
from gradsync.lab.rate import Rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "COPY",
    "EXCHANGE",
    "GLOO",
    "HALVES",
    "LAYERS",
    "SHARED",
    "TURNS",
    "WIRES",
    "calls_of",
    "fit_line",
    "places_of",
    "read",
    "show_pictures",
    "show_tables",
    "variant_name",
]

MIB = 2**20
GLOO, EXCHANGE, HALVES = "Gloo group", "peer exchange", "peer exchange RS+AG"
SHARED, TURNS, LAYERS, COPY = "shared memory", "round-robin of 3", "hierarchical", "plain copy"
WIRES = (GLOO, EXCHANGE, HALVES, SHARED, TURNS, LAYERS, COPY)
COLOURS = {
    GLOO: "orange",
    EXCHANGE: "blue",
    HALVES: "sky",
    SHARED: "green",
    TURNS: "pink",
    LAYERS: "vermillion",
    COPY: "grey",
}


def variant_name(wire: str, size: int) -> str:
    return f"{wire} · {size_words(size)}"


def calls_of(cell: Cell, wire: str, size: int) -> int:
    """How often a sample repeats a message: ranks leave their meeting up to milliseconds apart."""
    if wire in (SHARED, COPY):
        return 128 if size <= MIB else 16 if size <= 4 * MIB else 4
    if size < MIB:
        return 8 // cell.ranks
    return 4 if size == MIB and cell.hosts is None else 1


@dataclass(frozen=True, kw_only=True)
class PlaceTimes:
    """Seconds by wire and size, of the cells of one place."""

    name: str
    ranks: int
    rate: float | None
    seconds: Mapping[str, Mapping[int, float]]
    absent: Mapping[str, str]

    @property
    def sizes(self) -> list[int]:
        return sorted({size for times in self.seconds.values() for size in times})

    def bus(self, wire: str, size: int) -> float:
        """Bytes per second; a copy moves each byte once."""
        moved = float(size) if wire == COPY else ring_bytes(size, self.ranks)
        return moved / self.seconds[wire][size]

    def over_gloo(self, wire: str, size: int) -> float | None:
        """How many times as fast as Gloo."""
        known = size in self.seconds.get(wire, {}) and size in self.seconds.get(GLOO, {})
        return self.seconds[GLOO][size] / self.seconds[wire][size] if known else None


def fit_line(times: Mapping[int, float]) -> tuple[float, float]:
    """Latency and seconds per byte, neither below 0, with the least sum of squared relative errors."""
    weights = {size: 1 / seconds**2 for size, seconds in times.items()}
    total = sum(weights.values())
    mean_size = sum(weight * size for size, weight in weights.items()) / total
    mean_time = sum(weights[size] * seconds for size, seconds in times.items()) / total
    spread = sum(weight * (size - mean_size) ** 2 for size, weight in weights.items())
    product = sum(weights[size] * (size - mean_size) * (seconds - mean_time) for size, seconds in times.items())
    slope = max(product / spread, 0.0) if spread > 0 else 0.0
    latency = mean_time - slope * mean_size
    if latency >= 0:
        return latency, slope
    # The best line through the origin.
    squares = sum(weight * size**2 for size, weight in weights.items())
    return 0.0, sum(weights[size] * size * seconds for size, seconds in times.items()) / squares


def places_of(records: Sequence[CellRecord]) -> list[PlaceTimes]:
    names = dict.fromkeys(record.cell.options["place"] for record in records)
    places = [_place(name, [record for record in records if record.cell.options["place"] == name]) for name in names]
    return [place for place in places if place.seconds]


def _place(name: str, records: Sequence[CellRecord]) -> PlaceTimes:
    cell = records[0].cell
    seconds: dict[str, dict[int, float]] = {}
    for wire in WIRES:
        for record in records:
            for size in record.cell.options["sizes"]:
                if variant_name(wire, size) in record.samples:
                    median = record.summary(variant_name(wire, size)).median
                    seconds.setdefault(wire, {})[size] = median / calls_of(cell, wire, size)
    absent = {wire: reason for record in records for wire, reason in record.absent.items()}
    rate = None if cell.rate is None else Rate.parse(cell.rate).bytes_per_second
    return PlaceTimes(name=name, ranks=cell.ranks, rate=rate, seconds=seconds, absent=absent)


def show_tables(records: Sequence[CellRecord]) -> list[Table]:
    places = places_of(records)
    return [_fit_table(places), *(table for place in places for table in _size_tables(place))]


def show_pictures(records: Sequence[CellRecord]) -> list[Picture]:
    return [_picture(place, number) for number, place in enumerate(places_of(records))]


def read(records: Sequence[CellRecord]) -> str:
    return " ".join(_sentence(place) for place in places_of(records))


def _size_tables(place: PlaceTimes) -> Iterator[Table]:
    """Times and bandwidths of the wires, by the size of the message."""

    def milliseconds(wire: str, size: int) -> str:
        faster = place.over_gloo(wire, size)
        against = f" ({faster:.1f}×)" if faster is not None and wire != GLOO else ""
        return f"{place.seconds[wire][size] * 1e3:.3g}{against}"

    def bandwidths(wire: str, size: int) -> str:
        return f"{size / place.seconds[wire][size] / 1e6:.4g} / {place.bus(wire, size) / 1e6:.4g}"

    note = "In brackets: how many times as fast as the Gloo group. The round-robin gets the message in three parts. "
    missing = "; ".join(f"{wire}: {reason}" for wire, reason in place.absent.items())
    link = "" if place.rate is None else f"The link carries {place.rate / 1e6:.0f} MB/s in each direction."
    for unit, words, remark in (
        ("ms", milliseconds, note + (f"Not here: {missing}." if missing else "")),
        ("algorithm / bus bandwidth, MB/s", bandwidths, link),
    ):
        rows = [
            [
                size_words(size),
                *(words(wire, size) if size in known else MISSING for wire, known in place.seconds.items()),
            ]
            for size in place.sizes
        ]
        yield Table(title=f"{place.name}: {unit}", columns=["message", *place.seconds], rows=rows, note=remark)


def _fit_table(places: Sequence[PlaceTimes]) -> Table:
    rows = []
    for place in places:
        for wire, times in place.seconds.items():
            latency, slope = fit_line(times)
            rate = MISSING if slope <= 0 else f"{1 / slope / 1e6:.4g}"
            share = MISSING if place.rate is None else percent(place.bus(wire, max(times)) / place.rate)
            rows.append([place.name, wire, f"{latency * 1e6:.0f}", rate, share])
    return Table(
        title="Fitted: a message of n bytes takes latency + n / bandwidth",
        columns=["place", "wire", "latency µs", "bandwidth MB/s", "largest message: bus bandwidth / link"],
        rows=rows,
        note="Least squares of relative errors. A shaped link lets the first 256 kB after a pause pass at once, which "
        "flatters small messages. A hierarchy may exceed the link: it sends less than every rank's share.",
    )


def _picture(place: PlaceTimes, number: int) -> Picture:
    title = _message(place)
    figure, axes = canvas(title, panels=["time of a collective", "bus bandwidth"], height=4.6, shared=False)
    for wire, times in place.seconds.items():
        values = [(size, times[size] * 1e3, place.bus(wire, size) / 1e6) for size in sorted(times)]
        style: Any = "dashed" if wire in (HALVES, COPY) else "line"
        for panel, column in zip(axes, (1, 2), strict=True):
            points = [(float(row[0]), row[column]) for row in values]
            one = Series(label=wire, points=points, colour=colour(COLOURS[wire]), style=style)
            draw_curves(panel, [one], marker="o", markersize=4)
    for panel, label in zip(axes, ("ms", "MB/s"), strict=True):
        _log_axes(panel, place.sizes, label)
    if place.rate is not None:
        limit_line(axes[1], place.rate / 1e6, f"link\n{place.rate / 1e6:.0f} MB/s")
    legend(axes, columns=4)
    return Picture(slug=f"place-{number}", title=title, figure=figure, reading=_sentence(place))


def _log_axes(axes: "Axes", sizes: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xticks(list(sizes), [size_words(size).replace(" ", "\n") for size in sizes], fontsize=8.5)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel(label)
    axes.grid(True)


def _message(place: PlaceTimes) -> str:
    """The title: the fastest of the whole all-reduces at the largest size, against Gloo."""
    largest = place.sizes[-1]
    gains = {wire: gain for wire in WIRES if wire != COPY and (gain := place.over_gloo(wire, largest)) is not None}
    best = max(gains, key=lambda wire: gains[wire], default=GLOO)
    if best == GLOO:
        return f"{place.name}: nothing is faster than the Gloo group at {size_words(largest)}"
    return f"{place.name}: {best} is {gains[best]:.1f}× as fast as Gloo at {size_words(largest)}"


def _sentence(place: PlaceTimes) -> str:
    largest = place.sizes[-1]
    parts = []
    for wire in (HALVES, SHARED, LAYERS):
        gains = [(size, gain) for size in place.sizes if (gain := place.over_gloo(wire, size)) is not None]
        if gains:
            size, gain = gains[-1]
            parts.append(
                f"{wire} {gains[0][1]:.1f}× at {size_words(gains[0][0])} and {gain:.1f}× at {size_words(size)}"
            )
    words = (
        f"{place.name}, speed against Gloo: {', '.join(parts)}." if parts else f"{place.name}: only Gloo was measured."
    )
    if place.rate is not None and largest in place.seconds.get(HALVES, {}):
        words += f" Peer exchange fills {percent(place.bus(HALVES, largest) / place.rate)} of the link."
    if largest in place.seconds.get(COPY, {}) and largest in place.seconds.get(SHARED, {}):
        times = place.seconds[SHARED][largest] / place.seconds[COPY][largest]
        words += f" Shared memory takes {times:.1f} times as long as a plain copy of {size_words(largest)}."
    return words
