"""Sources of text: the standard library, local files and folders, datasets of Hugging Face.

A source yields documents as bytes and knows, without reading them, which files they are in: the token file built from
it is named after those.
"""

import hashlib
import itertools
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gradsync.base.errors import ConfigurationError
from gradsync.base.extras import import_extra

__all__ = ["TextSource", "blocks_of", "explained", "open_source", "stamp_of"]

STDLIB_BYTES = 16_000_000
# Not read into the source "stdlib": tests, what is installed beside the library, and data with the suffix of code.
STDLIB_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "idlelib", "pydoc_data", "turtledemo"}
SUFFIXES = (".txt", ".md", ".py", ".jsonl")
# A file is read in blocks of about this size, cut at line ends, so that memory does not grow with it.
BLOCK_BYTES = 64_000_000
KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


def open_source(spec: str) -> "TextSource":
    """The text that ``spec`` names; nothing of it is read yet.

    ``"stdlib"``
        the Python files of the running Python's standard library, up to 16 MB.
    a file
        its text; of a ``.jsonl`` file the field ``text`` of every line.
    a folder
        all ``.txt``, ``.md``, ``.py`` and ``.jsonl`` files in it and below; names that begin with a dot are left out.
    ``hf:NAME[@CONFIG][:SPLIT[:COLUMN]]``
        a dataset of the hub, or a local file or folder that the library datasets reads.
    """
    if spec == "stdlib":
        return _open_stdlib()
    if spec.startswith("hf:"):
        return HuggingFaceSource.parse(spec)
    path = Path(spec).expanduser()
    if path.is_file():
        return FileSource(name=spec, files=(path,))
    if path.is_dir():
        files = tuple(each for each in _files_below(path) if each.suffix in SUFFIXES)
        if not files:
            raise ConfigurationError(
                f"the folder {spec} has no text: expected files ending in {', '.join(SUFFIXES)}, in it or below"
            )
        return FileSource(name=spec, files=files)
    raise ConfigurationError(
        f"there is no text source {spec!r}. Expected 'stdlib', a text file, a folder with text files, or "
        "hf:NAME[:SPLIT[:COLUMN]] for a dataset of Hugging Face"
    )


def stamp_of(files: Iterable[Path]) -> str:
    """A name for what files hold, from their own names, sizes and times of change."""
    digest = hashlib.sha256()
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
        digest.update(f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@contextmanager
def explained(what: str, advice: str = "") -> Iterator[None]:
    """Turn whatever another library raises inside, be it a KeyError, into one line about what it was given."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationError(f"{what}: {type(error).__name__}: {reason}{advice}") from error


# -- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """Local files, in the order given. A file of more than 64 MB becomes several documents."""

    name: str
    files: Sequence[Path]

    @property
    def description(self) -> str:
        size = sum(path.stat().st_size for path in self.files)
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return f"{self.name}: {files}, {size / 1e6:.1f} MB"

    @property
    def stamp(self) -> str:
        return stamp_of(self.files)

    def __iter__(self) -> Iterator[bytes]:
        for path in self.files:
            try:
                with path.open("rb") as file:
                    yield from _texts_in(file) if path.suffix == ".jsonl" else blocks_of(file, BLOCK_BYTES)
            except OSError as error:
                raise ConfigurationError(f"cannot read {path}: {error.strerror}. Repair or remove the file") from error


def blocks_of(file: BinaryIO, least: int) -> Iterator[bytes]:
    """What a file holds, in blocks that end with the first line end after a number of bytes."""
    while block := file.read(least):
        yield block + file.readline()


def _texts_in(file: BinaryIO) -> Iterator[bytes]:
    """The texts of a file that has a JSON object in every line."""
    for number, line in enumerate(file, start=1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigurationError(f"line {number} of {file.name} is no JSON: {error}") from error
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            came = f"the fields {', '.join(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
            raise ConfigurationError(
                f'line {number} of {file.name} has {came}; expected an object with a string "text" in every line'
            )
        # JSON can spell half of a surrogate pair, which no encoding can.
        yield text.encode("utf-8", errors="replace")


def _files_below(folder: Path, *, skipped: Set[str] = frozenset()) -> list[Path]:
    """The files below, sorted by their names relative to the folder; without hidden ones and folders to skip."""

    def refuse(error: OSError) -> None:
        raise ConfigurationError(f"cannot read the folder {error.filename}: {error.strerror}") from error

    found = []
    for here, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [each for each in folders if not each.startswith(".") and each not in skipped]
        found += [Path(here, each) for each in names if not each.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _open_stdlib() -> FileSource:
    folder = Path(sysconfig.get_path("stdlib") or Path(os.__file__).parent)
    found = [path for path in _files_below(folder, skipped=STDLIB_SKIPPED) if path.suffix == ".py"]
    # Unreadable here is what a distribution has left out or linked to nowhere: not this user's doing.
    readable = [path for path in found if path.is_file() and os.access(path, os.R_OK)]
    sizes = itertools.accumulate(path.stat().st_size for path in readable)
    files = readable[: sum(size <= STDLIB_BYTES for size in sizes)]
    if not files:
        raise ConfigurationError(
            f"this Python has no standard library as text in {folder}. Name a text file or a folder instead"
        )
    return FileSource(name="stdlib", files=tuple(files))


# -- Hugging Face -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HuggingFaceSource:
    """A dataset that the library datasets loads.

    [Note: revisions] A dataset of the hub is known by its name alone: asking for its revision would need the network in
    every run. To get a newer one, remove the token file, ``TokenFile.path``.
    """

    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"

    @classmethod
    def parse(cls, spec: str) -> "HuggingFaceSource":
        """Read ``hf:NAME[@CONFIG][:SPLIT[:COLUMN]]``, where a split may be a slice like ``train[:1%]``."""
        name, *rest = re.split(r":(?![^\[]*\])", spec.removeprefix("hf:"))
        if not name or len(rest) > 2 or not all(rest):
            raise ConfigurationError(f"expected hf:NAME[@CONFIG][:SPLIT[:COLUMN]], got {spec!r}")
        config: str | None = None
        if "@" in name and not Path(name).expanduser().exists():
            name, _, config = name.rpartition("@")
        return cls(name=name, config=config, **dict(zip(("split", "column"), rest, strict=False)))

    @property
    def path(self) -> Path | None:
        """The path of a dataset that is local."""
        path = Path(self.name).expanduser()
        return path if path.exists() else None

    @property
    def description(self) -> str:
        config = f" ({self.config})" if self.config else ""
        return f"dataset {self.name}{config}: column {self.column} of {self.split}"

    @property
    def stamp(self) -> str:
        if self.path is None:
            return ""
        return stamp_of(_files_below(self.path) if self.path.is_dir() else [self.path])

    def __iter__(self) -> Iterator[bytes]:
        rows = self._load()
        if self.column not in rows.column_names:
            raise ConfigurationError(
                f"the dataset {self.name} has the columns {', '.join(rows.column_names)} and no {self.column!r}. Name "
                f"the column with text: hf:{self.name}:{self.split}:COLUMN"
            )
        for batch in rows.select_columns(self.column).iter(batch_size=1000):
            for text in batch[self.column]:
                if not isinstance(text, str):
                    raise ConfigurationError(
                        f"column {self.column} of the dataset {self.name} holds a {type(text).__name__}, expected text"
                    )
                yield text.encode("utf-8", errors="replace")

    def _load(self) -> Any:
        datasets = import_extra("datasets", f"the text source hf:{self.name}")
        path = self.path
        with explained(f"datasets cannot load split {self.split!r} of {self.name!r}"):
            if path is None:
                return datasets.load_dataset(self.name, self.config, split=self.split)
            if path.is_file():
                return datasets.load_dataset(KINDS.get(path.suffix, "text"), data_files=str(path), split=self.split)
            if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
                loaded = datasets.load_from_disk(str(path))
                # Splits by name, or rows that are no split of anything.
                if isinstance(loaded, dict) and self.split not in loaded:
                    raise ConfigurationError(
                        f"the dataset {self.name} has the splits {', '.join(loaded)} and no {self.split!r}. Name one: "
                        f"hf:{self.name}:SPLIT"
                    )
                return loaded[self.split] if isinstance(loaded, dict) else loaded
            return datasets.load_dataset(str(path), self.config, split=self.split)


# Documents, with a description for people and a stamp for the cache, which changes when the text may have changed.
TextSource = FileSource | HuggingFaceSource
