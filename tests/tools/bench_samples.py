"""Made-up results of benchmarks: records, folders of them, and a scenario that writes them without any ranks."""

from collections.abc import Mapping, Sequence
from itertools import product, starmap
from pathlib import Path
from typing import Any

from gradsync.tools.bench.peers import PEERS
from gradsync.tools.bench.record import Cell, CellRecord, ResultFolder, RowFile, Sample
from gradsync.tools.bench.scenario import Picture, Scenario, gpu_cell
from gradsync.tools.bench.scenarios.accumulation import period_name
from gradsync.tools.bench.scenarios.buckets import AUTO, size_name
from gradsync.tools.bench.scenarios.communicators import GLOO
from gradsync.tools.bench.scenarios.communicators import variant_name as message_name
from gradsync.tools.bench.scenarios.compression import SHOWN
from gradsync.tools.bench.scenarios.convergence import PERIODS, RATES
from gradsync.tools.bench.scenarios.convergence import variant_name as trained_name
from gradsync.tools.bench.scenarios.time_to_loss import Far, TimeToLoss, reduction_name
from gradsync.tools.bench.workload import PROCESSOR, Pattern

__all__ = ["VARIANTS", "Written", "record_of", "stored", "trained"]

PARTS = ("forward", "backward", "exposed", "optimizer", "training", "loss", "named", "left", "peak bytes", PROCESSOR)
VARIANTS = {
    "accumulation": ["no wrapper", *map(" · ".join, product(("DDP", "Accelerate", "gradsync"), Pattern))],
    "overlap": ["no wrapper", "DDP tuned", "naive", "bucketed", "gradsync"],
    "next-forward": ["no wrapper", "DDP tuned", "gradsync", "gradsync sharded", "gradsync sharded, auto"],
    "compression": ["no wrapper", "DDP tuned", *SHOWN],
    "time-to-loss": [reduction_name(name, 0) for name in TimeToLoss.sent],
    "far": [reduction_name(name, 0) for name in Far.sent],
    "bucket-size": ["no wrapper", AUTO, *starmap(size_name, product(("gradsync", "DDP tuned"), (0.5, 1.0)))],
    "skip-sync": ["no wrapper", *starmap(period_name, product(("DDP tuned", "gradsync"), (1, 2, 4, 8)))],
    "scaling": ["no wrapper", "DDP tuned", "gradsync"],
    "convergence": list(starmap(trained_name, product(RATES, PERIODS, range(2)))),
    "round-robin": ["no wrapper", "1 group", "3 groups", "5 groups"],
    "wire": [message_name(GLOO, size) for size in (4096, 65536)],
    "peers": list(PEERS),
    "faults": ["gradsync", "DDP stock"],
}


def record_of(
    cell: Cell,
    seconds: Mapping[str, float | Sequence[float]],
    *,
    sent: Mapping[str, int] | None = None,
    parts: Mapping[str, Mapping[str, float]] | None = None,
    **facts: object,
) -> CellRecord:
    """Rounds that took these seconds, three where one number is given; every part took a tenth of it, if not told."""
    rounds = {name: [times] * 3 if isinstance(times, float) else times for name, times in seconds.items()}
    samples = {
        name: {
            number: Sample(
                seconds=time,
                sent=(sent or {}).get(name, 1000),
                parts=(parts or {}).get(name, dict.fromkeys(PARTS, time / 10)),
            )
            for number, time in enumerate(times)
        }
        for name, times in rounds.items()
    }
    return CellRecord(cell=cell, samples=samples, facts=dict(facts), outcome="done")


def trained(*, harm: float) -> CellRecord:
    """A cell of ``convergence`` in which averaging less often harms the larger batch so much for each iteration."""
    samples = {}
    for batch, period, seed in product(RATES, PERIODS, range(2)):
        extra = harm * (period - 1) if batch == 256 else 0.0
        samples[trained_name(batch, period, seed)] = {
            number: Sample(
                seconds=0.01, sent=1000, parts={"training": 0.008 / period, "loss": 4 - 0.1 * number + extra + seed}
            )
            for number in range(5)
        }
    return CellRecord(cell=Cell(name="here"), samples=samples, outcome="done")


def stored(path: Path, records: Mapping[str, Sequence[CellRecord]], **config: Any) -> ResultFolder:
    """The folder that a run with these records by scenario would have left."""
    folder = ResultFolder.create(path)
    known = {"scenarios": [*records], "quick": True, "machine": {"cores": 2}, "versions": {"a": "1"}}
    folder.write_config({**known, **config})
    for scenario, cells in records.items():
        with folder.rows(scenario) as rows:
            for record in cells:
                _write(rows, record)
    return folder


def _write(rows: RowFile, record: CellRecord) -> None:
    rows.cell(record.cell)
    for name, value in record.facts.items():
        rows.fact(name, value)
    for variant, reason in record.absent.items():
        rows.write("absent", variant=variant, reason=reason)
    for variant, samples in record.samples.items():
        for number, taken in samples.items():
            content = {"seconds": taken.seconds, "ranks": [taken.seconds], "sent": taken.sent}
            rows.write("sample", variant=variant, round=number, parts=dict(taken.parts), **content)
    rows.write("done")


class Written(Scenario):
    """Starts no ranks: writes all rounds of a cell, or one more where its rounds are trials."""

    name, title, source, question, slug, baseline = "written", "Written", "own", "What is there?", "written", "ours"

    def cells(self, *, quick: bool) -> list[Cell]:
        return [Cell(name="one", ranks=1, rounds=2), Cell(name="two", ranks=1, rounds=2)]

    def gpu_cells(self, *, quick: bool) -> list[Cell]:
        return [gpu_cell(f"{ranks} ranks", quick=quick, each=0.0, ranks=ranks) for ranks in (1, 2)]

    def drive(self, cell: Cell, place: Any, rows: RowFile, progress: Any) -> None:
        rows.fact("gpu", "NVIDIA H200")
        known = len(rows.known(cell).samples.get("ours", {}))
        for number in range(known, known + 1 if self.in_trials else cell.rounds):
            rows.write("sample", variant="ours", round=number, seconds=1.0 + number, ranks=[], sent=0, parts={})

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        return []
