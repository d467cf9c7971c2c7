"""Headers of collectives in shared memory: what each rank is about to run, and where its tensor is.

A header is a few numbers, because all ranks compare them in every collective; they are turned into text only when they
differ.
"""

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from gradsync.communicator.base import ReduceOp
from gradsync.communicator.shared_signals import HEADER_BYTES
from gradsync.communicator.wire import Shares

__all__ = ["Call", "all_somewhere", "describe_header", "detail_of", "differ", "places_in"]

_NOWHERE = -1
# Kind, detail, dtype and number of elements, which must be the same on all ranks; segment and offset, which may differ.
_HEADER = struct.Struct("=6q")
_SAME_BYTES = 4 * 8
assert _HEADER.size == HEADER_BYTES
_KINDS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
_KIND_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_OPERATIONS: tuple[ReduceOp, ...] = ("sum", "average", "max")
# The detail of shares that differ: a checksum of their sizes, above all operations.
_UNEVEN = 1 << 8
_DTYPES = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(dict.fromkeys(_DTYPES))}
_DTYPE_NAMES = {number: str(dtype) for dtype, number in _DTYPE_NUMBERS.items()}


class Call(NamedTuple):
    """The collective a rank wants. ``numel`` counts what must be equal on all ranks; ``describe`` is for errors."""

    kind: str
    detail: int
    dtype: torch.dtype
    numel: int
    describe: Callable[[], str]

    def header(self, segment: int = _NOWHERE, offset: int = 0) -> bytes:
        """What all ranks must agree on, and where the tensor lies in shared memory."""
        kind, dtype = _KIND_NUMBERS[self.kind], _DTYPE_NUMBERS[self.dtype]
        return _HEADER.pack(kind, self.detail, dtype, self.numel, segment, offset)


def detail_of(op: ReduceOp, shares: Shares = None) -> int:
    """The operation, and a number that tells sizes of shares apart."""
    checksum = 0 if shares is None else 1 + zlib.crc32(repr(shares).encode())
    return _OPERATIONS.index(op) + checksum * _UNEVEN


def differ(headers: list[bytes]) -> bool:
    """Whether ranks came for different collectives."""
    return len({header[:_SAME_BYTES] for header in headers}) > 1


def all_somewhere(headers: list[bytes]) -> bool:
    """Whether the tensors of all ranks lie in shared memory."""
    return all(segment != _NOWHERE for segment, _ in places_in(headers))


def places_in(headers: list[bytes]) -> list[tuple[int, int]]:
    """Segment and offset, of every rank."""
    return [_HEADER.unpack(header)[4:] for header in headers]


def describe_header(header: bytes) -> str:
    number, detail, dtype, numel, *_ = _HEADER.unpack(header)
    kind, name = _KINDS[number], _DTYPE_NAMES[dtype]
    if kind == "all_to_all":
        return f"{kind} of {name}"
    if kind == "broadcast":
        return f"{kind} from {detail} of {numel} × {name}"
    operation = "" if kind == "all_gather" else f" {_OPERATIONS[detail % _UNEVEN]}"
    return f"{kind}{operation} of {numel} × {name}" + (" in uneven shares" if detail >= _UNEVEN else "")
