"""Durable files: flushed to disk before they get their name, and only read if size and hash match.

A file is hashed while it is written. The expected content is a :class:`FileRecord`, kept elsewhere. Bytes that differ
from those written raise :class:`CorruptFileError`.
"""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from gradsync.base.errors import GradsyncError
from gradsync.base.files import whole_file

__all__ = [
    "CHUNK",
    "CorruptFileError",
    "FileRecord",
    "dump_json",
    "fsync_directory",
    "parse_json",
    "read_file",
    "read_verified",
    "verify_file",
    "write_file",
]

# Bytes that are read, written and hashed at a time. Large enough for the hash to run at its full speed.
CHUNK = 1 << 24


class CorruptFileError(GradsyncError):
    """The file on disk is not what was written. ``path`` is the file, ``reason`` says what is wrong with it."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(str(path), reason)
        self.path = Path(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class FileRecord(TypedDict):
    """The expected content of a file: its number of bytes, and their hash."""

    size: int
    sha256: str


# -- writing ----------------------------------------------------------------------------------------------------------


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write ``path``. When this returns, the file is complete and on disk; when it raises, it does not exist.

    Its entry in the folder is only on the disk after :func:`fsync_directory`, once for many files.
    """
    digest, size = hashlib.sha256(), 0
    with whole_file(path) as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size=size, sha256=digest.hexdigest())


def dump_json(value: Any) -> bytes:
    """``value`` as one line of JSON, in ASCII."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def fsync_directory(path: Path) -> None:
    """Put the entries of a folder on the disk: the names of new files, renamed and removed ones."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot; theirs are on the server when the call that made them returns.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


# -- reading ----------------------------------------------------------------------------------------------------------


def verify_file(path: Path, record: FileRecord) -> None:
    """Raise :class:`CorruptFileError` unless the file holds what the record says."""
    for _ in _verified_chunks(path, record):
        pass


def read_verified(path: Path, record: FileRecord) -> bytes:
    """The bytes of a small file: those that were hashed, not those of a second read."""
    return b"".join(_verified_chunks(path, record))


def read_file(path: Path) -> bytes:
    """The bytes of a small file, whatever they are."""
    with _opened(path) as file:
        return file.read()


def parse_json(path: Path, data: bytes) -> Any:
    """Parse ``data``, which was read from ``path``."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(path, f"not JSON ({error})") from error


def _verified_chunks(path: Path, record: FileRecord) -> Iterator[bytes]:
    digest = hashlib.sha256()
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != record["size"]:
            what = "truncated" if size < record["size"] else "too long"
            raise CorruptFileError(path, f"{what} ({size} instead of {record['size']} bytes)")
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            yield chunk
    if digest.hexdigest() != record["sha256"]:
        raise CorruptFileError(path, "hash differs")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file. One that the disk cannot read is as bad as a damaged one: an older checkpoint may be readable."""
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise CorruptFileError(path, "missing" if missing else f"cannot be read ({error.strerror})") from error
