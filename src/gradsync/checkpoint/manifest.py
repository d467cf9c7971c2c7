"""The manifest of a checkpoint: its contents, with the size and hash of each of its files. It is written last.

``manifest.sha256`` guards the manifest itself, and is compared byte by byte; ``sha256sum -c manifest.sha256`` reads it
too. So no byte in the folder can change unnoticed.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsync.base.errors import ConfigurationError
from gradsync.checkpoint.files import CorruptFileError, FileRecord, parse_json, read_file, write_file

__all__ = ["FORMAT", "Manifest", "file_names", "rank_stem", "read_manifest", "write_manifest"]

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
