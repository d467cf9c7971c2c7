"""Sending fewer bytes: what a step gains from it, and what compressing costs.

These are steps with real compute between hosts. All compression runs inside the timed step. torch's own hooks
get the same settings: fp16, and PowerSGD of the same rank with warm start and error feedback, which compresses from its
third step on. Steps follow each other without a pause, because that is where compression has to be fast enough.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradsync.observe.charts.kinds import draw_rows
from gradsync.tools.bench.measure import CellRounds
from gradsync.tools.bench.peers import (
    AUTO,
    DDP,
    OURS,
    TUNED,
    Gradsync,
    NoWrapper,
    Peer,
)
from gradsync.tools.bench.record import Cell, CellRecord
from gradsync.tools.bench.scenario import (
    Scenario,
    Table,
    cell,
    colour_of,
    known,
    or_missing,
    table_of,
)
from gradsync.tools.bench.workload import Lineup, tuned_ddp

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Compression"]

REDUCTIONS = ("bf16", "fp16", "int8", "int4", "sign", "low-rank:4", "top-k:0.01", AUTO)
FP16, POWER = "DDP tuned, fp16 hook", "DDP tuned, PowerSGD 4"
RATES = ("100mbit", "400mbit", "1gbit")
STEPS_A_SAMPLE = 3
# Over Gloo, PowerSGD's collectives of one bucket meet those of another on the other rank, and the process is aborted.
ONE_BUCKET = 1000.0


def variant_name(reduction: str) -> str:
    return f"{OURS} {reduction}"


SHOWN = (FP16, POWER, OURS, *map(variant_name, REDUCTIONS))


class Compression(Scenario):
    """Time and bytes of a step, by what is sent, over the rate of the link."""

    name = "compression"
    title = "Compression: fewer bytes, and what they cost"
    source = "After Agarwal et al., On the Utility of Gradient Compression in Distributed Training Systems, MLSys 2022."
    question = "From which link on does a step become faster if fewer bytes are sent?"
    baseline = TUNED
    slug, height, shared = "steps", 4.8, False

    def cells(self, *, quick: bool) -> list[Cell]:
        each = (len(REDUCTIONS) + 5) * STEPS_A_SAMPLE * 0.8
        options = {"layers": 6, "width": 256, "batch": 2, "length": 128}
        fixed: dict[str, Any] = {"quick": quick, "each": each, "warmup": 2, "rounds": (5, 15), "options": options}
        hosts_and_rates = [(2, "400mbit")] if quick else [*((2, rate) for rate in RATES), (4, "1gbit")]
        return [cell("GPT 5M", ranks=hosts, hosts=hosts, rate=rate, **fixed) for hosts, rate in hosts_and_rates]

    def measure(self, rounds: CellRounds) -> None:
        lineup = Lineup(rounds)
        tuned = tuned_ddp(rounds, lineup.workload)
        peers: list[Peer] = [
            NoWrapper(),
            tuned,
            DDP(name=FP16, tuned=True, hook="fp16", bucket_mb=tuned.bucket_mb),
            DDP(name=POWER, tuned=True, hook="powersgd", bucket_mb=ONE_BUCKET),
            Gradsync(),
            *(Gradsync(name=variant_name(reduction), reduction=reduction) for reduction in REDUCTIONS),
        ]
        for peer in peers:
            lineup.add(peer, times=STEPS_A_SAMPLE)
        lineup.settle()
        rounds.fact(AUTO, lineup.model(variant_name(AUTO)).synchronizer.reduction.report)
        lineup.run()

    def note(self, record: CellRecord) -> str:
        auto = f" Auto: {record.facts[AUTO]}." if AUTO in record.facts else ""
        return f"Times and bytes of {STEPS_A_SAMPLE} steps.{auto}"

    def draw(self, axes: "Axes", record: CellRecord) -> None:
        rows = {name: record.ms(name) / STEPS_A_SAMPLE for name in record.samples}
        draw_rows(axes, rows, {name: colour_of(name) for name in rows}, form="{:.0f} ms", bold=variant_name("int8"))
        axes.set_xlabel("ms a step (median)")

    def overview(self, records: Sequence[CellRecord]) -> list[Table]:
        def faster(record: CellRecord, name: str) -> str:
            return or_missing(record.times(TUNED, name), "{:.2f}×")

        def fewer(record: CellRecord, name: str) -> str | None:
            known = {name, OURS} <= record.samples.keys() and record.sent(OURS)
            return f"{record.sent(name) / record.sent(OURS):.3f}" if known else None

        columns = {("float32" if name == OURS else name): name for name in SHOWN}
        tables = {"Against tuned DDP, times as fast": faster, "Bytes, of gradsync's in float32": fewer}
        return [
            table_of(
                title,
                [{"cell": each.cell.name, **{key: words(each, columns[key]) for key in columns}} for each in records],
            )
            for title, words in tables.items()
        ]

    def message(self, records: Sequence[CellRecord]) -> str:
        gains = known({record.cell.name: _best(record) for record in records})
        if not gains:
            return self.title
        cell = max(gains, key=lambda name: gains[name])
        return f"With fewer bytes a step is up to {gains[cell]:.1f} times as fast ({cell})"

    def sentence(self, record: CellRecord) -> str:
        gain = _best(record)
        return "" if gain is None else f"{record.cell.name}: up to {gain:.2f} times as fast as tuned DDP."


def _best(record: CellRecord) -> float | None:
    gains = known({name: record.times(TUNED, name) for name in map(variant_name, REDUCTIONS)})
    return max(gains.values(), default=None)
