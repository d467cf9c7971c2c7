"""Tensors in a safetensors file: written by hand, read by the ``safetensors`` package.

The package writes a file in one go, from outside Python: the file could neither be hashed while it is written nor be
synced, and a full disk would not raise an ``OSError``. Writing takes only a header and bytes; reading, where a wrong
offset would be a wrong weight, is left to the package.
"""

import ctypes
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.checkpoint.files import CHUNK, CorruptFileError, FileRecord, write_file

__all__ = ["DTYPE_NAMES", "RESERVED_NAME", "read_tensors", "require_safetensors", "write_tensors"]

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
