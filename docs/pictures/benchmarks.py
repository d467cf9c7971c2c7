"""Fills docs/benchmarks.md, or another page, from the results of one run: its pictures, tables and readings.

    gradsync bench all --out results
    python docs/pictures/benchmarks.py results
    gradsync bench faults --out faults
    python docs/pictures/benchmarks.py faults fault-tests.md
    gradsync bench all --device cuda --out nccl
    python docs/pictures/benchmarks.py nccl

A run over NCCL has markers and a folder of pictures of its own. Everything between the two markers of the page is
written anew, and the folder holds the pictures of that run and no others, so that the page never mixes runs. Pictures
are PNG: they have a white ground, also where a reader's page is dark.
"""

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradsync.errors import ConfigurationError, GradsyncError
from gradsync.tools.bench.record import ResultFolder
from gradsync.tools.bench.report import Section, build_report
from gradsync.tools.bench.scenario import Table
from gradsync.tools.bench.scenarios import SCENARIOS

# The pages that are filled, and the folders of their pictures.
PAGES = {"benchmarks.md": "bench", "fault-tests.md": "faults"}
BEGIN, END = "<!-- results begin -->", "<!-- results end -->"
# Of a run over NCCL, in the names of markers and folders.
NCCL = "nccl"


def fill(folder: ResultFolder, page: Path, pictures: Path) -> None:
    """Write the run in ``folder`` into ``page``, and its pictures into ``pictures``, which lies beside or below it."""
    over_nccl = _is_over_nccl(folder)
    before, after = _frame(page, over_nccl)
    sections = build_report(folder, SCENARIOS)
    slugs = [drawing.slug for section in sections for drawing in section.drawings]
    if not slugs:
        raise ConfigurationError(f"{folder.path} has no picture to show: no cell of it was measured. Run it again")
    pictures.mkdir(parents=True, exist_ok=True)
    for old in pictures.glob("*.png"):
        old.unlink()
    for slug in slugs:
        shutil.copyfile(folder.figures / f"{slug}.png", pictures / f"{slug}.png")
    links = pictures.relative_to(page.parent).as_posix()
    shown = [line for section in sections for line in _section_lines(section, links, over_nccl)]
    lines = [*_run_lines(folder.config), *shown]
    page.write_text("\n".join([before, *lines, after]), encoding="utf-8")


def _is_over_nccl(folder: ResultFolder) -> bool:
    return bool(folder.config.get("device") == "cuda")


def _frame(page: Path, over_nccl: bool) -> tuple[str, str]:
    """What stands before the results, and what after."""
    text = page.read_text(encoding="utf-8")
    begin, end = (each.replace("results", f"{NCCL} results") if over_nccl else each for each in (BEGIN, END))
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ConfigurationError(f"{page.name} needs the lines {begin} and {end}, once each and in this order")
    return text[: text.index(begin) + len(begin)], text[text.index(end) :]


def _run_lines(config: Mapping[str, Any]) -> Iterator[str]:
    """Where the numbers come from. Not the command as it was typed: that may name folders of a machine."""
    names = config.get("scenarios", [])
    over_nccl = config.get("device") == "cuda"
    known = [each.name for each in SCENARIOS if not over_nccl or each.gpu_cells(quick=True)]
    what = "all" if len(names) == len(known) else names[0] if len(names) == 1 else "SCENARIO"
    options = f"{' --device cuda' if over_nccl else ''}{' --quick' if config.get('quick') else ''}"
    rows = {
        "command": f"`gradsync bench {what}{options}`",
        "when": config.get("started", "unknown"),
        "commit": config.get("commit", "unknown"),
        **config.get("machine", {}),
        **config.get("versions", {}),
    }
    yield ""
    yield "| run | |"
    yield "|---|---|"
    for name, value in rows.items():
        yield f"| {_cell(name)} | {_cell(value)} |"
    yield ""


def _section_lines(section: Section, links: str, over_nccl: bool) -> Iterator[str]:
    yield f"### {'NCCL: ' if over_nccl else ''}{section.title}"
    yield ""
    yield f"*{section.question}* {section.source}"
    yield ""
    yield f"    gradsync bench {section.name}{' --device cuda' if over_nccl else ''}"
    yield ""
    for place in section.places:
        yield place
        yield ""
    for note in section.notes:
        yield f"**{note}**"
        yield ""
    if section.reading:
        yield section.reading
        yield ""
    for drawing in section.drawings:
        yield f"![{drawing.title}]({links}/{drawing.slug}.png)"
        yield ""
        if drawing.reading != section.reading:
            yield drawing.reading
            yield ""
    if section.tables:
        yield "<details><summary>Tables</summary>"
        yield ""
        for table in section.tables:
            yield from _table_lines(table)
        yield "</details>"
        yield ""


def _table_lines(table: Table) -> Iterator[str]:
    yield f"**{table.title}**"
    yield ""
    yield _row(table.columns)
    yield _row(["---", *["---:"] * (len(table.columns) - 1)])
    for row in table.rows:
        yield _row(row)
    yield ""
    if table.note:
        yield table.note
        yield ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def main() -> None:
    results, page = (*sys.argv[1:], *["benchmarks.md"] * (len(sys.argv) == 2), "", "")[:2]
    if len(sys.argv) not in (2, 3) or page not in PAGES:
        pages = " or ".join(PAGES)
        sys.exit(f"usage: python docs/pictures/benchmarks.py FOLDER [PAGE]: results of gradsync bench, and {pages}")
    here = Path(__file__).parent
    try:
        folder = ResultFolder.open(Path(results))
        pictures = PAGES[page] + (f"-{NCCL}" if _is_over_nccl(folder) else "")
        fill(folder, here.parent / page, here / pictures)
    except (GradsyncError, OSError) as error:
        sys.exit(f"benchmarks.py: {error}")


if __name__ == "__main__":
    main()
