"""The ranks that ``mpirun`` started, over mpi4py, without a torch process group.

MPI moves bytes and torch adds them. MPI's own reductions promise neither an order of summation nor the same bits on
all ranks, and know no bfloat16. So every rank receives the others' values of one share, adds them up in rank order,
and hands the sum to the others::

    tensor   | share of rank 0 | share of rank 1 | share of rank 2 |
    piece 0  | ###             | ###             | ###             |   Ialltoallv, add up, Iallgatherv
    piece 1  |    ###          |    ###          |    ###          |   on its way while piece 0 is added up

That is as many bytes as any all-reduce can do with, and the bits of :class:`InProcessCommunicator`.

[Note: progress] MPI moves data only while somebody calls it. The thread of :class:`Background` does, in tests of the
pending request with pauses between them: MPI's own blocking calls would keep a core busy that backward needs.

[Note: the end] ``MPI_Finalize`` waits for all ranks, so a rank that ends early with an error would hang with those that
wait for its gradients. Therefore :meth:`MPICommunicator.close` runs at exit. After an unhandled error it aborts the
job. Else it tells the others after how many collectives this rank leaves; whoever waits for it in a later one raises.
"""

import atexit
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gradsync.communicator.background import Background
from gradsync.communicator.base import Handle, ReduceOp
from gradsync.communicator.mpi_world import PAUSE_SECONDS, Farewells, enter_mpi
from gradsync.errors import ConfigurationError, GradsyncError, MisuseError, PeerFailedError

__all__ = ["MPICommunicator"]

# What is under way at a time, all shares together. Smaller pieces overlap better, larger ones have fewer latencies.
PIECE_BYTES = 4 << 20
# With many ranks the shares of a piece do not become smaller than this.
LEAST_SHARE_BYTES = 64 << 10
# Up to here one all-gather and everybody's own sum is quicker than two rounds.
SMALL_BYTES = 64 << 10
MOST_ELEMENTS = 2**31 - 1

# Tests in a row before the first pause.
EAGER_TESTS = 100
DEFAULT_TIMEOUT = 1800.0


class MPICommunicator:
    """The collectives of an MPI communicator, by default of all ranks, on CPU tensors.

    It works on duplicates of ``comm``, so that its messages never meet the user's. Making one is collective. A
    collective that takes longer than ``timeout`` seconds raises on the ranks that wait for it.
    """

    def __init__(self, comm: Any = None, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._mpi, parent = enter_mpi(comm)
        self._timeout = timeout
        self._comm = parent.Dup()
        self._rank: int = self._comm.rank
        self._world_size: int = self._comm.size
        self._farewells = Farewells(self._mpi, parent.Dup())
        may_use_a_thread = self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE
        self._runner: Background | _AtWait = Background("gradsync-mpi") if may_use_a_thread else _AtWait()
        self._types = {1: self._mpi.BYTE, 2: self._mpi.UINT16_T, 4: self._mpi.UINT32_T, 8: self._mpi.UINT64_T}
        self._types[16] = self._mpi.C_DOUBLE_COMPLEX
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._last: Handle | None = None
        # All ranks start the same collectives, so their numbers mean the same everywhere.
        self._started = self._running = 0
        self._failure: BaseException | None = None
        self._abandoned: list[Any] = []
        self._closed = False
        self._process = os.getpid()
        atexit.register(self._close_at_exit)

    def __repr__(self) -> str:
        return f"MPICommunicator({self.library}, rank {self.rank} of {self.world_size})"

    @property
    def library(self) -> str:
        """Which MPI this is: ``Open MPI 5.0.11``."""
        name, version = self._mpi.get_vendor()
        return f"{name} {'.'.join(map(str, version))}"

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
        return False

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        _require_cpu(device)
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Handle:
        if op == "average" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigurationError(f"whole numbers have no average, got {tensor.dtype}. Use the sum")
        flat = _flat(tensor)
        small = flat.numel() * flat.itemsize * self.world_size <= SMALL_BYTES
        reduce = self._reduce_small if small else self._reduce_large
        return self._start(f"all_reduce {op}", flat, lambda: reduce(flat, op))

    def broadcast(self, tensor: torch.Tensor, source: int) -> Handle:
        flat = _flat(tensor)
        if not 0 <= source < self.world_size:
            raise ConfigurationError(f"source must be in 0..{self.world_size - 1}, got {source}")

        def run() -> None:
            self._finish(self._comm.Ibcast(self._memory(flat), source), flat)

        return self._start(f"broadcast from {source}", flat, run)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        whole, flat = _flat(output), _flat(tensor)
        self._require_shares("all_gather", whole, flat)
        return self._start("all_gather", whole, lambda: self._gather(whole, flat))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        share, flat = _flat(output), _flat(tensor)
        self._require_shares("reduce_scatter", flat, share)

        def run() -> None:
            for piece, received in self._exchange(flat, share.numel()):
                own = share[piece.start : piece.start + piece.counts[self.rank]]
                self._combine(received, own, "sum")

        return self._start("reduce_scatter", flat, run)

    def close(self) -> None:
        """Finish what was started, tell the others and free the communicators. Collective; at exit it comes by itself.

        It returns when all ranks have called it, as ``MPI_Finalize`` would.
        """
        if self._closed:
            return
        if self._last is not None:
            self._last.wait()
        self._closed = True
        atexit.unregister(self._close_at_exit)
        self._runner.close()
        self._farewells.say_and_hear(self._started)
        self._farewells.comm.Free()
        self._comm.Free()

    # -- how a collective is run --------------------------------------------------------------------------------------

    def _start(self, kind: str, tensor: torch.Tensor, run: Callable[[], None]) -> Handle:
        if self._closed:
            raise MisuseError(f"{kind} was started on a communicator that is closed. Make another MPICommunicator()")
        if tensor.numel() > MOST_ELEMENTS:
            raise ConfigurationError(
                f"MPI counts to {MOST_ELEMENTS} elements in a collective, got {tensor.numel()}. Use smaller buckets"
            )

        self._started += 1
        number = self._started

        def run_or_explain() -> None:
            if self._failure is not None:
                raise self._failure
            self._running = number
            try:
                if tensor.numel():
                    run()
            except BaseException as error:
                self._failure = self._explained(error, f"{kind} of {tensor.numel()} × {tensor.dtype}")
                raise self._failure from None

        self._last = self._runner.start(run_or_explain)
        return self._last

    def _explained(self, error: BaseException, collective: str) -> BaseException:
        """``error`` as it is raised now and by every later collective: after the first, nothing is in step."""
        if isinstance(error, _NoAnswerError):
            return PeerFailedError(f"rank {self.rank} waited in {collective}, but {error}")
        if isinstance(error, self._mpi.Exception):
            return GradsyncError(
                f"MPI failed on rank {self.rank} in {collective}: {error}. Every rank must start the same collectives "
                "with the same sizes, in the same order"
            )
        return error

    def _finish(self, request: Any, *memory: torch.Tensor) -> None:
        """Return when ``request`` is complete. If it never is, MPI may still write to ``memory``: it is kept."""
        try:
            for _ in range(EAGER_TESTS):
                if request.Test():
                    return
            self._finish_patiently(request)
        except BaseException:
            self._abandoned += [request, memory]
            raise

    def _finish_patiently(self, request: Any) -> None:
        limit = time.monotonic() + self._timeout
        while not request.Test():
            time.sleep(PAUSE_SECONDS)
            missing = [rank for rank, started in self._farewells.heard().items() if started < self._running]
            if missing:
                raise _NoAnswerError(
                    f"{_ranks(missing)} had ended before. Every rank must run the same number of steps; if one has "
                    "failed, its own message says why"
                )
            if time.monotonic() > limit:
                raise _NoAnswerError(
                    f"not all of the others came within {self._timeout:g} s. Look for a rank that has stopped, or "
                    "raise timeout="
                )

    def _memory(self, tensor: torch.Tensor) -> list[Any]:
        """The tensor's own memory as MPI takes it. Elements have their size and no meaning: MPI computes nothing."""
        nbytes = tensor.numel() * tensor.itemsize
        return [self._mpi.buffer.fromaddress(tensor.data_ptr(), nbytes), self._types[tensor.itemsize]]

    def _parts(self, tensor: torch.Tensor, counts: list[int], offsets: list[int]) -> list[Any]:
        memory, kind = self._memory(tensor)
        return [memory, (counts, offsets), kind]

    # -- the collectives ----------------------------------------------------------------------------------------------

    def _gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        # The share may lie where it belongs already. MPI wants to be told.
        in_place = tensor.data_ptr() == output[self.rank * tensor.numel() :].data_ptr()
        sent = self._mpi.IN_PLACE if in_place else self._memory(tensor)
        self._finish(self._comm.Iallgather(sent, self._memory(output)), output, tensor)

    def _reduce_small(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        numel = tensor.numel()
        gathered = self._scratch_of(self.world_size * numel, tensor.dtype)
        self._gather(gathered, tensor)
        self._combine(list(gathered.split(numel)), tensor, op)

    def _reduce_large(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        share = -(-tensor.numel() // self.world_size)
        gathers = []
        for piece, received in self._exchange(tensor, share):
            start = piece.offsets[self.rank]
            self._combine(received, tensor[start : start + piece.counts[self.rank]], op)
            parts = self._parts(tensor, piece.counts, piece.offsets)
            gathers.append(self._comm.Iallgatherv(self._mpi.IN_PLACE, parts))
        for gather in gathers:
            self._finish(gather, tensor)

    def _exchange(self, tensor: torch.Tensor, share: int) -> Iterator[tuple["_Piece", list[torch.Tensor]]]:
        """For every piece: what all ranks have at this rank's part of it, in rank order."""
        room = max(PIECE_BYTES // self.world_size, LEAST_SHARE_BYTES) // tensor.itemsize
        room = min(room, share)
        halves = self._scratch_of(2 * self.world_size * room, tensor.dtype).chunk(2)
        pieces = [_piece(tensor.numel(), share, self.world_size, start, room) for start in range(0, share, room)]
        under_way: deque[tuple[_Piece, torch.Tensor, Any]] = deque()

        def receive() -> tuple[_Piece, list[torch.Tensor]]:
            piece, memory, request = under_way.popleft()
            self._finish(request, tensor, memory)
            return piece, list(memory[: self.world_size * piece.counts[self.rank]].chunk(self.world_size))

        for number, piece in enumerate(pieces):
            memory, expected = halves[number % 2], piece.counts[self.rank]
            offsets = [rank * expected for rank in range(self.world_size)]
            request = self._comm.Ialltoallv(
                self._parts(tensor, piece.counts, piece.offsets),
                self._parts(memory, [expected] * self.world_size, offsets),
            )
            under_way.append((piece, memory, request))
            if len(under_way) == 2:
                yield receive()
        while under_way:
            yield receive()

    def _combine(self, received: list[torch.Tensor], output: torch.Tensor, op: ReduceOp) -> None:
        """In rank order, with a rounding for every rank: the same bits wherever it is computed."""
        if not output.numel():
            return
        total, combine = received[0], torch.maximum if op == "max" else torch.add
        for values in received[1:]:
            total = combine(total, values, out=output)
        if self.world_size == 1:
            output.copy_(total)
        if op == "average":
            output.div_(self.world_size)

    def _scratch_of(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for one collective at a time."""
        nbytes = numel * dtype.itemsize
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[:nbytes].view(dtype)

    def _require_shares(self, kind: str, whole: torch.Tensor, share: torch.Tensor) -> None:
        if whole.numel() != share.numel() * self.world_size or whole.dtype != share.dtype:
            raise ConfigurationError(
                f"{kind} over {self.world_size} ranks expects {self.world_size} equal shares of one dtype, got "
                f"{whole.numel()} × {whole.dtype} and {share.numel()} × {share.dtype}"
            )

    # -- the end ------------------------------------------------------------------------------------------------------

    def _close_at_exit(self) -> None:
        # A forked child is no rank, and after MPI_Finalize there is nothing left to free.
        if os.getpid() != self._process or self._mpi.Is_finalized():
            return
        failed = getattr(sys, "last_value", None) is not None or self._failure is not None
        if not failed:
            try:
                self.close()
            except BaseException as error:
                print(f"gradsync: {error}", file=sys.stderr)
                failed = True
        if failed and self.world_size > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            self._comm.Abort(1)


class _NoAnswerError(Exception):
    """A request that will not complete."""


class _AtWait:
    """Runs collectives in order, each when somebody waits: for an MPI that one thread at a time may call."""

    def __init__(self) -> None:
        self._tasks: deque[_Task] = deque()

    def start(self, run: Callable[[], None]) -> Handle:
        task = _Task(self, run)
        self._tasks.append(task)
        return task

    def run_until(self, last: "_Task") -> None:
        while not last.done:
            self._tasks.popleft().run_now()

    def close(self) -> None:
        """Nothing runs by itself."""


class _Task:
    """A collective that runs when it, or a later one, is waited for."""

    def __init__(self, runner: _AtWait, run: Callable[[], None]) -> None:
        self._runner, self._run = runner, run
        self.done = False
        self._error: BaseException | None = None

    def run_now(self) -> None:
        try:
            with torch.no_grad():
                self._run()
        except BaseException as error:
            self._error = error
        self.done = True

    def wait(self) -> None:
        self._runner.run_until(self)
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """The same stretch of every rank's share: where it begins in a share, and where the parts lie in the tensor."""

    start: int
    counts: list[int]
    offsets: list[int]


def _piece(numel: int, share: int, world_size: int, start: int, room: int) -> _Piece:
    # The last shares may be shorter, or empty.
    ends = [min(rank * share + min(start + room, share), numel) for rank in range(world_size)]
    offsets = [min(rank * share + start, numel) for rank in range(world_size)]
    return _Piece(
        start=start, counts=[end - offset for offset, end in zip(offsets, ends, strict=True)], offsets=offsets
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    _require_cpu(tensor.device)
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ConfigurationError(
            f"MPICommunicator expects dense, contiguous tensors, got shape {list(tensor.shape)}, layout "
            f"{tensor.layout}, not contiguous. Pass tensor.contiguous()"
        )
    return tensor.detach().view(-1)


def _require_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise ConfigurationError(
            f"MPICommunicator moves tensors on the CPU, got one on {device}. For GPUs use a process group with NCCL"
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
