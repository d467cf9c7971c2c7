"""Communicators alone, as nccl-tests measures: how long collectives of 4 KiB to 100 MiB take on each of them.

Algorithm bandwidth is bytes over time. Bus bandwidth multiplies it by 2(N-1)/N, which is what every rank of N must send
at least, so it can be compared with the link whatever N is. Small messages are repeated within a sample. MPI is not
among the communicators: its ranks must be started by mpirun.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradsync.communicator import Communicator, ProcessGroupCommunicator, SharedMemoryCommunicator
from gradsync.communicator.hierarchical import HierarchicalCommunicator
from gradsync.communicator.peer_exchange import PeerExchangeCommunicator
from gradsync.communicator.round_robin import RoundRobinCommunicator
from gradsync.observe.charts.canvas import colour, limit_line
from gradsync.observe.charts.kinds import Series, draw_curves
from gradsync.observe.charts.numbers import size as size_words
from gradsync.observe.explain.link import fit_line
from gradsync.tools.bench.measure import CellRounds, Device, Step
from gradsync.tools.bench.record import Cell, CellRecord, percent, ring_bytes
from gradsync.tools.bench.scenario import Picture, Scenario, Table, gpu_cell, known, link_words, picture, table_of
from gradsync.tools.bench.workload import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Communicators"]

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
TRANSPORTS = tuple(COLOURS)


def variant_name(transport: str, size: int) -> str:
    return f"{transport} · {size_words(size)}"


def calls_of(cell: Cell, transport: str, size: int) -> int:
    """How often a sample repeats a message: ranks leave their meeting up to milliseconds apart."""
    if transport in (SHARED, COPY):
        return 128 if size <= MIB else 16 if size <= 4 * MIB else 4
    if size < MIB:
        return 8 // cell.ranks
    return 4 if size == MIB and cell.hosts is None else 1


@dataclass(frozen=True, kw_only=True)
class PlaceTimes:
    """Seconds by transport and size, of the cells of one place."""

    name: str
    ranks: int
    rate: float | None
    # What the other transports are held against.
    group: str
    seconds: Mapping[str, Mapping[int, float]]
    absent: Mapping[str, str]

    @property
    def sizes(self) -> list[int]:
        return sorted({size for times in self.seconds.values() for size in times})

    def bus(self, transport: str, size: int) -> float:
        """The bus bandwidth in bytes per second; a copy moves each byte once."""
        moved = float(size) if transport == COPY else ring_bytes(size, self.ranks)
        return moved / self.seconds[transport][size]

    def over_group(self, transport: str, size: int) -> float | None:
        """How many times as fast as the process group the transport is."""
        known = size in self.seconds.get(transport, {}) and size in self.seconds.get(self.group, {})
        return self.seconds[self.group][size] / self.seconds[transport][size] if known else None


def fit_latency(times: Mapping[int, float]) -> tuple[float, float]:
    """Latency and seconds per byte, neither below 0, with the least sum of squared relative errors."""
    slope, size, seconds = fit_line([(size, seconds, seconds**-2) for size, seconds in times.items()])
    slope = max(slope, 0.0)
    if seconds >= slope * size:
        return seconds - slope * size, slope
    # The best line through the origin.
    return 0.0, sum(size / seconds for size, seconds in times.items()) / sum((n / s) ** 2 for n, s in times.items())


def places_of(records: Sequence[CellRecord]) -> list[PlaceTimes]:
    by_place: dict[str, list[CellRecord]] = {}
    for record in records:
        by_place.setdefault(record.cell.options["place"], []).append(record)
    places = []
    for name, cells in by_place.items():
        cell, seconds = cells[0].cell, dict[str, dict[int, float]]()
        for transport, record in itertools.product(TRANSPORTS, cells):
            for size in record.cell.options["sizes"]:
                variant = variant_name(transport, size)
                if variant in record.samples:
                    median = record.summary(variant).median / calls_of(cell, transport, size)
                    seconds.setdefault(transport, {})[size] = median
        place = PlaceTimes(
            name=f"{name}, {cell.sharing}" if cell.sharing else name,
            ranks=cell.ranks,
            rate=cell.bytes_per_second,
            group=GROUPS[cell.device],
            seconds=seconds,
            absent={transport: reason for record in cells for transport, reason in record.absent.items()},
        )
        places += [place] if seconds else []
    return places


Sizes = tuple[int, ...]
KIB = 2**10
IN_TURN = 3
SMALL: Sizes = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB)
LARGE: Sizes = (MIB, 4 * MIB, 25 * MIB, 100 * MIB)
QUICK_SMALL, QUICK_LARGE, QUICK_SHAPED = (4 * KIB, 64 * KIB, 256 * KIB), (MIB, 4 * MIB, 25 * MIB), (MIB, 4 * MIB)

# Reduces a message once, or copies it.
Call = Callable[[], object]

# Where ranks are: hosts, ranks on each, and the rate of links.
PLACES = ((None, 2, None), (2, 1, "400mbit"), (2, 1, None), (2, 2, "400mbit"), (2, 2, None))


class Communicators(Scenario):
    """Time and bandwidth of every communicator over the size of the message."""

    name = "wire"
    title = "Communicators: the time and bandwidth of each"
    source = "After NVIDIA's nccl-tests (time, algorithm bandwidth, bus bandwidth over message size)."
    question = "How fast do bytes travel here, by each of gradsync's communicators?"

    def cells(self, *, quick: bool) -> list[Cell]:
        return [each for place in PLACES for each in _cells(*place, quick=quick)]

    def gpu_cells(self, *, quick: bool) -> list[Cell]:
        kinds = {"small": QUICK_SMALL, "large": LARGE} if quick else {"small": SMALL, "large": LARGE}
        return [
            gpu_cell(
                f"{place}, {kind} messages",
                quick=quick,
                ranks=ranks,
                each=0.02 if kind == "small" else 0.2 * ranks / 2,
                emulated=False,
                options={"place": place, "sizes": list(sizes)},
            )
            for ranks in ((2,) if quick else (2, 4))
            for place in [f"{ranks} ranks, NCCL"]
            for kind, sizes in kinds.items()
        ]

    def measure(self, rounds: CellRounds) -> None:
        transports = _gpu_transports(rounds) if rounds.cell.transport == "NCCL" else _transports(rounds)
        variants: dict[str, Step] = {}
        for size in rounds.cell.options["sizes"]:
            for transport, call in _calls(transports, size, rounds.device).items():
                variants[variant_name(transport, size)] = _repeated(call, calls_of(rounds.cell, transport, size))
        rounds.run(variants)

    def tables(self, records: Sequence[CellRecord]) -> list[Table]:
        places = places_of(records)
        return [_fit_table(places), *(table for place in places for table in _size_tables(place))]

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        return [_picture(place, number) for number, place in enumerate(places_of(records))]

    def reading(self, records: Sequence[CellRecord]) -> str:
        return " ".join(_sentence(place) for place in places_of(records))


def _cells(hosts: int | None, ranks: int, rate: str | None, *, quick: bool) -> list[Cell]:
    """Two cells of a place: one of small messages, and one of large ones, which are repeated less often."""
    link = "loopback" if hosts is None else link_words(rate)
    place = f"{hosts or 1} host{'s' if hosts else ''} × {ranks} rank{'s' if ranks > 1 else ''}, {link}"
    # Sizes, rounds to warm up, rounds, seconds.
    kinds: dict[str, tuple[Sizes, int, int, float]]
    kinds = {"small": (SMALL, 3, 100, 30.0), "large": (LARGE, 1, 20, 50.0 if rate is None else 300.0)}
    if quick:
        small = QUICK_SMALL if ranks * (hosts or 1) == 2 else QUICK_SMALL[::2]
        large = (QUICK_LARGE, 1, 8, 4.0) if rate is None else (QUICK_SHAPED, 1, 5, 4.0)
        kinds = {"small": (small, 3, 30, 4.0), "large": large}
    return [
        Cell(
            name=f"{place}, {kind} messages",
            ranks=ranks * (hosts or 1),
            hosts=hosts,
            rate=rate,
            warmup=warmup,
            rounds=rounds,
            seconds=seconds,
            emulated=False,
            options={"place": place, "sizes": list(sizes)},
        )
        for kind, (sizes, warmup, rounds, seconds) in kinds.items()
    ]


def _transports(rounds: CellRounds) -> dict[str, Communicator]:
    """The communicators that work here. Making them is collective."""
    group, cell = dist.group.WORLD, rounds.cell
    assert group is not None
    plain = ProcessGroupCommunicator(group)
    transports: dict[str, Communicator] = {GLOO: plain, EXCHANGE: PeerExchangeCommunicator(group)}
    transports[TURNS] = RoundRobinCommunicator.over(group, IN_TURN)
    if cell.hosts is None:
        transports[SHARED] = SharedMemoryCommunicator(plain)
        rounds.absent(LAYERS, "needs several hosts")
    else:
        rounds.absent(SHARED, "needs all ranks on one host")
        rounds.absent(COPY, "is the yardstick of one host")
        if cell.ranks_per_host > 1:
            transports[LAYERS] = HierarchicalCommunicator.over(
                group, inside=lambda inside: SharedMemoryCommunicator(ProcessGroupCommunicator(inside))
            )
        else:
            rounds.absent(LAYERS, "needs several ranks on a host")
    rounds.absent("MPI", "needs ranks that mpirun has started")
    return transports


def _gpu_transports(rounds: CellRounds) -> dict[str, Communicator]:
    group = dist.group.WORLD
    assert group is not None
    for transport in (EXCHANGE, SHARED, LAYERS):
        rounds.absent(transport, "is for CPU tensors")
    return {NCCL: ProcessGroupCommunicator(group), TURNS: RoundRobinCommunicator.over(group, IN_TURN)}


def _calls(transports: Mapping[str, Communicator], size: int, device: Device) -> dict[str, Call]:
    """What to time, by the name of the transport."""

    def allocate(transport: str) -> torch.Tensor:
        # Written once, or all of it would be one page of zeros.
        return transports[transport].allocate(size // 4, torch.float32, device.torch_device).zero_()

    tensor = allocate(GROUPS[device.name])
    calls: dict[str, Call] = {}
    for name, communicator in transports.items():
        if name == TURNS:
            calls[name] = _in_parts(communicator, tensor)
        else:
            calls[name] = _reducing(communicator, allocate(name) if name in (SHARED, LAYERS) else tensor)
        if name in (EXCHANGE, NCCL):
            calls[HALVES if name == EXCHANGE else NCCL_HALVES] = _halves(communicator, tensor)
    if SHARED in transports:
        calls[COPY] = _copying(tensor)
    return {name: calls[name] for name in TRANSPORTS if name in calls}


def _repeated(call: Call, times: int) -> Step:
    def step() -> None:
        for _ in range(times):
            call()

    return step


def _reducing(communicator: Communicator, tensor: torch.Tensor) -> Call:
    return lambda: communicator.all_reduce(tensor).wait()


def _halves(communicator: Communicator, tensor: torch.Tensor) -> Call:
    """Both halves of an all-reduce, in place as that is: the share of a rank is a part of the tensor."""
    share = tensor.view(communicator.world_size, -1)[communicator.rank]

    def call() -> None:
        communicator.reduce_scatter(share, tensor).wait()
        communicator.all_gather(tensor, share).wait()

    return call


def _in_parts(communicator: Communicator, tensor: torch.Tensor) -> Call:
    """A part for every group, all under way together: one message alone would have nobody to take turns with."""
    parts = tensor.chunk(IN_TURN)

    def call() -> None:
        for handle in [communicator.all_reduce(part) for part in parts]:
            handle.wait()

    return call


def _copying(tensor: torch.Tensor) -> Call:
    target = torch.empty_like(tensor)
    return lambda: target.copy_(tensor)


# -- what came of it --------------------------------------------------------------------------------------------------


def _size_tables(place: PlaceTimes) -> Iterator[Table]:
    """Times and bandwidths of the transports, by the size of the message."""

    def milliseconds(transport: str, size: int) -> str:
        faster = place.over_group(transport, size)
        against = f" ({faster:.1f}×)" if faster is not None and transport != place.group else ""
        return f"{place.seconds[transport][size] * 1e3:.3g}{against}"

    def bandwidths(transport: str, size: int) -> str:
        return f"{size / place.seconds[transport][size] / 1e6:.4g} / {place.bus(transport, size) / 1e6:.4g}"

    def table(unit: str, words: Callable[[str, int], str], note: str) -> Table:
        rows = [
            {
                "message": size_words(size),
                **{name: words(name, size) if size in taken else None for name, taken in place.seconds.items()},
            }
            for size in place.sizes
        ]
        return table_of(f"{place.name}: {unit}", rows, note=note)

    note = f"In brackets: how many times as fast as the {place.group}. The round-robin gets messages in three parts. "
    missing = "; ".join(f"{transport}: {reason}" for transport, reason in place.absent.items())
    link = "" if place.rate is None else f"The link carries {place.rate / 1e6:.0f} MB/s in each direction."
    yield table("ms", milliseconds, note + (f"Not here: {missing}." if missing else ""))
    yield table("algorithm / bus bandwidth, MB/s", bandwidths, link)


def _fit_table(places: Sequence[PlaceTimes]) -> Table:
    def row(place: PlaceTimes, transport: str, times: Mapping[int, float]) -> dict[str, object]:
        latency, slope = fit_latency(times)
        return {
            "place": place.name,
            "transport": transport,
            "latency µs": f"{latency * 1e6:.0f}",
            "bandwidth MB/s": None if slope <= 0 else f"{1 / slope / 1e6:.4g}",
            "largest message: bus bandwidth / link": place.rate
            and percent(place.bus(transport, max(times)) / place.rate),
        }

    return table_of(
        "Fitted: a message of n bytes takes latency + n / bandwidth",
        [row(place, *each) for place in places for each in place.seconds.items()],
        note="Least squares of relative errors. A shaped link lets the first 256 kB after a pause pass at once, which "
        "flatters small messages. A hierarchy may exceed the link: it sends less than every rank's share.",
    )


def _picture(place: PlaceTimes, number: int) -> Picture:
    def draw(axes: "Axes", values: Callable[[str, int], float], label: str) -> None:
        for transport, times in place.seconds.items():
            style: Any = "dashed" if transport in (HALVES, COPY) else "line"
            points = [(float(size), values(transport, size)) for size in sorted(times)]
            curve = Series(label=transport, points=points, colour=colour(COLOURS[transport]), style=style)
            draw_curves(axes, [curve], marker="o", markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.set_xticks(place.sizes, [size_words(size).replace(" ", "\n") for size in place.sizes], fontsize=8.5)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylabel(label)
        axes.grid(True)

    def draw_bandwidths(axes: "Axes") -> None:
        draw(axes, lambda transport, size: place.bus(transport, size) / 1e6, "MB/s")
        if place.rate is not None:
            limit_line(axes, place.rate / 1e6, f"link\n{place.rate / 1e6:.0f} MB/s")

    def draw_times(axes: "Axes") -> None:
        draw(axes, lambda transport, size: place.seconds[transport][size] * 1e3, "ms")

    panels, slug = [("time of a collective", draw_times), ("bus bandwidth", draw_bandwidths)], f"place-{number}"
    return picture(slug, _message(place), panels, reading=_sentence(place), columns=4, height=4.6, shared=False)


def _message(place: PlaceTimes) -> str:
    """The title: the fastest of the whole all-reduces at the largest size, against torch's own group."""
    largest = place.sizes[-1]
    gains = known({transport: place.over_group(transport, largest) for transport in TRANSPORTS if transport != COPY})
    best = max(gains, key=lambda transport: gains[transport], default=place.group)
    if best == place.group:
        return f"{place.name}: nothing is faster than the {place.group} at {size_words(largest)}"
    return f"{place.name}: {best} is {gains[best]:.1f}× as fast as the {place.group} at {size_words(largest)}"


def _sentence(place: PlaceTimes) -> str:
    largest = place.sizes[-1]
    parts = []
    for transport in (HALVES, NCCL_HALVES, SHARED, LAYERS):
        gains = known({size: place.over_group(transport, size) for size in place.sizes})
        if gains:
            first, last = (f"{gains[size]:.1f}× at {size_words(size)}" for size in (min(gains), max(gains)))
            parts.append(f"{transport} {first} and {last}")
    group = place.group
    words = place.name + (f", speed against the {group}: {', '.join(parts)}." if parts else f": only the {group}.")
    if place.rate is not None and largest in place.seconds.get(HALVES, {}):
        words += f" Peer exchange fills {percent(place.bus(HALVES, largest) / place.rate)} of the link."
    if largest in place.seconds.get(COPY, {}) and largest in place.seconds.get(SHARED, {}):
        times = place.seconds[SHARED][largest] / place.seconds[COPY][largest]
        words += f" Shared memory takes {times:.1f} times as long as a plain copy of {size_words(largest)}."
    return words
