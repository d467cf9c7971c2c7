"""The DDP paper's round-robin process groups: buckets take turns on 1, 3 and 5 groups.

A group reduces its buckets one after another. Several groups keep more buckets in flight at a time, which helps where
one bucket leaves the link idle (many small ones), and cannot help where the link is full (few large ones).
"""

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist

from gradsync.communicator.round_robin import RoundRobinCommunicator
from gradsync.observe.charts.canvas import canvas, colour, legend
from gradsync.observe.charts.kinds import draw_bars
from gradsync.tools.bench.measure import Rounds
from gradsync.tools.bench.measured import MeasuredScenario
from gradsync.tools.bench.peers import ALONE, Gradsync, NoWrapper, Peer
from gradsync.tools.bench.record import Cell, CellRecord
from gradsync.tools.bench.scenario import Picture, gpu_cell, known, times_of
from gradsync.tools.bench.statistics import percent
from gradsync.tools.bench.windows import MIB, plain_step
from gradsync.tools.bench.workload import EmulatedWorkload, paper_models

__all__ = ["RoundRobin"]

OWN = "gradsync, its own wire"
# Where only latency counts, times are those of threads that are woken, and need many rounds; so the steps are short.
MODELS = {
    "many small buckets": {"parameters": 250_000, "layers": 8, "seconds": 0.018, "buckets": 25, "times": 3},
    "few large buckets": {"parameters": 500_000, "layers": 6, "seconds": 0.04, "buckets": 4, "times": 1},
}
RATES = {"many small buckets": None, "few large buckets": "400mbit"}
# Over NCCL, of ResNet-50 and BERT-base.
GPU_BUCKETS = (4, 8)
# How many groups, in blues from light to dark: they are all gradsync.
SHADES = {1: "light-blue", 3: "mid-blue", 5: "blue"}


def variant_name(groups: int) -> str:
    return f"{groups} group{'s' if groups > 1 else ''}"


class RoundRobin(MeasuredScenario):
    """One, three and five groups, where latency counts and where bandwidth counts."""

    name = "round-robin"
    title = "Round-robin groups: when several process groups are better than one"
    source = (
        "After Li et al., PyTorch Distributed, VLDB 2020 (three groups: 33 % less for BERT over NCCL, else nothing)."
    )
    question = "Is a step faster if buckets take turns on several process groups?"
    baseline = variant_name(1)

    def cells(self, *, quick: bool) -> list[Cell]:
        cells = []
        for model, rate in RATES.items():
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

    def gpu_cells(self, *, quick: bool) -> list[Cell]:
        return [
            gpu_cell(
                f"{options['model']}, 2 ranks, NCCL",
                quick=quick,
                step_seconds=7 * options["seconds"],
                options={**options, "buckets": buckets},
            )
            for options, buckets in zip(paper_models(quick=quick), GPU_BUCKETS, strict=True)
        ]

    def measure(self, rounds: Rounds) -> None:
        workload = EmulatedWorkload.of(rounds)
        workload.note(rounds)
        size = workload.nbytes / rounds.cell.options["buckets"] / MIB
        rounds.fact("bucket MiB", size)
        everybody = dist.group.WORLD
        assert everybody is not None
        peers: list[Peer] = [NoWrapper()]
        for groups in SHADES:
            turns = partial(RoundRobinCommunicator.over, everybody, groups)
            peers.append(Gradsync(name=variant_name(groups), bucket_mb=size, communicator=turns))
        peers.append(Gradsync(name=OWN, bucket_mb=size))
        rounds.run({peer.name: plain_step(workload, peer) for peer in peers})

    def note(self, record: CellRecord) -> str:
        size = record.facts.get("bucket MiB")
        same = f"all but {ALONE} are gradsync, with the same buckets."
        return "" if size is None else f"{record.cell.transport}, buckets of {size:.2f} MiB; {same}"

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        title, cells = _message(records), [record.cell.name for record in records]
        figure, (axes,) = canvas(title, height=4.0)
        shades = {variant_name(count): colour(shade) for count, shade in SHADES.items()} | {OWN: colour("green")}
        bars = [times_of(name, [(record, name) for record in records], colour=shade) for name, shade in shades.items()]
        draw_bars(axes, cells, bars, form="{:.0f}")
        axes.set_xticks(range(len(cells)), cells, fontsize=10)
        axes.set_ylabel("ms a step (median, p5–p95)")
        legend([axes])
        return [Picture(slug="groups", title=title, figure=figure, reading=self.reading(records))]

    def sentence(self, record: CellRecord) -> str:
        one = variant_name(1)
        several = known({count: record.times(variant_name(count), one) for count in SHADES if count > 1})
        gains = [f"{_change(times)} with {count} groups" for count, times in several.items()]
        alone = record.times(OWN, one)
        own = "" if alone is None else f"; {_change(alone)} on the wire that gradsync takes by itself"
        return f"{record.cell.name}, against one group, a step takes {', '.join(gains)}{own}."


def _message(records: Sequence[CellRecord]) -> str:
    three = known({each.cell.options["model"]: each.times(variant_name(3), variant_name(1)) for each in records})
    gains = [f"{_change(times)} with {model}" for model, times in three.items()]
    return f"Three groups in turn: a step takes {', '.join(gains)}" if gains else "Several groups in turn"


def _change(times: float) -> str:
    if abs(1 - times) < 0.005:
        return "as long"
    return f"{percent(abs(1 - times))} {'less' if times < 1 else 'more'}"
