"""Results as pictures and one page, and in the terminal: ``build_report(folder, scenarios)`` makes them of raw lines.

The page is self-contained. It can be rebuilt at any time, even for an interrupted run: it then shows what was measured
until then, and says so.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from gradsync.observe.charts.canvas import style
from gradsync.observe.charts.numbers import duration
from gradsync.observe.charts.page import page_svg, render, svg_file
from gradsync.tools.bench.record import Cell, CellRecord, ResultFolder
from gradsync.tools.bench.scenario import Picture, Scenario, Table

__all__ = ["REPORT", "BenchScreen", "CellProgress", "Section", "build_report"]

REPORT = "report.html"
FILE_COLUMNS = 160


@dataclass(kw_only=True)
class Section:
    """A scenario on the page, with the results that exist."""

    name: str
    title: str
    source: str
    question: str
    # Where ranks had GPUs, and which.
    places: list[str] = field(default_factory=list)
    reading: str = ""
    drawings: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: bool = False


def build_report(folder: ResultFolder, scenarios: Sequence[Scenario]) -> list[Section]:
    """Draws the pictures, writes the results and the page, and returns what is on it."""
    config = folder.config
    asked = config.get("scenarios", [])
    with style():
        sections = [_section(folder, scenario) for scenario in scenarios if scenario.name in asked]
    page = render(
        Path(__file__).parent / "templates" / "report.html",
        config=config,
        sections=sections,
        unknown=sorted(set(asked) - {scenario.name for scenario in scenarios}),
    )
    (folder.path / REPORT).write_text(page)
    return sections


def _section(folder: ResultFolder, scenario: Scenario) -> Section:
    records = folder.records(scenario.name)
    section = Section(name=scenario.name, title=scenario.title, source=scenario.source, question=scenario.question)
    section.notes = [note for record in records if (note := _note(record))] or [] if records else ["Not run."]
    section.places = list(dict.fromkeys(words for record in records if (words := _place(record))))
    section.failed = any(record.outcome == "failed" for record in records)
    usable = [record for record in records if record.samples]
    if usable:
        try:
            _present(section, scenario, usable, folder)
        except Exception as error:
            # A scenario that cannot show half of its data must not take the page of the others with it.
            section.failed = True
            section.notes.append(f"This could not be drawn: {type(error).__name__}: {error}")
    folder.write_result(scenario.name, _result(section, records))
    return section


def _present(section: Section, scenario: Scenario, records: Sequence[CellRecord], folder: ResultFolder) -> None:
    section.tables = list(scenario.tables(records))
    section.reading = scenario.reading(records)
    for picture in scenario.pictures(records):
        slug = f"{scenario.name}-{picture.slug}"
        svg = svg_file(picture.figure, slug)
        (folder.figures / f"{slug}.svg").write_text(svg)
        picture.figure.savefig(folder.figures / f"{slug}.png")
        part = page_svg(svg, slug=slug, title=picture.title)
        section.drawings.append(dataclasses.replace(picture, slug=slug, svg=part))


def _place(record: CellRecord) -> str:
    cell = record.cell
    if not cell.sharing:
        return ""
    where = cell.sharing if cell.sharing.startswith("one") else f"{cell.ranks} {cell.sharing}"
    return f"{cell.transport}: {where}" + (f", {record.facts['gpu']}" if "gpu" in record.facts else "")


def _note(record: CellRecord) -> str:
    if record.outcome == "done":
        return ""
    words = {"skipped": "was skipped", "failed": "failed", "interrupted": "was interrupted"}
    rounds = f" after {record.rounds} of {record.cell.rounds} rounds" if record.outcome != "skipped" else ""
    reason = f": {record.reason}" if record.reason else ""
    return f"{record.cell.name} {words.get(record.outcome, record.outcome)}{rounds}{reason}"


def _result(section: Section, records: Sequence[CellRecord]) -> dict[str, Any]:
    texts = {key: getattr(section, key) for key in ("title", "question", "source", "places", "reading", "notes")}
    tables = [dataclasses.asdict(table) for table in section.tables]
    return {"scenario": section.name, **texts, "tables": tables, "cells": [_cell_result(record) for record in records]}


def _cell_result(record: CellRecord) -> dict[str, Any]:
    return {
        "cell": dataclasses.asdict(record.cell),
        "outcome": record.outcome,
        "reason": record.reason,
        "facts": record.facts,
        "absent": record.absent,
        "variants": {
            variant: {
                **dataclasses.asdict(record.summary(variant)),
                "sent": record.sent(variant),
                "limit": record.limit(variant),
            }
            for variant in record.samples
        },
    }


class CellProgress:
    """Rewrites one line. Rank 0 of the cell calls it between rounds, so it draws nothing by itself meanwhile."""

    def __init__(self, console: Console, label: str, later: float) -> None:
        self._console = console
        self._label = label
        self._later = later
        self._began = time.monotonic()

    def advance(self, done: int, total: int) -> None:
        if not self._console.is_terminal:
            return
        left = (time.monotonic() - self._began) / done * (total - done) + self._later
        text = f"{self._label} · round {done} of {total} · {duration(round(left))} left"
        self._line(text)

    def finish(self) -> None:
        if self._console.is_terminal:
            self._line("")

    def _line(self, text: str) -> None:
        width = self._console.width - 1
        self._console.file.write("\r" + text[:width].ljust(width) + "\r")
        self._console.file.flush()


class BenchScreen:
    """The terminal, or a file of plain lines."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = Console(highlight=False) if console is None else console
        if not self.console.is_terminal:
            # Nobody's terminal has 80 columns here: tables in a file keep their lines whole.
            self.console.width = FILE_COLUMNS

    def scenario(self, scenario: Scenario, seconds: float) -> None:
        self.console.print(
            Text(f"{scenario.name}: {scenario.question} (about {duration(round(seconds))})", style="bold")
        )

    def cell(self, scenario: Scenario, cell: Cell, later: float) -> CellProgress:
        if not self.console.is_terminal:
            self.console.print(Text(f"  {cell.name} …"))
        return CellProgress(self.console, f"  {scenario.name} · {cell.name}", later)

    def note(self, text: str) -> None:
        self.console.print(Text(f"  {text}", style="yellow"))

    def results(self, sections: Sequence[Section]) -> None:
        for section in sections:
            self.console.print()
            self.console.print(Text(section.title, style="bold"))
            for place in section.places:
                self.console.print(Text(place))
            for table in section.tables:
                self._table(table.title, table.columns, table.rows)
            if section.reading:
                self.console.print(Text(section.reading))
            for note in section.notes:
                self.console.print(Text(note, style="yellow"))

    def _table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = RichTable(box=SIMPLE_HEAD, show_edge=False, title=title, title_justify="left", title_style="italic")
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in rows:
            style = "blue" if row[0].startswith("gradsync") else None
            table.add_row(*(Text(value) for value in row), style=style)
        self.console.print(table)
