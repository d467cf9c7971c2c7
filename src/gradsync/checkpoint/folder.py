"""Checkpoints in a folder that all ranks see: either complete or absent, and verified before they are used.

::

    root/step-00000100/manifest.json          what it is, with the size and hash of every file below
                       manifest.sha256        the hash of the manifest
                       shared.json            state that is the same on all ranks: written by rank 0
                       shared.safetensors
                       rank-00000.json        rank 0's own state
                       rank-00000.safetensors
         .writing-step-00000110-5f0c…         a checkpoint that is being written, or whose writer was killed
         .replaced-step-00000100-91ab…        the previous one of a step that is saved again
         .removed-step-00000080-c3d7…         one that is being removed

A save is a sequence of steps that all ranks take :func:`together`, so that a failure on one rank is a failure on all,
and earlier checkpoints stay untouched until the new one is complete. It appears and vanishes as a whole, by a rename.
The next save deletes hidden folders, except a replaced one without a successor: its writer was killed between two
renames, and it is still the checkpoint of its step.

The manifest is written last. ``manifest.sha256`` guards it, and is compared byte by byte; ``sha256sum -c`` reads it
too. So no byte in the folder can change unnoticed.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from gradsync.base.errors import ConfigurationError, MismatchError
from gradsync.checkpoint.files import (
    CorruptFileError,
    FileRecord,
    dump_json,
    fsync_directory,
    parse_json,
    read_file,
    read_tensors,
    read_verified,
    require_safetensors,
    verify_file,
    write_file,
    write_tensors,
)
from gradsync.checkpoint.tree import decode, encode
from gradsync.communicator import Communicator
from gradsync.communicator.agreement import refuse, together

__all__ = ["CheckpointFolder", "Loaded"]

# How long a folder that rank 0 has made may take to appear elsewhere: network file systems remember what was absent.
VISIBLE_WITHIN = 20.0

CHECKPOINT = re.compile(r"step-(\d{8,})")
HIDDEN = re.compile(r"\.(writing|replaced|removed)-step-(\d{8,})-[0-9a-f]{16}")

FORMAT = 1
MANIFEST = "manifest.json"
GUARD = "manifest.sha256"
SHARED_STEM = "shared"

Encoded = dict[str, tuple[Any, dict[str, torch.Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint that all ranks have verified, with its tensors on the CPU."""

    step: int
    world_size: int  # of the writer
    facts: dict[str, Any]
    shared: Any
    own: Any  # what this rank has saved; None if the writer had fewer ranks
    path: Path
    notes: list[str]  # why it is not the newest, in plain words


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description that a checkpoint holds of itself."""

    step: int
    world_size: int
    facts: dict[str, Any]
    files: dict[str, FileRecord]


class CheckpointFolder:
    """The checkpoints of one run. All ranks of ``communicator`` create one, with the same folder on a shared disk.

    ``keep``: how many checkpoints to keep. The last one written is always kept, and the others with the highest steps.
    Only one run at a time may save into a folder.
    """

    def __init__(self, root: Path | str, communicator: Communicator, *, keep: int = 2) -> None:
        require_safetensors()
        if not isinstance(keep, int) or keep < 1:
            raise ConfigurationError(f"keep must be a whole number of at least 1, got {keep!r}")
        self.root = Path(root)
        self.keep = keep
        self._communicator = communicator

    def __repr__(self) -> str:
        return f"CheckpointFolder({str(self.root)!r}, {self._communicator!r}, keep={self.keep})"

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, ascending; not verified. On this rank alone."""
        return list(find_checkpoints(self.root))

    # -- save ---------------------------------------------------------------------------------------------------------

    def save(self, step: int, *, shared: Any, own: Any, facts: dict[str, Any]) -> Path:
        """Write the checkpoint of ``step``, replacing an existing one. Collective; returns its folder.

        ``shared`` and ``facts``, which is JSON, are taken from rank 0; ``own`` from every rank. If this raises, it
        raises on all ranks, and all checkpoints are as before.
        """
        communicator, what = self._communicator, f"save the checkpoint of step {step}"
        encoded, steps = together(communicator, what, lambda: self._prepare(step, shared, own, facts))
        if len(set(steps)) > 1:
            raise MismatchError(f"all ranks must save the same step, but ranks 0, 1, … save {steps}")
        _, names = together(communicator, what, lambda: (None, self._create_hidden(step)))
        folder = self.root / names[0]

        def undo() -> None:
            if communicator.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)

        _, written = together(communicator, what, lambda: (None, self._write(folder, encoded)), undo)
        blind = [rank for rank, records in enumerate(written) if records is None]
        if blind:
            refuse(communicator, _not_shared(self.root, _unseen_by(blind)), undo)
        files: dict[str, FileRecord] = {name: each for records in written for name, each in records.items()}
        manifest = Manifest(step=step, world_size=communicator.world_size, facts=facts, files=files)
        final, _ = together(communicator, what, lambda: (self._finish(folder, manifest), None), undo)
        return final

    def _prepare(self, step: int, shared: Any, own: Any, facts: dict[str, Any]) -> tuple[Encoded, Any]:
        """Everything that can be refused before the disk is touched."""
        if type(step) is not int or step < 0:
            raise ConfigurationError(f"step must be a whole number of at least 0, got {step!r}")
        encoded = {rank_stem(self._communicator.rank): encode(own)}
        if self._communicator.rank == 0:
            encoded[SHARED_STEM] = encode(shared)
            try:
                dump_json(facts)
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigurationError(f"facts must be what JSON can say: {error}") from error
            if not isinstance(facts, dict):
                raise ConfigurationError(f"facts must be a dict, got {type(facts).__name__}")
        return encoded, step

    def _create_hidden(self, step: int) -> str:
        """The name of a new folder that rank 0 has made. Leftovers of others are deleted."""
        if self._communicator.rank > 0:
            return ""
        sweep(self.root)
        folder = _hidden(self.root, "writing", step)
        folder.mkdir(parents=True)
        return folder.name

    def _write(self, folder: Path, encoded: Encoded) -> dict[str, FileRecord] | None:
        """Size and hash of what this rank has written; None if it does not see the folder that rank 0 has made.

        The name of that folder is random, so it cannot be another one.
        """
        deadline = time.monotonic() + VISIBLE_WITHIN
        while not folder.is_dir():
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)
            with contextlib.suppress(OSError):
                os.listdir(self.root.parent)  # makes a network file system ask its server again
        records: dict[str, FileRecord] = {}
        for stem, (structure, tensors) in encoded.items():
            structure_name, tensors_name = file_names(stem)
            records[structure_name] = write_file(folder / structure_name, [dump_json(structure)])
            records[tensors_name] = write_tensors(folder / tensors_name, tensors)
        fsync_directory(folder)
        return records

    def _finish(self, folder: Path, manifest: Manifest) -> Path:
        if self._communicator.rank == 0:
            write_manifest(folder, manifest)
            fsync_directory(folder)
            publish(folder, manifest.step)
            remove_old(self.root, keep=self.keep, newest=manifest.step)
        return self.root / step_name(manifest.step)

    # -- load ---------------------------------------------------------------------------------------------------------

    def load(self, step: int | None = None) -> Loaded | None:
        """Load the newest checkpoint in which all ranks find every file as it was written. Collective.

        None if there is no checkpoint at all. If the newest is damaged, the one before is taken, and ``notes`` says
        so; if all are, :class:`CorruptFileError` says what is wrong with each. With ``step``, that one or an error.
        """
        candidates = self._candidates(step)
        damaged: dict[str, str] = {}
        for number, path in reversed(candidates.items()):
            name, communicator = step_name(number), self._communicator
            loaded, outcomes = together(communicator, f"load {name}", partial(self._read, path, number))
            if len({outcome["manifest"] for outcome in outcomes if "manifest" in outcome}) > 1:
                raise _not_shared(self.root, f"ranks see different checkpoints named {name}")
            reason = _reason(outcomes)
            if reason is None and loaded is not None:
                notes = [f"{bad} is damaged ({why}), so {name} is used" for bad, why in damaged.items()]
                if path.name != name:
                    notes.append(f"{name} was being saved again when the run ended, so the one before is used")
                return replace(loaded, notes=notes)
            damaged[name] = str(reason)
        if not damaged:
            return None
        every = "; ".join(f"{name} ({why})" for name, why in reversed(damaged.items()))
        which = "the checkpoint is" if step is not None else "there is no good checkpoint, all are"
        raise CorruptFileError(self.root, f"{which} damaged: {every}. Restore one from a copy, or start over")

    def _candidates(self, step: int | None) -> dict[int, Path]:
        """The checkpoints to try, by step, ascending: those that rank 0 sees."""
        _, answers = together(
            self._communicator,
            f"look for checkpoints in {self.root}",
            lambda: (None, [repr(step), [[number, path.name] for number, path in find_checkpoints(self.root).items()]]),
        )
        wanted, listings = zip(*answers, strict=True)
        if any(wish != wanted[0] for wish in wanted):
            raise MismatchError(f"all ranks must load the same step, but ranks 0, 1, … load {', '.join(wanted)}")
        blind = [rank for rank, listing in enumerate(listings) if not listing]
        if blind and len(blind) < len(listings):
            raise _not_shared(self.root, _unseen_by(blind))
        found = {number: self.root / name for number, name in listings[0]}
        if step is None:
            return found
        if step not in found:
            there = ", ".join(map(str, found)) or "none"
            raise ConfigurationError(f"{self.root} has no checkpoint of step {step!r}. There are: {there}")
        return {step: found[step]}

    def _read(self, folder: Path, step: int) -> tuple[Loaded | None, dict[str, str]]:
        """What this rank needs, and a share of the files that nobody needs: all ranks together verify everything."""
        rank, world_size = self._communicator.rank, self._communicator.world_size
        try:
            manifest, digest = read_manifest(folder, step)
            for other in range(rank + world_size, manifest.world_size, world_size):
                for name in file_names(rank_stem(other)):
                    verify_file(folder / name, manifest.files[name])
            shared = _read_tree(folder, SHARED_STEM, manifest)
            own = _read_tree(folder, rank_stem(rank), manifest) if rank < manifest.world_size else None
        except CorruptFileError as error:
            return None, {"damage": f"{error.path.name}: {error.reason}"}
        writers, facts = manifest.world_size, manifest.facts
        loaded = Loaded(step=step, world_size=writers, facts=facts, shared=shared, own=own, path=folder, notes=[])
        return loaded, {"manifest": digest}


def _read_tree(folder: Path, stem: str, manifest: Manifest) -> Any:
    structure, tensors = (folder / name for name in file_names(stem))
    node = parse_json(structure, read_verified(structure, manifest.files[structure.name]))
    verify_file(tensors, manifest.files[tensors.name])
    return decode(node, read_tensors(tensors))


def _reason(outcomes: list[dict[str, str]]) -> str | None:
    """What is wrong with a checkpoint, in the words of the ranks that found it."""
    ranks: dict[str, list[str]] = {}
    for rank, outcome in enumerate(outcomes):
        if "damage" in outcome:
            ranks.setdefault(outcome["damage"], []).append(str(rank))
    if len(ranks) <= 1:
        return next(iter(ranks), None)
    return "; ".join(f"{damage} on rank {', '.join(who)}" for damage, who in ranks.items())


def _unseen_by(ranks: list[int]) -> str:
    return f"not seen by rank {', '.join(map(str, ranks))} is what others have there"


def _not_shared(root: Path, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the checkpoint folder {root.absolute()} must be on a shared disk, but {what}. Pass a path on a disk that all "
        "ranks see, such as a network file system"
    )


# -- names and renames ------------------------------------------------------------------------------------------------


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


def publish(folder: Path, step: int) -> None:
    """Give a hidden folder, complete and synced, its final name."""
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


# -- the manifest -----------------------------------------------------------------------------------------------------


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
