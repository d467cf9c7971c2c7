"""The screen while a benchmark runs: one line with the progress and the time left, then the tables."""

import time
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from gradsync.observe.charts.numbers import duration
from gradsync.tools.bench.record import Cell
from gradsync.tools.bench.report import Section
from gradsync.tools.bench.scenario import Scenario

__all__ = ["CellProgress", "Screen"]

FILE_COLUMNS = 160


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


class Screen:
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
