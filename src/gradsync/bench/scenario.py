"""What a scenario is: one question, the runs that answer it, and the words, tables and pictures of the answer.

To add one, write a class with these members in a file of ``scenarios/`` and name it in the list there. ``measure`` runs
inside every rank of a cell, on a process group that is there already::

    class MyScenario:
        name, title = "my-scenario", "What it is about"
        source = "where the question comes from"
        question = "what a user wants to know"

        def cells(self, *, quick: bool) -> list[Cell]:
            return [Cell(name="2 hosts, 400 Mbit/s", hosts=2, rate="400mbit", seconds=30)]

        def measure(self, rounds: Rounds) -> None:
            rounds.limits(compute="no wrapper", wire={"*": workload.wire_seconds(rounds.cell)})
            rounds.run({"no wrapper": step, "DDP stock": other_step, "gradsync": third_step})

``tables``, ``pictures`` and ``reading`` get the cells that have samples, and must bear that some variants are missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from matplotlib.figure import Figure

from gradsync.bench.measure import Rounds
from gradsync.bench.record import LIMITS, Cell, CellRecord

__all__ = ["Picture", "Scenario", "Table", "timing_table"]

MISSING = "–"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table as it is shown: text in rows and columns, the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure and the sentence to read it by. The ``slug`` names its files."""

    slug: str
    title: str
    figure: Figure = field(repr=False)
    reading: str


class Scenario(Protocol):
    """One question about the cost of synchronization."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def source(self) -> str: ...

    @property
    def question(self) -> str: ...

    def cells(self, *, quick: bool) -> Sequence[Cell]: ...

    def measure(self, rounds: Rounds) -> None: ...

    def tables(self, records: Sequence[CellRecord]) -> Sequence[Table]: ...

    def pictures(self, records: Sequence[CellRecord]) -> Sequence[Picture]: ...

    def reading(self, records: Sequence[CellRecord]) -> str: ...


def timing_table(record: CellRecord, *, baseline: str, note: str = "") -> Table:
    """Every variant of a cell: its time and spread, its ratio to the baseline, its bytes, its distance to the limit."""
    notes = [f"The baseline is {baseline}.", *([note] if note else [])]
    limited = LIMITS in record.facts
    columns = ["variant", "median ms", "p5–p95 ms", "time / baseline", "sent MB"]
    rows = []
    for variant in record.samples:
        summary = record.summary(variant)
        compared = str(record.ratio(variant, baseline)) if baseline in record.samples else MISSING
        row = [
            variant,
            f"{summary.median * 1e3:.1f}",
            f"{summary.p5 * 1e3:.1f}–{summary.p95 * 1e3:.1f}",
            compared,
            f"{record.sent(variant) / 1e6:.2f}",
        ]
        if limited:
            limit = record.limit(variant)
            row.append(MISSING if limit is None else f"{summary.median / limit:.2f}")
        rows.append(row)
    columns += ["time / limit"] * limited
    rows += [[variant, reason, *[MISSING] * (len(columns) - 2)] for variant, reason in record.absent.items()]
    return Table(title=f"{record.cell.name} ({record.rounds} rounds)", columns=columns, rows=rows, note=" ".join(notes))
