"""The gain from sending fewer bytes, and the cost of compressing them: steps with real compute between hosts.

All compression runs inside the timed step. torch's own hooks get the same settings: fp16, and PowerSGD of the same rank
with warm start and error feedback, which compresses from its third step on. Steps follow each other without a pause,
because that is where compression has to be fast enough.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradsync.core.bucket.sizes import TUNED_AFTER
from gradsync.core.reduction import Auto
from gradsync.core.reduction.auto import DECIDED_AFTER
from gradsync.observe.charts.kinds import draw_rows
from gradsync.parallel.data_parallel import DistributedDataParallel
from gradsync.tools.bench.measure import Rounds, Step
from gradsync.tools.bench.measured import MeasuredScenario
from gradsync.tools.bench.peers import OURS, TUNED, Gradsync, HookedDDP, NoWrapper, Peer
from gradsync.tools.bench.record import Cell, CellRecord
from gradsync.tools.bench.scenario import Table, colour_of, known
from gradsync.tools.bench.windows import Pattern, repeated, settle, tuned_ddp, window_step
from gradsync.tools.bench.workload import RealWorkload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Compression"]

AUTO = "auto"
REDUCTIONS = ("bf16", "fp16", "int8", "int4", "sign", "low-rank:4", "top-k:0.01", AUTO)
FP16, POWER = "DDP tuned, fp16 hook", "DDP tuned, PowerSGD 4"
RATES = {"100mbit": "100 Mbit/s", "400mbit": "400 Mbit/s", "1gbit": "1 Gbit/s"}
STEPS_A_SAMPLE = 3
# Over Gloo, PowerSGD's collectives of one bucket meet those of another on the other rank, and the process is aborted.
ONE_BUCKET = 1000.0


def variant_name(reduction: str) -> str:
    return f"{OURS} {reduction}"


class Compression(MeasuredScenario):
    """Time and bytes of a step, by what is sent, over the rate of the link."""

    name = "compression"
    title = "Compression: fewer bytes, and what they cost"
    source = "After Agarwal et al., On the Utility of Gradient Compression in Distributed Training Systems, MLSys 2022."
    question = "From which link on does a step become faster if fewer bytes are sent?"
    baseline = TUNED
    slug, height, shared = "steps", 4.8, False

    def cells(self, *, quick: bool) -> list[Cell]:
        rounds = 5 if quick else 15
        hosts_and_rates = [(2, "400mbit")] if quick else [*((2, rate) for rate in RATES), (4, "1gbit")]
        return [
            Cell(
                name=f"GPT 5M, {hosts} hosts, {RATES[rate]}",
                ranks=hosts,
                hosts=hosts,
                rate=rate,
                warmup=2,
                rounds=rounds,
                seconds=(rounds + 8) * (len(REDUCTIONS) + 5) * STEPS_A_SAMPLE * 0.8,
                options={"layers": 6, "width": 256, "batch": 2, "length": 128},
            )
            for hosts, rate in hosts_and_rates
        ]

    def measure(self, rounds: Rounds) -> None:
        workload = RealWorkload(**rounds.cell.options)
        workload.note(rounds)
        tuned = tuned_ddp(rounds, workload)
        peers: list[Peer] = [
            NoWrapper(),
            tuned,
            HookedDDP(name=FP16, hook="fp16", bucket_mb=tuned.bucket_mb),
            HookedDDP(name=POWER, hook="powersgd", bucket_mb=ONE_BUCKET),
            Gradsync(),
            *(Gradsync(name=variant_name(reduction), reduction=reduction) for reduction in REDUCTIONS),
        ]
        variants: dict[str, Step] = {}
        for peer in peers:
            wrapped = workload.wrap(peer)
            step = window_step(wrapped, workload.forward, count=1, pattern=Pattern.EVERY)
            if isinstance(peer, Gradsync):
                settle(step, after=DECIDED_AFTER if peer.reduction == AUTO else TUNED_AFTER[-1])
            if isinstance(wrapped.model, DistributedDataParallel):
                reduction = wrapped.model.synchronizer.reduction
                if isinstance(reduction, Auto):
                    rounds.fact(AUTO, reduction.report)
            variants[peer.name] = repeated(step, STEPS_A_SAMPLE)
        rounds.run(variants)

    def note(self, record: CellRecord) -> str:
        auto = f" Auto: {record.facts[AUTO]}." if AUTO in record.facts else ""
        return f"Times and bytes of {STEPS_A_SAMPLE} steps.{auto}"

    def draw(self, axes: "Axes", record: CellRecord) -> None:
        rows = {name: record.ms(name) / STEPS_A_SAMPLE for name in record.samples}
        draw_rows(axes, rows, {name: colour_of(name) for name in rows}, form="{:.0f} ms", bold=variant_name("int8"))
        axes.set_xlabel("ms a step (median)")

    def overview(self, records: Sequence[CellRecord]) -> list[Table]:
        columns = ["cell", *("float32" if name == OURS else name for name in _shown())]
        faster = [[record.cell.name, *(_gain(record, name) for name in _shown())] for record in records]
        fewer = [[record.cell.name, *(_bytes(record, name) for name in _shown())] for record in records]
        return [
            Table(title="Against tuned DDP, times as fast", columns=columns, rows=faster),
            Table(title="Bytes, of gradsync's in float32", columns=columns, rows=fewer),
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


def _shown() -> list[str]:
    return [FP16, POWER, OURS, *map(variant_name, REDUCTIONS)]


def _gain(record: CellRecord, name: str) -> str:
    gain = record.times(TUNED, name)
    return "–" if gain is None else f"{gain:.2f}×"


def _bytes(record: CellRecord, name: str) -> str:
    if name not in record.samples or OURS not in record.samples or not record.sent(OURS):
        return "–"
    return f"{record.sent(name) / record.sent(OURS):.3f}"


def _best(record: CellRecord) -> float | None:
    gains = known({name: record.times(TUNED, name) for name in map(variant_name, REDUCTIONS)})
    return max(gains.values(), default=None)
