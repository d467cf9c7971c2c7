"""The DDP paper's breakdown of an iteration: what overlapping communication with backward hides.

Naive sends every gradient separately after backward, bucketed sends them in buckets after backward, gradsync and DDP
send buckets during backward. Exposed communication is how much longer backward takes than without a wrapper, in the
same round; gradsync's Timeline measures it inside the engine, and is shown next to it in the table.
"""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradsync.core.engine.policy import Schedule
from gradsync.observe.charts.kinds import draw_stacks
from gradsync.observe.timeline import Timeline
from gradsync.tools.bench.measure import Parts, Rounds, Step
from gradsync.tools.bench.measured import MeasuredScenario
from gradsync.tools.bench.peers import ALONE, OURS, TUNED, Gradsync, NoWrapper
from gradsync.tools.bench.record import Cell, CellRecord
from gradsync.tools.bench.scenario import MISSING, Table, gpu_cell, known, timing_table
from gradsync.tools.bench.statistics import percent
from gradsync.tools.bench.windows import settle, timed_step, tuned_ddp
from gradsync.tools.bench.workload import EmulatedWorkload, paper_models

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Overlap"]

# Of the parameters.
SCALES = {"ResNet-50": 0.03, "BERT-base": 0.007}
NAIVE, BUCKETED = "naive", "bucketed"
SHOWN = (NAIVE, BUCKETED, TUNED, OURS)
SCHEDULES: dict[str, Schedule] = {NAIVE: "naive", BUCKETED: "bucketed", OURS: "overlapped"}
PARTS = ("forward", "backward", "exposed", "optimizer")
LABELS = {part: "exposed communication" if part == "exposed" else part for part in PARTS}


class Overlap(MeasuredScenario):
    """Forward, backward, exposed communication and optimizer, with and without overlap."""

    name = "overlap"
    title = "Overlap: how much of the communication backward hides"
    source = (
        "After the latency breakdown of Li et al., PyTorch Distributed, VLDB 2020 (overlap saves, Gloo: 26.8 % of "
        "ResNet-50, 21.5 % of BERT; NCCL: 38.0 %, 35.2 %)."
    )
    question = "Where does the time of a step go, and how much of the wire can be hidden behind backward?"
    slug, height = "breakdown", 3.9

    def cells(self, *, quick: bool) -> list[Cell]:
        rounds = 30 if quick else 100
        return [
            Cell(
                name=f"{model}, 2 hosts, 400 Mbit/s",
                hosts=2,
                rate="400mbit",
                rounds=rounds,
                seconds=(rounds + 5) * 0.9 + 5,
                options={"model": model, "parameters": scale, "seconds": 0.065},
            )
            for model, scale in SCALES.items()
        ]

    def gpu_cells(self, *, quick: bool) -> list[Cell]:
        return [
            gpu_cell(f"{model}, 2 ranks, NCCL", quick=quick, step_seconds=8 * options["seconds"], options=options)
            for options in paper_models(quick=quick)
            for model in [options["model"]]
        ]

    def measure(self, rounds: Rounds) -> None:
        workload = EmulatedWorkload.of(rounds)
        workload.note(rounds)
        variants: dict[str, Step] = {
            peer.name: timed_step(workload.wrap(peer), workload.forward, rounds.device)
            for peer in (NoWrapper(), tuned_ddp(rounds, workload))
        }
        for name, schedule in SCHEDULES.items():
            timeline = Timeline(keep=1)
            wrapped = workload.wrap(Gradsync(name=name, schedule=schedule, observer=timeline))
            variants[name] = timed_step(wrapped, workload.forward, rounds.device, timeline)
        # Without overlap there is nothing to choose.
        settle(variants[OURS])
        rounds.run(variants)

    def tables(self, records: Sequence[CellRecord]) -> list[Table]:
        return [table for record in records for table in (_breakdown(record), timing_table(record, baseline=BUCKETED))]

    def draw(self, axes: "Axes", record: CellRecord) -> None:
        shown = [name for name in SHOWN if name in record.samples] or list(record.samples)
        unit = BUCKETED if BUCKETED in record.samples else shown[0]
        whole = record.summary(unit).median
        parts = [_parts(record, name) for name in shown]
        stacks = {LABELS[part]: [max(each[part], 0.0) / whole for each in parts] for part in PARTS}
        draw_stacks(axes, shown, stacks, [f"{record.ms(name):.0f} ms" for name in shown])
        axes.set_xlabel(f"1 = a step of {unit}, without overlap")

    def message(self, records: Sequence[CellRecord]) -> str:
        """What overlap alone saves."""
        times = known({record.cell.options.get("model"): record.times(OURS, BUCKETED) for record in records})
        gains = [f"{percent(1 - share)} of a step of {model}" for model, share in times.items()]
        return f"Overlapping communication with backward saves {' and '.join(gains)}" if gains else "Parts of a step"

    def sentence(self, record: CellRecord) -> str:
        against = known({name: record.times(name, BUCKETED) for name in (NAIVE, TUNED, OURS)})
        parts = [f"{name} {times:.2f}" for name, times in against.items()]
        return f"{record.cell.name}, time of a step against buckets sent after backward: {', '.join(parts)}."


def _parts(record: CellRecord, variant: str) -> dict[str, float]:
    """Median seconds of the parts, where backward is what it takes alone and the rest of it is exposed wire."""
    alone = record.samples.get(ALONE, {})
    backward = {number: _whole_backward(sample.parts) for number, sample in record.samples[variant].items()}
    exposed = [whole - alone[number].parts["backward"] for number, whole in backward.items() if number in alone]
    waited = statistics.median(exposed) if exposed else record.part(variant, "exposed")
    parts = {part: record.part(variant, part) for part in PARTS}
    return {**parts, "backward": statistics.median(backward.values()) - waited, "exposed": waited}


def _whole_backward(parts: Parts) -> float:
    return parts["backward"] + parts["exposed"]


def _breakdown(record: CellRecord) -> Table:
    rows = []
    for variant in (ALONE, *SHOWN):
        if variant in record.samples:
            parts = _parts(record, variant)
            seen = f"{record.part(variant, 'exposed') * 1e3:.1f}" if variant in SCHEDULES else MISSING
            rows.append([variant, *(f"{parts[part] * 1e3:.1f}" for part in PARTS), seen])
    title, columns = f"{record.cell.name}: parts of a step, median ms", ["variant", *PARTS, "exposed by Timeline"]
    return Table(title=title, columns=columns, rows=rows)
