"""The wire alone, as nccl-tests measures it: how long collectives of 4 KiB to 100 MiB take on each communicator.

Algorithm bandwidth is bytes over time. Bus bandwidth multiplies it by 2(N-1)/N, which is what every rank of N must send
at least, so that it can be held against the link whatever N is. Small messages are repeated within a sample. MPI is not
among the wires: its ranks must be started by mpirun.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradsync.bench.measure import Rounds, Step
from gradsync.bench.record import Cell
from gradsync.bench.scenarios.wire_shown import (
    COPY,
    EXCHANGE,
    GLOO,
    HALVES,
    LAYERS,
    SHARED,
    TURNS,
    WIRES,
    calls_of,
    read,
    show_pictures,
    show_tables,
    variant_name,
)
from gradsync.bench.windows import repeated
from gradsync.communicator import Communicator, ProcessGroupCommunicator, SharedMemoryCommunicator
from gradsync.communicator.hierarchical import HierarchicalCommunicator
from gradsync.communicator.peer_exchange import PeerExchangeCommunicator
from gradsync.communicator.round_robin import RoundRobinCommunicator

__all__ = ["Wire"]

KIB, MIB = 2**10, 2**20

IN_TURN = 3
SMALL = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB)
LARGE = (MIB, 4 * MIB, 25 * MIB, 100 * MIB)
QUICK_SMALL, QUICK_LARGE, QUICK_SHAPED = (4 * KIB, 64 * KIB, 256 * KIB), (MIB, 4 * MIB, 25 * MIB), (MIB, 4 * MIB)

# Reduces so many bytes once, or copies them.
Call = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where ranks are, and how many rounds and sizes that allows."""

    name: str
    hosts: int | None
    ranks: int
    rate: str | None = None

    def cells(self, *, quick: bool) -> list[Cell]:
        """One of small messages, and one of large ones, which are repeated less often."""
        shaped = self.rate is not None
        large = (QUICK_SHAPED if shaped else QUICK_LARGE) if quick else LARGE
        rounds = (5 if shaped else 8) if quick else 20
        small = (QUICK_SMALL if self.ranks == 2 else QUICK_SMALL[::2]) if quick else SMALL
        sizes = {"small": small, "large": large}
        counts = {"small": 30 if quick else 100, "large": rounds}
        seconds = {"small": 4.0 if quick else 30.0, "large": 4.0 if quick else (300.0 if shaped else 50.0)}
        return [
            Cell(
                name=f"{self.name}, {kind} messages",
                ranks=self.ranks,
                hosts=self.hosts,
                rate=self.rate,
                warmup=3 if kind == "small" else 1,
                rounds=counts[kind],
                seconds=seconds[kind],
                emulated=False,
                options={"place": self.name, "sizes": list(sizes[kind])},
            )
            for kind in sizes
        ]


PLACES = (
    Place(name="1 host × 2 ranks, loopback", hosts=None, ranks=2),
    Place(name="2 hosts × 1 rank, 400 Mbit/s", hosts=2, ranks=2, rate="400mbit"),
    Place(name="2 hosts × 1 rank, unshaped", hosts=2, ranks=2),
    Place(name="2 hosts × 2 ranks, 400 Mbit/s", hosts=2, ranks=4, rate="400mbit"),
    Place(name="2 hosts × 2 ranks, unshaped", hosts=2, ranks=4),
)


class Wire:
    """Time and bandwidth of every communicator over the size of the message."""

    name = "wire"
    title = "The wire: time and bandwidth of every communicator"
    source = "After NVIDIA's nccl-tests (time, algorithm bandwidth, bus bandwidth over message size)."
    question = "How fast do bytes travel here, on each of the wires that gradsync can take?"

    def cells(self, *, quick: bool) -> list[Cell]:
        return [cell for place in PLACES for cell in place.cells(quick=quick)]

    def measure(self, rounds: Rounds) -> None:
        wires = _Wires(rounds)
        variants: dict[str, Step] = {}
        for size in rounds.cell.options["sizes"]:
            for wire, call in wires.calls(size).items():
                variants[variant_name(wire, size)] = repeated(call, calls_of(rounds.cell, wire, size))
        rounds.run(variants)

    tables = staticmethod(show_tables)
    pictures = staticmethod(show_pictures)
    reading = staticmethod(read)


class _Wires:
    """The communicators that work here, and memory for them. Making them is collective."""

    def __init__(self, rounds: Rounds) -> None:
        group = dist.group.WORLD
        assert group is not None
        cell = rounds.cell
        self._group = ProcessGroupCommunicator(group)
        self._exchange = PeerExchangeCommunicator(group)
        self._turns = RoundRobinCommunicator.over(group, IN_TURN)
        self._shared: SharedMemoryCommunicator | None = None
        self._layers: HierarchicalCommunicator | None = None
        if cell.hosts is None:
            self._shared = SharedMemoryCommunicator(self._group)
            rounds.absent(LAYERS, "needs several hosts")
        else:
            rounds.absent(SHARED, "needs all ranks on one host")
            rounds.absent(COPY, "is the yardstick of one host")
        if cell.hosts is not None and cell.ranks_per_host > 1:
            self._layers = HierarchicalCommunicator.over(group, inside=_share_memory)
        elif cell.hosts is not None:
            rounds.absent(LAYERS, "needs several ranks on a host")
        rounds.absent("MPI", "needs ranks that mpirun has started")

    def calls(self, size: int) -> dict[str, Call]:
        """What to time, by the name of the wire."""
        tensor = self._group.allocate(size // 4, torch.float32, torch.device("cpu"))
        # Written once, or all of it would be one page of zeros.
        tensor.zero_()
        calls = {
            GLOO: _reducing(self._group, tensor),
            EXCHANGE: _reducing(self._exchange, tensor),
            HALVES: _halves(self._exchange, tensor),
            TURNS: _in_parts(self._turns, tensor),
        }
        layered = ((SHARED, self._shared), (LAYERS, self._layers))
        for name, communicator in layered:
            if communicator is not None:
                own = communicator.allocate(size // 4, torch.float32, torch.device("cpu"))
                calls[name] = _reducing(communicator, own.zero_())
        if self._shared is not None:
            calls[COPY] = _copying(tensor)
        return {name: calls[name] for name in WIRES if name in calls}


def _share_memory(group: dist.ProcessGroup) -> Communicator:
    return SharedMemoryCommunicator(ProcessGroupCommunicator(group))


def _reducing(communicator: Communicator, tensor: torch.Tensor) -> Call:
    return lambda: communicator.all_reduce(tensor).wait()


def _halves(communicator: Communicator, tensor: torch.Tensor) -> Call:
    """In place, as an all-reduce is: the share of a rank is a part of the tensor."""
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

    def call() -> None:
        target.copy_(tensor)

    return call
