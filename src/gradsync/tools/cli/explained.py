"""An explanation in a terminal: tables, bars in the colours of the reports, the first advice in bold."""

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gradsync.observe.charts.numbers import duration
from gradsync.observe.explain import Explanation
from gradsync.observe.explain.explanation import (
    ADVICE_TITLE,
    BAR,
    BUCKET_COLUMNS,
    HIDDEN,
    MEANINGS,
    NAMES,
    bar,
    gained,
)

__all__ = ["shown"]

COLOURS = {
    "data": "bright_black",
    "loop": "white",
    "forward": "bright_blue",
    "backward": "blue",
    "waiting": "yellow",
    "turn": "magenta",
    "exposed": "red",
    "optimizer": "green",
    "other": "bright_black",
}


def shown(explanation: Explanation) -> Any:
    """What to print."""
    parts: list[Any] = [Text(explanation.headline, style="bold"), Text(), _split(explanation), Text()]
    parts += [Text(line) for line in explanation.who()]
    if explanation.split.buckets:
        parts += [Text(), _buckets(explanation)]
    return Group(*parts, Text(), *_advice(explanation))


def _table(*columns: str, right: int = 0, wraps: int | None = None) -> Table:
    table = Table(box=None, show_header=any(columns), padding=(0, 1), header_style="dim", pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(
            name, justify="right" if 0 < number <= right else "left", no_wrap=wraps is None or number != wraps
        )
    return table


def _split(explanation: Explanation) -> Table:
    mean = explanation.split.mean
    table = _table("", "", "", "", "", right=2)
    for name, seconds in explanation.parts():
        share = seconds / mean.step if mean.step else 0.0
        table.add_row(
            NAMES.get(name, name),
            duration(seconds),
            f"{share:.1%}",
            Text(f"{bar(share):{BAR}}", style=COLOURS[name]),
            Text(MEANINGS[name], style="dim"),
        )
    hidden = Text(HIDDEN, style="dim")
    table.add_row(Text("hidden wire", style="dim"), duration(mean.hidden), "", "", hidden)
    return table


def _buckets(explanation: Explanation) -> Table:
    table = _table(*BUCKET_COLUMNS, right=5)
    for *numbers, names in explanation.bucket_rows():
        table.add_row(*numbers, Text(names, style="dim"))
    left = len(explanation.split.buckets) - len(table.rows)
    if left > 0:
        table.caption = f"and {left} more; those that keep the wire busy longest are shown"
        table.caption_justify = "left"
    return table


def _advice(explanation: Explanation) -> list[Any]:
    if not explanation.advice:
        return [Text(line) for line in explanation.advice_lines()]
    table = _table("", "", wraps=1)
    for number, advice in enumerate(explanation.advice, 1):
        style = "bold" if number == 1 else ""
        table.add_row(f"{number}.", Text(f"saves {gained(advice)}", style="bold green"))
        table.add_row("", Text(advice.cause, style=style))
        table.add_row("", Text(f"→ {advice.change}", style="cyan"))
    return [Text(ADVICE_TITLE, style="bold"), table]
