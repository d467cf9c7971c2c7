"""The DDP paper's round-robin process groups: buckets take turns on 1, 3 and 5 groups.

A group reduces its buckets one after the other. Several groups keep more buckets under way at a time, which helps where
one bucket leaves the link idle (many small ones), and cannot help where the link is full (few large ones).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from gradsync.bench.measure import Rounds
from gradsync.bench.peers import Gradsync, MakeOptimizer, NoWrapper, Peer, Wrapped
from gradsync.bench.record import EVERY, Cell, CellRecord
from gradsync.bench.scenario import ALONE, Picture, Table, times_of, timing_table
from gradsync.bench.statistics import percent
from gradsync.bench.windows import plain_step
from gradsync.bench.workload import Workload
from gradsync.charts.canvas import canvas, colour, legend
from gradsync.charts.kinds import draw_bars
from gradsync.communicator.round_robin import RoundRobinCommunicator
from gradsync.data_parallel import DistributedDataParallel
from gradsync.lab.profile import transformer

__all__ = ["InTurn", "RoundRobin"]

MIB = 2**20
GROUPS = (1, 3, 5)
OWN = "gradsync, its own wire"
# Where only latency counts, times are those of threads that are woken, and need many rounds; so the steps are short.
MODELS = {
    "many small buckets": {"parameters": 250_000, "layers": 8, "seconds": 0.018, "buckets": 25, "times": 3},
    "few large buckets": {"parameters": 500_000, "layers": 6, "seconds": 0.04, "buckets": 4, "times": 1},
}
# Blues from light to dark: they are all gradsync.
SHADES = {1: "light-blue", 3: "mid-blue", 5: "blue"}


def variant_name(groups: int) -> str:
    return f"{groups} Gloo group{'s' if groups > 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class InTurn(Peer):
    """gradsync over several Gloo groups in turn, with buckets of a given size."""

    groups: int
    bucket_mb: float

    @property
    def name(self) -> str:  # type: ignore[override]
        return variant_name(self.groups)

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer, *, window: int = 1) -> Wrapped:
        everybody = dist.group.WORLD
        assert everybody is not None
        communicator = RoundRobinCommunicator.over(everybody, self.groups)
        wrapper = DistributedDataParallel(model, communicator=communicator, bucket_cap_mb=self.bucket_mb)
        return Wrapped(
            model=wrapper,
            optimizer=optimizer(wrapper.parameters()),
            backward=lambda loss: (loss / window).backward(),
            no_sync=wrapper.no_sync,
        )


class RoundRobin:
    """One, three and five groups, where latency counts and where bandwidth counts."""

    name = "round-robin"
    title = "Round-robin groups: when several process groups are better than one"
    source = (
        "After Li et al., PyTorch Distributed, VLDB 2020 (three groups: 33 % less for BERT over NCCL, else nothing)."
    )
    question = "Is a step faster if buckets take turns on several process groups?"

    def cells(self, *, quick: bool) -> list[Cell]:
        rates = {"many small buckets": None, "few large buckets": "400mbit"}
        cells = []
        for model, rate in rates.items():
            rounds = int(MODELS[model]["times"]) * (30 if quick else 100)
            cells.append(
                Cell(
                    name=f"{model}, 2 hosts, {'unshaped' if rate is None else '400 Mbit/s'}",
                    hosts=2,
                    rate=rate,
                    rounds=rounds,
                    seconds=(rounds + 5) * 0.35 / MODELS[model]["times"] + 3,
                    options={"model": model, **MODELS[model]},
                )
            )
        return cells

    def measure(self, rounds: Rounds) -> None:
        options = rounds.cell.options
        profile = transformer(parameters=options["parameters"], layers=options["layers"], seconds=options["seconds"])
        workload = Workload(profile=profile)
        size = workload.nbytes / options["buckets"] / MIB
        rounds.fact("gradient bytes", workload.nbytes)
        rounds.fact("bucket MiB", size)
        rounds.limits(compute=ALONE, wire={EVERY: workload.wire_seconds(rounds.cell)})
        peers: dict[str, Peer] = {ALONE: NoWrapper()}
        peers |= {variant_name(count): InTurn(groups=count, bucket_mb=size) for count in GROUPS}
        peers[OWN] = Gradsync(bucket_mb=size)
        rounds.run({name: plain_step(workload, peer) for name, peer in peers.items()})

    def tables(self, records: Sequence[CellRecord]) -> list[Table]:
        return [timing_table(record, baseline=variant_name(1), note=_sizes(record)) for record in records]

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        title = _message(records)
        figure, (axes,) = canvas(title, height=4.0)
        shades = {variant_name(count): colour(SHADES[count]) for count in GROUPS} | {OWN: colour("green")}
        series = [
            times_of(name, [(record, name) for record in records], colour=shade) for name, shade in shades.items()
        ]
        draw_bars(axes, [record.cell.name for record in records], series, form="{:.0f}")
        axes.set_xticks(range(len(records)), [record.cell.name for record in records], fontsize=10)
        axes.set_ylabel("ms a step (median, p5–p95)")
        legend([axes])
        return [Picture(slug="groups", title=title, figure=figure, reading=self.reading(records))]

    def reading(self, records: Sequence[CellRecord]) -> str:
        return " ".join(_sentence(record) for record in records)


def _sizes(record: CellRecord) -> str:
    size = record.facts.get("bucket MiB")
    return "" if size is None else f"Buckets of {size:.2f} MiB; all but {ALONE} are gradsync, with the same buckets."


def _message(records: Sequence[CellRecord]) -> str:
    gains = [
        f"{_change(times)} with {record.cell.options['model']}"
        for record in records
        if (times := record.times(variant_name(3), variant_name(1))) is not None
    ]
    return f"Three groups in turn: a step takes {', '.join(gains)}" if gains else "Several groups in turn"


def _change(times: float) -> str:
    if abs(1 - times) < 0.005:
        return "as long"
    return f"{percent(abs(1 - times))} {'less' if times < 1 else 'more'}"


def _sentence(record: CellRecord) -> str:
    one = variant_name(1)
    gains = [
        f"{_change(times)} with {count} groups"
        for count in GROUPS[1:]
        if (times := record.times(variant_name(count), one)) is not None
    ]
    alone = record.times(OWN, one)
    own = "" if alone is None else f"; {_change(alone)} on the wire that gradsync takes by itself"
    return f"{record.cell.name}, against one group, a step takes {', '.join(gains)}{own}."
