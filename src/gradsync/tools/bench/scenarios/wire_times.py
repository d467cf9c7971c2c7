"""Times of collectives by communicator and size: part of the scenario ``wire``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradsync.observe.charts.numbers import size as size_words
from gradsync.tools.bench.record import Cell, CellRecord
from gradsync.tools.bench.statistics import ring_bytes
from gradsync.tools.bench.windows import MIB

__all__ = [
    "COLOURS",
    "COPY",
    "EXCHANGE",
    "GLOO",
    "GROUPS",
    "HALVES",
    "LAYERS",
    "NCCL",
    "NCCL_HALVES",
    "SHARED",
    "TURNS",
    "WIRES",
    "PlaceTimes",
    "calls_of",
    "fit_line",
    "places_of",
    "variant_name",
]

GLOO, EXCHANGE, HALVES = "Gloo group", "peer exchange", "peer exchange RS+AG"
SHARED, TURNS, LAYERS, COPY = "shared memory", "round-robin of 3", "hierarchical", "plain copy"
NCCL, NCCL_HALVES = "NCCL group", "NCCL RS+AG"
# What torch itself takes, by its device: what the others are held against.
GROUPS = {"cpu": GLOO, "cuda": NCCL}
COLOURS = {
    GLOO: "orange",
    NCCL: "orange",
    NCCL_HALVES: "sky",
    EXCHANGE: "blue",
    HALVES: "sky",
    SHARED: "green",
    TURNS: "pink",
    LAYERS: "vermillion",
    COPY: "grey",
}
WIRES = tuple(COLOURS)


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
    # What the other wires are held against.
    group: str
    seconds: Mapping[str, Mapping[int, float]]
    absent: Mapping[str, str]

    @property
    def sizes(self) -> list[int]:
        return sorted({size for times in self.seconds.values() for size in times})

    def bus(self, wire: str, size: int) -> float:
        """Bytes per second; a copy moves each byte once."""
        moved = float(size) if wire == COPY else ring_bytes(size, self.ranks)
        return moved / self.seconds[wire][size]

    def over_group(self, wire: str, size: int) -> float | None:
        """How many times as fast as the process group."""
        known = size in self.seconds.get(wire, {}) and size in self.seconds.get(self.group, {})
        return self.seconds[self.group][size] / self.seconds[wire][size] if known else None


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
    return PlaceTimes(
        name=f"{name}, {cell.sharing}" if cell.sharing else name,
        ranks=cell.ranks,
        rate=cell.bytes_per_second,
        group=GROUPS[cell.device],
        seconds=seconds,
        absent=absent,
    )
