"""``gradsync explain FOLDER``: says in words what the files in a folder tell."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gradsync.errors import ConfigurationError
from gradsync.watch.explain import explain_dumps, find_dumps, read_dump

__all__ = ["explain"]


def _dumps(folder: Path) -> list[str]:
    return explain_dumps([read_dump(path) for path in find_dumps(folder)])


# What a folder may hold: whether it does, and what is said of it then. The first that fits is taken.
KINDS: tuple[tuple[Callable[[Path], object], Callable[[Path], list[str]]], ...] = ((find_dumps, _dumps),)


def explain(
    folder: Annotated[Path, typer.Argument(help="Where ranks wrote what they were in (GRADSYNC_DUMP, SIGUSR1).")],
) -> None:
    """Say who waits for whom in a training that hangs."""
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is no folder")
    for holds, tell in KINDS:
        if holds(folder):
            print("\n".join(tell(folder)))
            return
    raise ConfigurationError(
        f"nothing in {folder} can be explained: start the ranks with GRADSYNC_DUMP={folder}, and when they hang, send "
        "one of them SIGUSR1"
    )
