"""A result folder as pictures and one page: ``build_report(folder, scenarios)`` makes them from the raw lines.

The page is self-contained. It can be rebuilt at any time, even for an interrupted run: it then shows what was measured
until then, and says so.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradsync.observe.charts.canvas import style
from gradsync.observe.charts.page import page_svg, render, svg_file
from gradsync.tools.bench.record import CellRecord, ResultFolder
from gradsync.tools.bench.scenario import Picture, Scenario, Table

__all__ = ["REPORT", "Section", "build_report"]

REPORT = "report.html"


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
    gpu = "".join(f", {record.facts[name]}" for name in ("gpu",) if name in record.facts)
    return (
        f"{cell.transport}: {cell.sharing if cell.sharing.startswith('one') else f'{cell.ranks} {cell.sharing}'}{gpu}"
    )


def _note(record: CellRecord) -> str:
    if record.outcome == "done":
        return ""
    words = {"skipped": "was skipped", "failed": "failed", "interrupted": "was interrupted"}
    rounds = f" after {record.rounds} of {record.cell.rounds} rounds" if record.outcome != "skipped" else ""
    reason = f": {record.reason}" if record.reason else ""
    return f"{record.cell.name} {words.get(record.outcome, record.outcome)}{rounds}{reason}"


def _result(section: Section, records: Sequence[CellRecord]) -> dict[str, Any]:
    told = {key: getattr(section, key) for key in ("title", "question", "source", "places", "reading", "notes")}
    tables = [dataclasses.asdict(table) for table in section.tables]
    return {"scenario": section.name, **told, "tables": tables, "cells": [_cell_result(record) for record in records]}


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
