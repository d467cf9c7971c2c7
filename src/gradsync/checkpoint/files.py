"""Durable files: flushed to disk before they get their name, and only read if size and hash match.

A file is hashed while it is written. The expected content is a :class:`FileRecord`, kept elsewhere. Bytes that differ
from those written raise :class:`CorruptFileError`.

Tensors are in safetensors files: written by hand, read by the ``safetensors`` package. The package writes a file in one
go, from outside Python: the file could neither be hashed while it is written nor be synced, and a full disk would not
raise an ``OSError``. Writing takes only a header and bytes; reading, where a wrong offset would be a wrong weight, is
left to the package.
"""

import contextlib
import ctypes
import errno
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

import torch

from gradsync.base.errors import ConfigurationError, GradsyncError
from gradsync.base.files import whole_file

__all__ = [
    "DTYPE_NAMES",
    "RESERVED_NAME",
    "CorruptFileError",
    "FileRecord",
    "dump_json",
    "fsync_directory",
    "parse_json",
    "read_file",
    "read_tensors",
    "read_verified",
    "require_safetensors",
    "verify_file",
    "write_file",
    "write_tensors",
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


# Those that every version of the package reads in the same way; gradsync.checkpoint.tree turns others into them.
DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}

# The format keeps it for texts about the file.
RESERVED_NAME = "__metadata__"

ALIGNMENT = 8


def require_safetensors() -> Any:
    """The ``safetensors`` package, or an error that says how to get it."""
    if sys.byteorder != "little":
        raise ConfigurationError("checkpoints are little-endian, as safetensors files are, and this machine is not")
    try:
        import safetensors
    except ImportError as error:
        raise ConfigurationError(
            "checkpoints need the safetensors package, which is not installed. Run: pip install gradsync[checkpoint]"
        ) from error
    return safetensors


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    """Write ``tensors``, from any device, one after the other: no more than one is in memory twice."""
    # The widest first: every tensor then lies at a multiple of its element's size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        dtype = DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    pieces = itertools.chain.from_iterable(map(_bytes_of, ordered.values()))
    return write_file(path, itertools.chain([len(text).to_bytes(8, "little"), text], pieces))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors in a file, on the CPU, in memory of their own."""
    safetensors = require_safetensors()
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            # Copied: what stays a view of the file fails much later, when the file is no longer there.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, safetensors.SafetensorError) as error:
        raise CorruptFileError(path, f"not a safetensors file ({error})") from error


def _bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The memory of a tensor, in pieces. Not through NumPy, which torch may be installed without."""
    dense = tensor.detach().cpu().contiguous()
    size = dense.numel() * dense.element_size()
    if size:
        memory = memoryview((ctypes.c_ubyte * size).from_address(dense.data_ptr()))
        for start in range(0, size, CHUNK):
            yield memory[start : start + CHUNK]
