"""CPU ranks of one host: buckets lie in shared memory, and each rank reduces its share of them where they lie.

::

    rank 0's bucket  ┃ share 0 ┃ share 1 ┃        rank 0 adds up share 0 of all buckets, in rank order,
    rank 1's bucket  ┃ share 0 ┃ share 1 ┃        and writes the sum into all of them; rank 1 does share 1.

All ranks meet before (every bucket is full) and after (every share is written). Nothing is copied but sums. A share is
summed by one rank and written to all, so all hold the same bits.

Tensors that lie elsewhere are *staged*: copied through a stage, a small area of shared memory that every rank has
twice. Collectives use the two in turn, so that a rank may fill one while slower ranks still read the other: nobody can
be more than one collective behind, because all meet in each.
"""

import functools
import struct
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from gradsync.communicator.background import Background
from gradsync.communicator.base import Communicator, Handle, ReduceOp
from gradsync.communicator.host_peers import HostPeers
from gradsync.communicator.shared_heap import Heap, Place
from gradsync.communicator.shared_signals import HEADER_BYTES, Signals
from gradsync.errors import ConfigurationError, MismatchError

__all__ = ["SharedMemoryCommunicator"]

STAGE_BYTES = 512 * 1024
# Sums are written while their summands are still in a cache, and the cost of an operation does not show: 25 MB take
# a sixth longer in blocks of a quarter of this, and 100 MB longer in one.
BLOCK_BYTES = 1024 * 1024
# Below this every rank adds up everything itself, which is less work than meeting a second time.
SMALL_BYTES = 32 * 1024
# Below this a collective takes less time than to wake the thread for it: it runs with the next one, or at the end.
LEISURE_BYTES = 256 * 1024
# Sizes of messages for which the tensors over the stages are kept. There are few, unless sizes are data.
MOST_KNOWN = 64
TIMEOUT_SECONDS = 1800.0

_NOWHERE = -1
# Kind, detail, dtype and number of elements, which must be the same on all ranks; segment and offset, which may differ.
_HEADER = struct.Struct("=6q")
_SAME_BYTES = 4 * 8
assert _HEADER.size == HEADER_BYTES
_KINDS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
_OPERATIONS: tuple[ReduceOp, ...] = ("sum", "average", "max")
_DTYPES = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(dict.fromkeys(_DTYPES))}
_DTYPE_NAMES = {number: str(dtype) for dtype, number in _DTYPE_NUMBERS.items()}

Blocks = list[tuple[torch.Tensor, ...]]


class _Call(NamedTuple):
    """What a rank wants: ``detail`` is the operation's number, or the source."""

    kind: int
    detail: int
    tensor: torch.Tensor

    def header(self, segment: int = _NOWHERE, offset: int = 0) -> bytes:
        """What all ranks must agree on, and where the tensor lies in shared memory."""
        tensor = self.tensor
        return _HEADER.pack(self.kind, self.detail, _DTYPE_NUMBERS[tensor.dtype], tensor.numel(), segment, offset)

    def describe(self) -> str:
        return _describe(self.header())


class SharedMemoryCommunicator:
    """The collectives of ranks that are all on one host. ``over`` reaches them until their memory is shared.

    Tensors on other devices than the CPU go over ``over``.
    """

    def __init__(self, over: Communicator, *, timeout: float = TIMEOUT_SECONDS) -> None:
        self.over = over
        # Models that share the group share the order of its collectives, whichever way these take.
        self.group = getattr(over, "group", self)
        self._rank, self._world_size = over.rank, over.world_size
        self._peers = HostPeers(over, timeout)
        self._heap = Heap(self._peers)
        control = self._allocate_or_refuse(Signals.control_bytes(self._world_size))
        stages = self._allocate_or_refuse(2 * STAGE_BYTES)
        # Held so that they stay: the heap frees what nobody holds.
        self._kept = (control, stages)
        segment, offset = self._place(control)
        self._signals = Signals(self._peers, [piece[offset:] for piece in segment.pieces], timeout)
        segment, offset = self._place(stages)
        self._stages = [
            [piece[offset + half * STAGE_BYTES : offset + (half + 1) * STAGE_BYTES] for piece in segment.pieces]
            for half in range(2)
        ]
        self._known_stages: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}
        self._number = 0
        self._background = Background("gradsync-shared-memory")
        # Nobody posts before all semaphores are there.
        over.all_reduce(torch.zeros(1, device=over.device)).wait()
        self._signals.watch()
        # Without it the sockets would stay open with the thread that watches them.
        weakref.finalize(self, HostPeers.close, self._peers).atexit = False

    def _allocate_or_refuse(self, nbytes: int) -> torch.Tensor:
        memory = self._heap.allocate(nbytes)
        if memory is None:
            self._peers.close()
            raise ConfigurationError(f"ranks of this host cannot share {nbytes} bytes of memory")
        return memory

    def _place(self, tensor: torch.Tensor) -> Place:
        place = self._heap.find(tensor)
        assert place is not None
        return place

    def __repr__(self) -> str:
        return f"SharedMemoryCommunicator(rank {self.rank} of {self.world_size})"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def averages(self, device: torch.device) -> bool:
        return False if device.type == "cpu" else self.over.averages(device)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Collective: every rank allocates the same. Where memory is short, it is memory of this rank alone."""
        if device.type != "cpu":
            return self.over.allocate(numel, dtype, device)
        memory = self._heap.allocate(numel * dtype.itemsize)
        return torch.zeros(numel, dtype=dtype) if memory is None else memory.view(dtype)

    def close(self) -> None:
        """Let go of the other ranks. They notice if they still need this one."""
        self._background.close()
        self._peers.close()

    # -- the collectives ------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Handle:
        if not tensor.is_cpu:
            return self.over.all_reduce(tensor, op)
        call = _Call(kind=0, detail=_OPERATIONS.index(op), tensor=tensor)
        return self._start(self._reduce_small if tensor.nbytes <= SMALL_BYTES else self._reduce_large, call, op)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Handle:
        if not tensor.is_cpu:
            return self.over.broadcast(tensor, source)
        return self._start(self._broadcast, _Call(kind=1, detail=source, tensor=tensor), source)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        if not tensor.is_cpu:
            return self.over.all_gather(output, tensor)
        return self._start(self._all_gather, _Call(kind=2, detail=0, tensor=tensor), output)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        if not tensor.is_cpu:
            return self.over.reduce_scatter(output, tensor)
        return self._start(self._reduce_scatter, _Call(kind=3, detail=0, tensor=tensor), output)

    def _start(self, run: Callable[..., None], call: _Call, argument: object) -> Handle:
        run = functools.partial(run, call, argument)
        return self._background.start(run, at_leisure=call.tensor.nbytes <= LEISURE_BYTES)

    # -- how each is done -----------------------------------------------------------------------------------------

    def _reduce_small(self, call: _Call, op: ReduceOp) -> None:
        flat = _flat(call.tensor)
        stages = self._stages_now(flat)
        stages[self._rank].copy_(flat)
        self._meet_first(call)
        if self._world_size > 1:
            _combine(stages[0], stages[1], op, flat)
        for stage in stages[2:]:
            _combine(flat, stage, op, flat)
        self._number += 1
        _put_back(call.tensor, _averaged(flat, op, self._world_size))

    def _reduce_large(self, call: _Call, op: ReduceOp) -> None:
        place = self._heap.find(call.tensor) if call.tensor.is_contiguous() else None
        headers = self._meet_first(call, place)
        if place is not None and _all_somewhere(headers):
            try:
                self._reduce_share(self._blocks(call.tensor, place, headers), op)
            finally:
                self._meet_again(call)
            self._number += 1
            return
        self._number += 1
        flat = _flat(call.tensor)
        for piece in flat.split(STAGE_BYTES // flat.itemsize):
            stages = self._stages_now(piece)
            stages[self._rank].copy_(piece)
            self._meet_again(call)
            try:
                self._reduce_share(_cut(stages, self._rank), op)
            finally:
                self._meet_again(call)
            piece.copy_(stages[self._rank])
            self._number += 1
        _put_back(call.tensor, flat)

    def _reduce_share(self, blocks: Blocks, op: ReduceOp) -> None:
        for first, *others in blocks:
            for other in others:
                _combine(first, other, op, first)
            _averaged(first, op, self._world_size)
            for other in others:
                other.copy_(first)

    def _broadcast(self, call: _Call, source: int) -> None:
        flat = _flat(call.tensor)
        for piece in _pieces(flat, STAGE_BYTES):
            stages = self._stages_now(piece)
            if self._rank == source:
                stages[source].copy_(piece)
            self._meet_first(call)
            if self._rank != source:
                piece.copy_(stages[source])
            self._number += 1
        _put_back(call.tensor, flat)

    def _all_gather(self, call: _Call, output: torch.Tensor) -> None:
        flat = _flat(call.tensor)
        rows = output.view(self._world_size, -1)
        if output.nbytes > SMALL_BYTES:
            everybodys = self._direct(call, output)
            if everybodys is not None:
                try:
                    for theirs in everybodys:
                        theirs.view(self._world_size, -1)[self._rank].copy_(flat)
                finally:
                    self._meet_again(call)
                self._number += 1
                return
        done = 0
        for piece in _pieces(flat, STAGE_BYTES):
            stages = self._stages_now(piece)
            stages[self._rank].copy_(piece)
            self._meet_first(call)
            for row, stage in zip(rows, stages, strict=True):
                row[done : done + piece.numel()].copy_(stage)
            done += piece.numel()
            self._number += 1

    def _reduce_scatter(self, call: _Call, output: torch.Tensor) -> None:
        rows = _flat(call.tensor).view(self._world_size, -1)
        if call.tensor.nbytes > SMALL_BYTES:
            everybodys = self._direct(call, call.tensor)
            if everybodys is not None:
                try:
                    self._sum_rows([theirs.view(self._world_size, -1)[self._rank] for theirs in everybodys], output)
                finally:
                    self._meet_again(call)
                self._number += 1
                return
        done = 0
        for piece in _pieces(output, STAGE_BYTES // self._world_size):
            columns = rows[:, done : done + piece.numel()]
            stages = [stage.view(columns.shape) for stage in self._stages_now(columns)]
            stages[self._rank].copy_(columns)
            self._meet_first(call)
            piece.copy_(stages[0][self._rank])
            for stage in stages[1:]:
                piece.add_(stage[self._rank])
            done += piece.numel()
            self._number += 1

    def _sum_rows(self, rows: list[torch.Tensor], output: torch.Tensor) -> None:
        """Block by block, and not in place: ``output`` may be one of the rows, and the others are not ours."""
        step = BLOCK_BYTES // output.itemsize
        for target, *blocks in zip(output.split(step), *(row.split(step) for row in rows), strict=True):
            total = torch.add(blocks[0], blocks[1])
            for block in blocks[2:]:
                total.add_(block)
            target.copy_(total)

    def _direct(self, call: _Call, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Everybody's ``tensor``, if it lies in shared memory on all ranks: they have met then, and must meet again."""
        place = self._heap.find(tensor) if tensor.is_contiguous() else None
        headers = self._meet_first(call, place)
        if not _all_somewhere(headers):
            self._number += 1
            return None
        return self._everybodys(tensor, headers)

    # -- meeting the others ---------------------------------------------------------------------------------------

    def _meet_first(self, call: _Call, place: Place | None = None) -> list[bytes]:
        """Meet, and see that all ranks came for the same. Everybody sees everybody's header, and raises alike."""
        mine = call.header() if place is None else call.header(place[0].number, place[1])
        self._signals.write_header(self._number, mine)
        self._signals.meet(call.describe)
        headers = self._signals.headers(self._number)
        if headers.count(mine) < len(headers) and len({header[:_SAME_BYTES] for header in headers}) > 1:
            self._number += 1
            started = ", ".join(f"rank {rank}: {_describe(header)}" for rank, header in enumerate(headers))
            raise MismatchError(f"ranks started different collectives: {started}")
        return headers

    def _meet_again(self, call: _Call) -> None:
        self._signals.meet(call.describe)

    def _stages_now(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's stage of this collective, as a flat tensor with the numbers of ``like``."""
        key = (self._number % 2, like.nbytes, like.dtype)
        stages = self._known_stages.get(key)
        if stages is None:
            stages = [stage[: like.nbytes].view(like.dtype) for stage in self._stages[self._number % 2]]
            if len(self._known_stages) < MOST_KNOWN:
                self._known_stages[key] = stages
        return stages

    def _everybodys(self, tensor: torch.Tensor, headers: list[bytes]) -> list[torch.Tensor]:
        """What lies on each rank where its header says, with as many numbers as ``tensor``."""
        return [
            self._heap.segment(number).pieces[rank][start : start + tensor.nbytes].view(tensor.dtype)
            for rank, (*_, number, start) in enumerate(map(_HEADER.unpack, headers))
        ]

    def _blocks(self, tensor: torch.Tensor, place: Place, headers: list[bytes]) -> Blocks:
        """This rank's share of a tensor that lies in shared memory on all ranks, cut into blocks."""
        segment, offset = place
        # Ranks allocate alike, so headers are nearly always the same altogether.
        if headers.count(headers[0]) < len(headers):
            return _cut(self._everybodys(tensor, headers), self._rank)
        key = (offset, tensor.numel(), tensor.dtype)
        blocks = segment.known.get(key)
        if blocks is None:
            blocks = segment.known[key] = _cut(self._everybodys(tensor, headers), self._rank)
        return blocks


def _cut(everybodys: list[torch.Tensor], rank: int) -> Blocks:
    """The share of ``rank``, in blocks; each with the tensors of all ranks."""
    numel, itemsize = everybodys[0].numel(), everybodys[0].itemsize
    # Shares begin at whole cache lines, so that no two ranks write to one.
    line = max(64 // itemsize, 1)
    share = -(-numel // (len(everybodys) * line)) * line
    first, end = min(rank * share, numel), min((rank + 1) * share, numel)
    step = BLOCK_BYTES // itemsize
    return [tuple(tensor[start : min(start + step, end)] for tensor in everybodys) for start in range(first, end, step)]


def _all_somewhere(headers: list[bytes]) -> bool:
    """Whether the tensors of all ranks lie in shared memory."""
    return all(_HEADER.unpack(header)[4] != _NOWHERE for header in headers)


def _combine(one: torch.Tensor, other: torch.Tensor, op: ReduceOp, into: torch.Tensor) -> None:
    if op == "max":
        torch.maximum(one, other, out=into)
    else:
        torch.add(one, other, out=into)


def _averaged(total: torch.Tensor, op: ReduceOp, world_size: int) -> torch.Tensor:
    return total.div_(world_size) if op == "average" else total


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1)


def _put_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Where ``flat`` is a copy and not a view, ``tensor`` gets what it holds."""
    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))


def _pieces(tensor: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
    """At least one, so that all ranks meet also for nothing."""
    return iter(tensor.split(max(nbytes // tensor.itemsize, 1)) if tensor.numel() else [tensor])


def _describe(header: bytes) -> str:
    kind, detail, dtype, numel, *_ = _HEADER.unpack(header)
    name = _KINDS[kind]
    which = {"all_reduce": f" {_OPERATIONS[detail]}" if kind == 0 else "", "broadcast": f" from {detail}"}.get(name, "")
    return f"{name}{which} of {numel} × {_DTYPE_NAMES[dtype]}"
