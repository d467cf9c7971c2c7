"""A checkpoint's folder: the manifest, the file names, and the renames by which it appears or vanishes as a whole.

::

    step-00000100                                       a checkpoint
    .writing-step-00000110-5f0c…                        one that is being written, or whose writer was killed
    .replaced-step-00000100-91ab…                       the previous one of a step that is saved again
    .removed-step-00000080-c3d7…                        one that is being removed

The next save deletes hidden folders. The exception is a replaced one without a successor: its writer was killed between
two renames, and it is still the checkpoint of its step.

The manifest lists the contents, with the size and hash of each file. It is written last. ``manifest.sha256`` guards the
manifest itself, and is compared byte by byte; ``sha256sum -c manifest.sha256`` reads it too. So no byte in the folder
can change unnoticed.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradsync.base.errors import ConfigurationError
from gradsync.checkpoint.files import CorruptFileError, FileRecord, fsync_directory, parse_json, read_file, write_file

__all__ = [
    "FORMAT",
    "Manifest",
    "create_hidden",
    "file_names",
    "find_checkpoints",
    "publish",
    "rank_stem",
    "read_manifest",
    "remove_old",
    "step_name",
    "sweep",
    "write_manifest",
]

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


FORMAT = 1
MANIFEST = "manifest.json"
GUARD = "manifest.sha256"
SHARED_STEM = "shared"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description that a checkpoint holds of itself."""

    step: int
    world_size: int
    facts: dict[str, Any]
    files: Mapping[str, FileRecord]


def rank_stem(rank: int) -> str:
    """What the names of a rank's own files begin with."""
    return f"rank-{rank:05d}"


def file_names(stem: str) -> tuple[str, str]:
    """The two files of a tree: its structure and its tensors."""
    return f"{stem}.json", f"{stem}.safetensors"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and its guard."""
    content = {"format": FORMAT, **dataclasses.asdict(manifest)}
    data = json.dumps(content, allow_nan=False, indent=1).encode() + b"\n"
    record = write_file(folder / MANIFEST, [data])
    write_file(folder / GUARD, [_guard(record["sha256"])])


def read_manifest(folder: Path, step: int) -> tuple[Manifest, str]:
    """The manifest of the checkpoint of ``step``, and its hash. Verified, as opposed to the files it lists."""
    path = folder / MANIFEST
    data = read_file(path)
    digest = hashlib.sha256(data).hexdigest()
    if read_file(folder / GUARD) != _guard(digest):
        raise CorruptFileError(path, f"hash differs from the one in {GUARD}")
    content = parse_json(path, data)
    found = content.pop("format", None) if isinstance(content, dict) else None
    if found != FORMAT:
        raise ConfigurationError(
            f"{folder} has checkpoint format {found!r}, and this gradsync reads format {FORMAT}. Update gradsync, or "
            "load an older checkpoint by its step"
        )
    try:
        manifest = Manifest(**content)
    except TypeError as error:
        raise CorruptFileError(path, f"not a manifest ({error})") from error
    if manifest.step != step:
        raise CorruptFileError(path, f"is that of step {manifest.step}; was the folder renamed?")
    stems = [SHARED_STEM, *map(rank_stem, range(manifest.world_size))]
    if set(manifest.files) != {name for stem in stems for name in file_names(stem)}:
        raise CorruptFileError(path, f"does not list the files of {manifest.world_size} ranks")
    return manifest, digest


def _guard(digest: str) -> bytes:
    return f"{digest}  {MANIFEST}\n".encode()
