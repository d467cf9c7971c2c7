"""``gradsync explain FOLDER``: says in words what the files in a folder tell."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from gradsync.base.errors import ConfigurationError
from gradsync.health.watch.dump import explain_dumps, find_dumps, read_dump
from gradsync.observe.recording import find_recordings, read_models, read_recordings
from gradsync.tools.cli.options import refusing

__all__ = ["explain"]


def _dumps(folder: Path, model: int) -> Any:
    return "\n".join(explain_dumps([read_dump(path) for path in find_dumps(folder)]))


def _recordings(folder: Path, model: int) -> Any:
    from gradsync.observe.explain import explain_recordings
    from gradsync.tools.cli.explained import shown

    # Without a choice of the user's, what is refused is the folder.
    with refusing("--model") if model else nullcontext():
        recordings = read_recordings(folder, model)
    explanation = explain_recordings(recordings)
    return shown(explanation) if sys.stdout.isatty() else str(explanation)


# What a folder may hold: whether it does, and what is said of it then. The first that fits is taken.
KINDS: tuple[tuple[Callable[[Path], object], Callable[[Path, int], Any]], ...] = (
    (find_dumps, _dumps),
    (find_recordings, _recordings),
)


def _trace(folder: Path, path: Path) -> int:
    from gradsync.observe.trace import write_trace

    models = read_models(folder) or [read_recordings(folder)]
    return write_trace([each for recordings in models for each in recordings], path)


def explain(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="The folder of a run, of a recording (GRADSYNC_RECORD), or where ranks wrote what they were in "
            "(GRADSYNC_DUMP, SIGUSR1).",
        ),
    ],
    model: Annotated[int, typer.Option(min=0, help="Which of the models that a process has wrapped, from 0 on.")] = 0,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write a trace of all ranks to this file, for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Say where the time of a step goes, and what to change.

    Of a training that hangs: who waits for whom.
    """
    from rich.console import Console

    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is no folder")
    if perfetto is not None and not perfetto.resolve().parent.is_dir():
        raise ConfigurationError(f"--perfetto {perfetto} would lie in a folder that does not exist")
    if perfetto is not None:
        print(f"{_trace(folder, perfetto)} slices of all ranks in {perfetto}: open it in ui.perfetto.dev\n")
    for holds, tell in KINDS:
        if holds(folder):
            told = tell(folder, model)
            if isinstance(told, str):
                print(told)
            else:
                Console(highlight=False).print(told)
            return
    raise ConfigurationError(
        f"nothing in {folder} can be explained: run the training with GRADSYNC_RECORD={folder} (gradsync train records "
        f"by itself); or, for one that hangs, with GRADSYNC_DUMP={folder}, and send one rank SIGUSR1"
    )
