"""The DDP paper's breakdown of an iteration: what overlapping communication with backward hides.

Naive sends every gradient alone after backward, bucketed sends them in buckets after backward, gradsync and DDP send
buckets during backward. Exposed communication is what backward takes longer than it does without a wrapper, in the same
round; gradsync's Timeline reads it inside the engine, and stands beside it in the table.
"""

import statistics
from collections.abc import Sequence

from gradsync.bench.measure import Parts, Rounds, Step
from gradsync.bench.peers import DDP, Gradsync, NoWrapper
from gradsync.bench.record import EVERY, Cell, CellRecord
from gradsync.bench.scenario import ALONE, MISSING, OURS, TUNED, Picture, Table, timing_table
from gradsync.bench.statistics import percent
from gradsync.bench.tuning import best_bucket_mb
from gradsync.bench.windows import settle, timed_step
from gradsync.bench.workload import Workload
from gradsync.charts.canvas import canvas, legend
from gradsync.charts.kinds import draw_stacks
from gradsync.engine.policy import Schedule
from gradsync.lab.profile import bert_base, resnet50
from gradsync.timeline import Timeline

__all__ = ["Overlap"]

PROFILES = {"ResNet-50": resnet50, "BERT-base": bert_base}
NAIVE, BUCKETED = "naive", "bucketed"
SHOWN = (NAIVE, BUCKETED, TUNED, OURS)
SCHEDULES: dict[str, Schedule] = {NAIVE: "naive", BUCKETED: "bucketed", OURS: "overlapped"}
PARTS = ("forward", "backward", "exposed", "optimizer")
LABELS = {part: "exposed communication" if part == "exposed" else part for part in PARTS}


class Overlap:
    """Forward, backward, exposed communication and optimizer, with and without overlap."""

    name = "overlap"
    title = "Overlap: how much of the communication backward hides"
    source = (
        "After the latency breakdown of Li et al., PyTorch Distributed, VLDB 2020 (Gloo: 27 % ResNet-50, 22 % BERT)."
    )
    question = "Where does the time of a step go, and how much of the wire can be hidden behind backward?"

    def cells(self, *, quick: bool) -> list[Cell]:
        rounds = 30 if quick else 100
        settings = {
            "ResNet-50": {"parameters": 0.03, "seconds": 0.065},
            "BERT-base": {"parameters": 0.007, "seconds": 0.065},
        }
        return [
            Cell(
                name=f"{model}, 2 hosts, 400 Mbit/s",
                hosts=2,
                rate="400mbit",
                rounds=rounds,
                seconds=(rounds + 5) * 0.9 + 5,
                options={"model": model, **options},
            )
            for model, options in settings.items()
        ]

    def measure(self, rounds: Rounds) -> None:
        options = rounds.cell.options
        whole = PROFILES[options["model"]](seconds=options["seconds"])
        workload = Workload(profile=whole.scaled(parameters=options["parameters"]))
        rounds.fact("gradient bytes", workload.nbytes)
        rounds.limits(compute=ALONE, wire={EVERY: workload.wire_seconds(rounds.cell)})
        tuned = DDP(name=TUNED, tuned=True, bucket_mb=best_bucket_mb(rounds, workload))
        variants: dict[str, Step] = {
            ALONE: timed_step(workload.wrap(NoWrapper()), workload.forward),
            TUNED: timed_step(workload.wrap(tuned), workload.forward),
        }
        for name, schedule in SCHEDULES.items():
            timeline = Timeline(keep=1)
            wrapped = workload.wrap(Gradsync(name=name, schedule=schedule, observer=timeline))
            variants[name] = timed_step(wrapped, workload.forward, exposed=_Exposed(timeline))
        # Without overlap there is nothing to choose.
        settle(variants[OURS])
        rounds.run(variants)

    def tables(self, records: Sequence[CellRecord]) -> list[Table]:
        return [table for record in records for table in (_breakdown(record), timing_table(record, baseline=BUCKETED))]

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        title = _message(records)
        figure, axes = canvas(title, panels=[record.cell.name for record in records], height=3.9)
        for panel, record in zip(axes, records, strict=True):
            shown = [name for name in SHOWN if name in record.samples] or list(record.samples)
            unit = BUCKETED if BUCKETED in record.samples else shown[0]
            whole = record.summary(unit).median
            parts = {name: _parts(record, name) for name in shown}
            stacks = {LABELS[part]: [max(parts[name][part], 0.0) / whole for name in shown] for part in PARTS}
            totals = [f"{record.summary(name).median * 1e3:.0f} ms" for name in shown]
            draw_stacks(panel, shown, stacks, totals)
            panel.set_xlabel(f"1 = a step of {unit}, without overlap")
        legend(axes)
        return [Picture(slug="breakdown", title=title, figure=figure, reading=self.reading(records))]

    def reading(self, records: Sequence[CellRecord]) -> str:
        return " ".join(_saving(record) for record in records)


class _Exposed:
    """Seconds of the last synchronization that backward did not hide."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def __call__(self) -> float:
        last = self._timeline.last
        return 0.0 if last is None else last.exposed


def _parts(record: CellRecord, variant: str) -> dict[str, float]:
    """Median seconds of the parts, where backward is what it takes alone and the rest of it is exposed wire."""
    alone = record.samples.get(ALONE, {})
    mine = record.samples[variant]
    exposed = [
        _whole_backward(sample.parts) - alone[number].parts["backward"]
        for number, sample in mine.items()
        if number in alone
    ]
    waited = statistics.median(exposed) if exposed else record.part(variant, "exposed")
    whole = statistics.median(_whole_backward(sample.parts) for sample in mine.values())
    return {
        "forward": record.part(variant, "forward"),
        "backward": whole - waited,
        "exposed": waited,
        "optimizer": record.part(variant, "optimizer"),
    }


def _whole_backward(parts: Parts) -> float:
    return parts["backward"] + parts["exposed"]


def _breakdown(record: CellRecord) -> Table:
    rows = []
    for variant in (ALONE, *SHOWN):
        if variant in record.samples:
            parts = _parts(record, variant)
            seen = record.part(variant, "exposed")
            shown = [f"{parts[part] * 1e3:.1f}" for part in PARTS]
            rows.append([variant, *shown, f"{seen * 1e3:.1f}" if variant in (NAIVE, BUCKETED, OURS) else MISSING])
    title, columns = f"{record.cell.name}: parts of a step, median ms", ["variant", *PARTS, "exposed by Timeline"]
    return Table(title=title, columns=columns, rows=rows)


def _message(records: Sequence[CellRecord]) -> str:
    """The title: what overlap alone saves."""
    gains = [
        f"{percent(1 - times)} of a step of {record.cell.options['model']}"
        for record in records
        if (times := record.times(OURS, BUCKETED)) is not None
    ]
    return f"Overlapping communication with backward saves {' and '.join(gains)}" if gains else "Parts of a step"


def _saving(record: CellRecord) -> str:
    against = {name: record.times(name, BUCKETED) for name in (NAIVE, TUNED, OURS)}
    parts = [f"{name} {times:.2f}" for name, times in against.items() if times is not None]
    return f"{record.cell.name}, time of a step against buckets sent after backward: {', '.join(parts)}."
