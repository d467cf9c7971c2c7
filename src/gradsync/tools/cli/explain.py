"""``gradsync explain FOLDER``: says what the files in a folder tell; in a terminal with tables, bars and colours."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from gradsync.base.errors import ConfigurationError
from gradsync.health.watch.dump import explain_dumps, find_dumps, read_dump
from gradsync.observe.explain import Explanation, explain_recordings
from gradsync.observe.explain.explanation import ADVICE_TITLE, BAR, BUCKET_COLUMNS, bar, gained
from gradsync.observe.recording import Recording, find_recordings, read_models, read_recordings
from gradsync.tools.cli.failure_message import refusing

__all__ = ["explain", "shown"]

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


def _trace(folder: Path, path: Path) -> int:
    from gradsync.observe.trace import write_trace

    return write_trace(_all_models(folder), path)


def _kineto(folder: Path, traces: Path) -> int:
    from gradsync.observe.kineto import write_kineto

    return len(write_kineto(_all_models(folder), traces))


def _all_models(folder: Path) -> list[Recording]:
    models = read_models(folder) or [read_recordings(folder)]
    return [each for recordings in models for each in recordings]


def explain(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="The folder of a run, of a recording (GRADSYNC_RECORD), or of the states that ranks wrote after "
            "SIGUSR1 (GRADSYNC_DUMP).",
        ),
    ],
    model: Annotated[int, typer.Option(min=0, help="Number of the wrapped model in each process, from 0.")] = 0,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write a trace of all ranks to this file, for ui.perfetto.dev.")
    ] = None,
    kineto: Annotated[
        Path | None, typer.Option(help="Write a trace of each rank to this folder, as torch.profiler does, for HTA.")
    ] = None,
) -> None:
    """Show where the time of a step goes, and what to change.

    For a run that hangs, show which rank waits for which.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is no folder")
    if perfetto is not None and not perfetto.resolve().parent.is_dir():
        raise ConfigurationError(f"--perfetto {perfetto} would lie in a folder that does not exist")
    if perfetto is not None:
        print(f"{_trace(folder, perfetto)} slices of all ranks in {perfetto}: open it in ui.perfetto.dev\n")
    if kineto is not None:
        print(f"{_kineto(folder, kineto)} traces, one of each rank, in {kineto}: HTA and ui.perfetto.dev read them\n")
    if dumps := find_dumps(folder):
        print("\n".join(explain_dumps([read_dump(path) for path in dumps])))
    elif find_recordings(folder):
        # Without a choice of the user's, what is refused is the folder.
        with refusing("--model") if model else nullcontext():
            recordings = read_recordings(folder, model)
        explanation = explain_recordings(recordings)
        if sys.stdout.isatty():
            Console(highlight=False).print(shown(explanation))
        else:
            print(explanation)
    else:
        raise ConfigurationError(
            f"nothing in {folder} can be explained: run the training with GRADSYNC_RECORD={folder} (gradsync train "
            f"records by itself); or, for one that hangs, with GRADSYNC_DUMP={folder}, and send one rank SIGUSR1"
        )


def shown(explanation: Explanation) -> Any:
    """An explanation for a terminal: bars in the colours of the reports, the first advice in bold."""
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
    table = _table("", "", "", "", "", right=2)
    for name, share, (label, seconds, percent, meaning) in explanation.rows():
        drawn = Text(f"{bar(share):{BAR}}", style=COLOURS[name]) if percent else ""
        style = "" if percent else "dim"
        table.add_row(Text(label, style=style), seconds, percent, drawn, Text(meaning, style="dim"))
    return table


def _buckets(explanation: Explanation) -> Table:
    table = _table(*BUCKET_COLUMNS, right=5)
    for *numbers, names in explanation.bucket_rows():
        table.add_row(*numbers, Text(names, style="dim"))
    left = len(explanation.split.buckets) - len(table.rows)
    if left > 0:
        table.caption = f"and {left} more; those that keep the link busy longest are shown"
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
