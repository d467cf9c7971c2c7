"""The file names in a checkpoint folder, and the rename by which a checkpoint appears or vanishes as a whole.

::

    step-00000100                                       a checkpoint
    .writing-step-00000110-5f0c…                        one that is being written, or whose writer was killed
    .replaced-step-00000100-91ab…                       the previous one of a step that is saved again
    .removed-step-00000080-c3d7…                        one that is being removed

The next save deletes hidden folders. The exception is a replaced one without a successor: its writer was killed between
two renames, and it is still the checkpoint of its step.
"""

import contextlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from gradsync.checkpoint.files import fsync_directory

__all__ = ["create_hidden", "find_checkpoints", "publish", "remove_old", "step_name", "sweep"]

CHECKPOINT = re.compile(r"step-(\d{8,})")
HIDDEN = re.compile(r"\.(writing|replaced|removed)-step-(\d{8,})-[0-9a-f]{16}")


def step_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:08d}"


def find_checkpoints(root: Path) -> dict[int, Path]:
    """The checkpoints in ``root`` by step, ascending. Whether they are good is not looked at."""
    found = {
        int(match[1]): path for path, match in _matching(root, CHECKPOINT) if path.name == step_name(int(match[1]))
    }
    for path, match in _matching(root, HIDDEN):
        if match[1] == "replaced":
            found.setdefault(int(match[2]), path)
    return dict(sorted(found.items()))


def create_hidden(root: Path, step: int) -> Path:
    """Create a folder for the checkpoint of ``step``, with a unique name. Leftovers of others are deleted."""
    sweep(root)
    folder = _hidden(root, "writing", step)
    folder.mkdir(parents=True)
    return folder


def publish(folder: Path, step: int) -> None:
    """Give a folder that :func:`create_hidden` made, complete and synced, its final name."""
    root, final = folder.parent, folder.parent / step_name(step)
    if final.exists():
        os.rename(final, _hidden(root, "replaced", step))
    try:
        os.rename(folder, final)
    except OSError:
        sweep(root)
        raise
    fsync_directory(root)


def remove_old(root: Path, *, keep: int, newest: int) -> None:
    """Remove all checkpoints but that of step ``newest``, which was just written, and the ``keep - 1`` highest others.

    Also the one that it has replaced.
    """
    others = [(step, path) for step, path in find_checkpoints(root).items() if step != newest]
    for step, path in others[: max(0, len(others) - keep + 1)]:
        with _warning_of(path):
            # A folder that is half removed must not look like a checkpoint.
            os.rename(path, _hidden(root, "removed", step))
    sweep(root)


def sweep(root: Path) -> None:
    """Delete what killed writers have left, and restore what they were about to replace."""
    for path, match in _matching(root, HIDDEN):
        final = root / step_name(int(match[2]))
        with _warning_of(path):
            if match[1] == "replaced" and not final.exists():
                os.rename(path, final)
            else:
                shutil.rmtree(path)


@contextlib.contextmanager
def _warning_of(path: Path) -> Iterator[None]:
    """What cannot be tidied up costs space, not the checkpoint that is being saved."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{path}, which is no longer needed, could not be removed: {error}", stacklevel=4)


def _hidden(root: Path, purpose: Literal["writing", "replaced", "removed"], step: int) -> Path:
    return root / f".{purpose}-{step_name(step)}-{secrets.token_hex(8)}"


def _matching(root: Path, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    names = sorted(os.listdir(root)) if root.exists() else []
    matches = [(root / name, pattern.fullmatch(name)) for name in names]
    return [(path, match) for path, match in matches if match and path.is_dir() and not path.is_symlink()]
