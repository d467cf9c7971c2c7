"""Signals between the ranks of one host: headers of collectives, and semaphores by which ranks announce their arrival.

Each rank has one semaphore for every other rank, which that rank posts. POSIX semaphores order memory, cost no system
call when no thread sleeps, and sleep in the kernel when one must. In addition, every rank counts its posts, so that
posts by a rank that has exited since can be told from posts that it never made.

A rank's control memory, one cache line per item, with more at the end::

    semaphore posted by rank 0 ┃ … by rank N-1 ┃ posts of this rank ┃ header of even collectives ┃ of odd ones ┃ reason

A header says what a rank is about to run, and where its tensor is: a few numbers, because all ranks compare them in
every collective; they become text only when they differ. A rank that gives up writes down the reason before it releases
the others.
"""

import ctypes
import errno
import os
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from gradsync.base.errors import CommunicatorLostError
from gradsync.communicator.background import flush_lazy
from gradsync.communicator.base import ReduceOp
from gradsync.communicator.base_communicator import Shares
from gradsync.communicator.shared_heap import HostPeers

__all__ = ["Call", "Signals", "all_somewhere", "describe_header", "detail_of", "differ", "places_in"]

_NOWHERE = -1
# Kind, detail, dtype and number of elements, which must be the same on all ranks; segment and offset, which may differ.
_HEADER = struct.Struct("=6q")
_SAME_BYTES = 4 * 8
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
    """The segment and the offset of the tensor of every rank."""
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


LINE_BYTES = 64
REASON_BYTES = 1024
# A rank that comes within microseconds is not worth going to sleep for.
SPINS = 100
# Sleep is interrupted only to look at the time; a peer's coming or end wakes it at once.
SLEEP_SECONDS = 1.0

_Header = ctypes.c_char * _HEADER.size


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Semaphore:
    """A POSIX semaphore at an address that several processes map."""

    # The quick calls keep the interpreter's lock, which would cost more than they do.
    _quick = ctypes.PyDLL(None, use_errno=True)
    _slow = ctypes.CDLL(None, use_errno=True)

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)

    def initialize(self) -> None:
        if self._quick.sem_init(self._address, 1, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def post(self) -> None:
        self._quick.sem_post(self._address)

    def try_take(self) -> bool:
        return bool(self._quick.sem_trywait(self._address) == 0)

    def take(self, seconds: float) -> bool:
        until = time.time() + seconds
        limit = _Timespec(int(until), int(until % 1 * 1e9))
        if self._slow.sem_timedwait(self._address, ctypes.byref(limit)) == 0:
            return True
        if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return False


class Signals:
    """One rank's end: it posts to all others and waits for all others. ``controls``: all ranks' control memory."""

    def __init__(self, peers: HostPeers, controls: Sequence[torch.Tensor], timeout: float) -> None:
        self._peers, self._timeout = peers, timeout
        # Held because what follows are bare addresses, which the thread that watches may use to the very end.
        self._controls = list(controls)
        bases = [control.data_ptr() for control in controls]
        world_size, rank = peers.world_size, peers.rank
        self._others = [peer for peer in range(world_size) if peer != rank]
        self._mine = [(peer, _Semaphore(bases[rank] + peer * LINE_BYTES)) for peer in self._others]
        self._theirs = [_Semaphore(bases[peer] + rank * LINE_BYTES) for peer in self._others]
        for _, semaphore in self._mine:
            semaphore.initialize()
        self._posts = [ctypes.c_int64.from_address(base + world_size * LINE_BYTES) for base in bases]
        self._own_posts = self._posts[rank]
        self._headers = [
            [_Header.from_address(base + (world_size + 1 + parity) * LINE_BYTES) for base in bases]
            for parity in range(2)
        ]
        self._reasons = [
            (ctypes.c_char * REASON_BYTES).from_address(base + (world_size + 3) * LINE_BYTES) for base in bases
        ]
        self._awaited = 0
        self._ended: set[int] = set()

    @staticmethod
    def control_bytes(world_size: int) -> int:
        return (world_size + 3) * LINE_BYTES + REASON_BYTES

    def watch(self) -> None:
        """Notice the exit of peers from now on. All ranks have initialized their semaphores by then."""
        self._peers.watch(self._note_end)

    def _note_end(self, peer: int) -> None:
        self._ended.add(peer)
        # Sleeping threads must look again: they may wait for one that waits for the one that ended.
        for _, semaphore in self._mine:
            semaphore.post()

    def give_up(self, reason: str) -> None:
        """Leave ``reason`` to the ranks that will notice, or the reason that another rank left before.

        Threads that wait on this rank are released here and now: the thread that watches may see a
        socket that was closed on this side, but if it comes too late for that, the number is another file's by then.
        """
        mine = self._reasons[self._peers.rank]
        if not mine.value:
            first = next((each.value for each in self._reasons if each.value), b"")
            mine.value = first or reason.encode()[: REASON_BYTES - 1]
        for peer in self._others:
            self._note_end(peer)

    # -- headers: what each rank thinks the collective is -----------------------------------------------------------

    def write_header(self, number: int, header: bytes) -> None:
        self._headers[number % 2][self._peers.rank].raw = header

    def headers(self, number: int) -> list[bytes]:
        """The headers of all ranks, by rank, after :meth:`meet`."""
        return [header.raw for header in self._headers[number % 2]]

    # -- meeting ------------------------------------------------------------------------------------------------------

    def meet(self, describe: Callable[[], str]) -> None:
        """Return when all ranks have arrived. Everything that each wrote before is then visible to all."""
        self._own_posts.value += 1
        for semaphore in self._theirs:
            semaphore.post()
        self._awaited += 1
        for peer, semaphore in self._mine:
            # Asked afterwards: the post that was found may be that of the thread that watches.
            if not _spin(semaphore) or self._ended:
                self._sleep(peer, semaphore, describe)

    def _sleep(self, peer: int, semaphore: _Semaphore, describe: Callable[[], str]) -> None:
        # It may be in another collective of ours, which nobody is at work on here.
        flush_lazy()
        deadline = time.monotonic() + self._timeout
        while True:
            # From the first end on, posts also come from the thread that watches, so only the counts are to be trusted.
            if self._ended:
                missing = [other for other in sorted(self._ended) if self._posts[other].value < self._awaited]
                if missing:
                    reason = self._reasons[missing[0]].value.decode(errors="ignore")
                    raise self._peers.failed(missing[0], f"in {describe()}", reason)
                if self._posts[peer].value >= self._awaited:
                    return
            left = deadline - time.monotonic()
            if semaphore.take(min(SLEEP_SECONDS, max(0.0, left))):
                if not self._ended:
                    return
            elif left <= 0.0:
                raise CommunicatorLostError(
                    f"{self._peers.name(self._peers.rank)} waited {self._timeout:g} s in {describe()} for "
                    f"{self._peers.name(peer)} (process {self._peers.process_ids[peer]}), which is alive but has not "
                    "come. Every rank must run the same collectives in the same order; if that rank is only slow, "
                    "raise the timeout of the process group"
                )


def _spin(semaphore: _Semaphore) -> bool:
    return any(semaphore.try_take() for _ in range(SPINS))
