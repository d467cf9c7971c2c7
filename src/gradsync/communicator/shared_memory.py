"""Communicator for CPU ranks of one host: buckets are in shared memory, and each rank reduces its share in place.

::

    rank 0's bucket  ┃ share 0 ┃ share 1 ┃        rank 0 adds up share 0 of all buckets, in rank order,
    rank 1's bucket  ┃ share 0 ┃ share 1 ┃        and writes the sum into all of them; rank 1 does share 1.

All ranks synchronize before (every bucket is full) and after (every share is written). Only sums are copied. A share is
summed by one rank and written to all buckets, so all ranks hold the same bits.

Other tensors are *staged*: copied through a stage, a small area of shared memory of which every rank has two.
Collectives alternate between the two, so that a rank may fill one while slower ranks still read the other: no rank can
be more than one collective behind, because all ranks synchronize in each.
"""

import itertools
import weakref
from collections.abc import Callable
from functools import partial

import torch

from gradsync.base.errors import GradsyncError, MismatchError
from gradsync.communicator.agreement import make_together
from gradsync.communicator.background import Background
from gradsync.communicator.base import Communicator, Handle, ReduceOp
from gradsync.communicator.base_communicator import BaseCommunicator, Here, Shares, Sizes, Start
from gradsync.communicator.checks import collectives_differ
from gradsync.communicator.collective import Collective
from gradsync.communicator.logs import LOGGER
from gradsync.communicator.process_group import ProcessGroupCommunicator
from gradsync.communicator.reducing import (
    BLOCK_BYTES,
    Blocks,
    combine_in_order,
    cut_share,
    offsets_of,
    work_on_flat,
)
from gradsync.communicator.shared_heap import Heap, HostPeers, Location
from gradsync.communicator.shared_signals import (
    Call,
    Signals,
    all_somewhere,
    describe_header,
    detail_of,
    differ,
    places_in,
)

__all__ = ["SharedMemoryCommunicator"]

STAGE_BYTES = 512 * 1024
# Below this every rank adds up everything itself, which is less work than synchronizing a second time.
SMALL_BYTES = 32 * 1024
# Below this a collective takes less time than to wake the thread for it: it runs with the next one, or at the end.
LAZY_BYTES = 256 * 1024
# Sizes of messages for which the tensors over the stages are kept. There are few, unless sizes are data.
MOST_KNOWN = 64
TIMEOUT_SECONDS = 1800.0


class SharedMemoryCommunicator(BaseCommunicator):
    """The collectives of ranks that are all on one host. ``over`` connects them until their memory is shared.

    Tensors on devices other than the CPU go over ``over``.
    """

    survives_mismatch = True

    def __init__(self, over: Communicator, *, timeout: float = TIMEOUT_SECONDS) -> None:
        # Models that share the group share the order of its collectives, whichever way these take.
        super().__init__(over.rank, over.world_size, over.group)
        self.over = over
        # Setting up takes what it takes on a busy machine: ranks wait for each other as long as in the group.
        patience = over.timeout if isinstance(over, ProcessGroupCommunicator) else TIMEOUT_SECONDS
        self._peers = HostPeers(over, max(timeout, patience))
        try:
            self._set_up(timeout)
        except BaseException:
            self.close()
            raise
        self._peers.set_timeout(timeout)
        # Without it the sockets would stay open with the thread that watches them.
        weakref.finalize(self, HostPeers.close, self._peers).atexit = False

    def _set_up(self, timeout: float) -> None:
        """Do everything that may fail on a single rank: ConfigurationError on all of them if it does."""
        self._heap = Heap(self._peers)
        # Held so that they stay: the heap frees what nobody holds.
        self._kept = make_together(self.over, "share memory", self._allocate_own)
        control, stages = self._kept
        segment, offset = self._place_of(control)
        self._signals = Signals(self._peers, [piece[offset:] for piece in segment.pieces], timeout)
        segment, offset = self._place_of(stages)
        self._stages = [
            [piece[offset + half * STAGE_BYTES : offset + (half + 1) * STAGE_BYTES] for piece in segment.pieces]
            for half in range(2)
        ]
        self._known_stages: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}
        # Of the stages that are used now: everybody's are the even ones, or the odd ones.
        self._number = 0
        # Nobody posts before all semaphores are there, and all ranks have the threads that they need.
        make_together(self.over, "start its threads", self._start_threads)

    def _allocate_own(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Control memory and stages. All ranks come to the same end, and one that could not says why."""
        control = self._heap.allocate(Signals.control_bytes(self.world_size))
        stages = self._heap.allocate(2 * STAGE_BYTES)
        if self._heap.shortage:
            raise OSError(f"it {self._heap.shortage}")
        empty = torch.empty(0)
        return empty if control is None else control, empty if stages is None else stages

    def _start_threads(self) -> None:
        self._queue.begin()
        self._signals.watch()

    def _place_of(self, tensor: torch.Tensor) -> Location:
        place = self._heap.find(tensor)
        assert place is not None
        return place

    @property
    def failure(self) -> GradsyncError | None:
        return self.state.failure or self.over.failure

    def averages(self, device: torch.device) -> bool:
        return False if device.type == "cpu" else self.over.averages(device)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate shared memory, as every rank does. Collective. Where memory is short, it is this rank's alone."""
        if device.type != "cpu":
            return self.over.allocate(numel, dtype, device)
        memory = self._allocate_together(numel, dtype, lambda: self._heap.allocate(numel * dtype.itemsize))
        if self._heap.shortage:
            LOGGER.warning("rank %d %s: gradients take an extra copy on their way", self.rank, self._heap.shortage)
            self._heap.shortage = ""
        return torch.zeros(numel, dtype=dtype) if memory is None else memory.view(dtype)

    def close(self) -> None:
        """Disconnect from the other ranks, which notice if they still need this one."""
        if self._background is not None:
            self._background.close()
        self._peers.close()

    def _make_queue(self) -> Background:
        return Background("gradsync-shared-memory")

    def _fail(self, failure: GradsyncError) -> None:
        super()._fail(failure)
        self._signals.give_up(str(failure))
        # Tell the others now that this rank will not come any more, and release threads that wait here.
        self._peers.close()

    # -- the collectives ------------------------------------------------------------------------------------------

    def _route(self, collective: Collective, tensor: torch.Tensor, elsewhere: Start, here: Here) -> Handle:
        return here(collective) if tensor.is_cpu else elsewhere(self.over)

    def _all_reduce(self, collective: Collective, tensor: torch.Tensor, op: ReduceOp) -> Handle:
        call = Call("all_reduce", detail_of(op), tensor.dtype, collective.numel, collective.describe)
        reduce = self._reduce_small if tensor.nbytes <= SMALL_BYTES else self._reduce_large
        return self._start(collective, tensor, lambda: work_on_flat(tensor, lambda flat: reduce(call, flat, op)))

    def _broadcast(self, collective: Collective, tensor: torch.Tensor, source: int) -> Handle:
        call = Call("broadcast", source, tensor.dtype, collective.numel, collective.describe)
        give = partial(self._give, call, source)
        return self._start(collective, tensor, lambda: work_on_flat(tensor, give))

    def _all_gather(self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, shares: Shares) -> Handle:
        call = Call("all_gather", detail_of("sum", shares), tensor.dtype, collective.numel, collective.describe)
        offsets = offsets_of(shares or (tensor.numel(),) * self.world_size)
        return self._start(collective, output, lambda: self._gather(call, output, tensor, offsets))

    def _reduce_scatter(
        self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, shares: Shares
    ) -> Handle:
        call = Call("reduce_scatter", detail_of(op, shares), tensor.dtype, collective.numel, collective.describe)
        offsets = offsets_of(shares or (output.numel(),) * self.world_size)
        return self._start(collective, tensor, lambda: self._scatter(call, output, tensor, op, offsets))

    def _all_to_all(
        self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, arriving: Sizes, leaving: Sizes
    ) -> Handle:
        call = Call("all_to_all", 0, tensor.dtype, 0, collective.describe)
        return self._start(collective, tensor, lambda: self._exchange(call, output, tensor, arriving, leaving))

    def _start(self, collective: Collective, tensor: torch.Tensor, run: Callable[[], None]) -> Handle:
        return self._queue_up(collective, run, lazy=tensor.nbytes <= LAZY_BYTES)

    # -- how each is done -----------------------------------------------------------------------------------------

    def _reduce_small(self, call: Call, flat: torch.Tensor, op: ReduceOp) -> None:
        stages = self._stages_now(flat)
        stages[self.rank].copy_(flat)
        self._meet_first(call)
        combine_in_order(stages, flat, op)
        self._number += 1

    def _reduce_large(self, call: Call, flat: torch.Tensor, op: ReduceOp) -> None:
        place = self._heap.find(flat)
        headers = self._meet_first(call, place)
        if place is not None and all_somewhere(headers):
            self._reduce_share(self._blocks(flat, place, headers), op)
            self._signals.meet(call.describe)
            self._number += 1
            return
        self._number += 1
        for piece in flat.split(STAGE_BYTES // flat.itemsize):
            stages = self._stages_now(piece)
            stages[self.rank].copy_(piece)
            self._signals.meet(call.describe)
            self._reduce_share(cut_share(stages, self.rank), op)
            self._signals.meet(call.describe)
            piece.copy_(stages[self.rank])
            self._number += 1

    def _reduce_share(self, blocks: Blocks, op: ReduceOp) -> None:
        for first, *others in blocks:
            combine_in_order([first, *others], first, op)
            for other in others:
                other.copy_(first)

    def _give(self, call: Call, source: int, flat: torch.Tensor) -> None:
        # At least one, so that all ranks meet also for nothing.
        for piece in flat.split(STAGE_BYTES // flat.itemsize) if flat.numel() else [flat]:
            stages = self._stages_now(piece)
            if self.rank == source:
                stages[source].copy_(piece)
            self._meet_first(call)
            if self.rank != source:
                piece.copy_(stages[source])
            self._number += 1

    def _gather(self, call: Call, output: torch.Tensor, tensor: torch.Tensor, offsets: list[int]) -> None:
        everybodys = self._direct(call, output) if output.nbytes > SMALL_BYTES else None
        if everybodys is not None:
            for theirs in everybodys:
                _copy(theirs[offsets[self.rank] : offsets[self.rank + 1]], tensor)
            self._signals.meet(call.describe)
            self._number += 1
            return
        rows = [output[start:end] for start, end in itertools.pairwise(offsets)]
        step = STAGE_BYTES // output.itemsize
        # At least once, so that all ranks meet also for nothing.
        for start in range(0, max(1, *map(len, rows)), step):
            stages = self._stages_now(output, step)
            mine = tensor[start : start + step]
            stages[self.rank][: mine.numel()].copy_(mine)
            self._meet_first(call)
            sources = [*stages[: self.rank], mine, *stages[self.rank + 1 :]]
            for row, stage in zip(rows, sources, strict=True):
                piece = row[start : start + step]
                _copy(piece, stage[: piece.numel()])
            self._number += 1

    def _scatter(
        self, call: Call, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, offsets: list[int]
    ) -> None:
        mine = slice(offsets[self.rank], offsets[self.rank + 1])
        everybodys = self._direct(call, tensor) if tensor.nbytes > SMALL_BYTES else None
        if everybodys is not None:
            self._reduce_rows([theirs[mine] for theirs in everybodys], output, op)
            self._signals.meet(call.describe)
            self._number += 1
            return
        # Of every share as much at a time as fits into a stage together.
        step = STAGE_BYTES // output.itemsize // self.world_size
        ranges = list(itertools.pairwise(offsets))
        for start in range(0, max(1, *(end - begin for begin, end in ranges)), step):
            stages = self._stages_now(output, step * self.world_size)
            for rank, (begin, end) in enumerate(ranges):
                piece = tensor[min(begin + start, end) : min(begin + start + step, end)]
                stages[self.rank][rank * step : rank * step + piece.numel()].copy_(piece)
            self._meet_first(call)
            target = output[start : start + step]
            first = self.rank * step
            combine_in_order([stage[first : first + target.numel()] for stage in stages], target, op)
            self._number += 1

    def _reduce_rows(self, rows: list[torch.Tensor], output: torch.Tensor, op: ReduceOp) -> None:
        """Reduce ``rows`` into ``output`` block by block. It may be one of the rows; the others are not ours."""
        step = BLOCK_BYTES // output.itemsize
        # The sum of the first two rows must not take the place of a row that is yet to be added.
        is_late = any(row.data_ptr() == output.data_ptr() for row in rows[2:])
        spare = torch.empty(min(step, output.numel()), dtype=output.dtype) if is_late else output
        for start in range(0, output.numel(), step):
            blocks = [row[start : start + step] for row in rows]
            total = spare[: blocks[0].numel()] if is_late else output[start : start + step]
            combine_in_order(blocks, total, op)
            if is_late:
                output[start : start + step].copy_(total)

    def _exchange(
        self, call: Call, output: torch.Tensor, tensor: torch.Tensor, arriving: Sizes, leaving: Sizes
    ) -> None:
        """Exchange through stages: every rank puts its tensor into its own, and all take from it what is meant for
        them."""
        begins, ends, longest = self._compare_counts(call, arriving, leaving)
        into = output.split(arriving)
        step = STAGE_BYTES // output.itemsize
        for start in range(0, longest, step):
            stages = self._stages_now(output, step)
            mine = tensor[start : start + step]
            stages[self.rank][: mine.numel()].copy_(mine)
            self._meet_first(call)
            for begin, end, part, stage in zip(begins, ends, into, stages, strict=True):
                first, last = max(begin, start), min(end, start + step)
                if first < last:
                    part[first - begin : last - begin].copy_(stage[first - start : last - start])
            self._number += 1

    def _compare_counts(self, call: Call, arriving: Sizes, leaving: Sizes) -> tuple[list[int], list[int], int]:
        """Compare the counts of all ranks: where this rank's parts begin and end in each tensor, and the longest's
        size."""
        counts = torch.tensor([arriving, leaving])
        stages = self._stages_now(counts)
        stages[self.rank].copy_(counts.view(-1))
        self._meet_first(call)
        everybodys = [stage.view(2, -1).tolist() for stage in stages]
        self._number += 1
        for sender, receiver in itertools.product(range(self.world_size), repeat=2):
            sent, expected = everybodys[sender][1][receiver], everybodys[receiver][0][sender]
            if sent != expected:
                raise MismatchError(
                    f"rank {sender} sends {sent} elements to rank {receiver}, which expects {expected} of them"
                )
        offsets = [offsets_of(leaving) for _, leaving in everybodys]
        begins = [offset[self.rank] for offset in offsets]
        return begins, [offset[self.rank + 1] for offset in offsets], max(offset[-1] for offset in offsets)

    def _direct(self, call: Call, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """The ``tensor`` of every rank, if it is in shared memory on all ranks.

        In that case the ranks have synchronized, and must do so again.
        """
        headers = self._meet_first(call, self._heap.find(tensor))
        if not all_somewhere(headers):
            self._number += 1
            return None
        return self._everybodys(tensor, headers)

    # -- meeting the others ---------------------------------------------------------------------------------------

    def _meet_first(self, call: Call, place: Location | None = None) -> list[bytes]:
        """Synchronize, and check that all ranks run the same collective. All see all headers, so all raise alike."""
        mine = call.header() if place is None else call.header(place[0].number, place[1])
        self._signals.write_header(self._number, mine)
        self._signals.meet(call.describe)
        headers = self._signals.headers(self._number)
        if headers.count(mine) < len(headers) and differ(headers):
            self._number += 1
            raise collectives_differ([describe_header(header) for header in headers])
        return headers

    def _stages_now(self, like: torch.Tensor, numel: int | None = None) -> list[torch.Tensor]:
        """Everybody's stage of this collective, as a flat tensor with as many numbers as ``like``, or ``numel``."""
        nbytes = like.nbytes if numel is None else numel * like.itemsize
        key = (self._number % 2, nbytes, like.dtype)
        stages = self._known_stages.get(key)
        if stages is None:
            stages = [stage[:nbytes].view(like.dtype) for stage in self._stages[self._number % 2]]
            if len(self._known_stages) < MOST_KNOWN:
                self._known_stages[key] = stages
        return stages

    def _everybodys(self, tensor: torch.Tensor, headers: list[bytes]) -> list[torch.Tensor]:
        """What lies on each rank where its header says, with as many numbers as ``tensor``."""
        return [
            self._heap.segment(number).pieces[rank][start : start + tensor.nbytes].view(tensor.dtype)
            for rank, (number, start) in enumerate(places_in(headers))
        ]

    def _blocks(self, tensor: torch.Tensor, place: Location, headers: list[bytes]) -> Blocks:
        """This rank's share of a tensor that lies in shared memory on all ranks, cut into blocks."""
        segment, offset = place
        # Ranks allocate alike, so headers are nearly always the same altogether.
        if headers.count(headers[0]) < len(headers):
            return cut_share(self._everybodys(tensor, headers), self.rank)
        key = (offset, tensor.numel(), tensor.dtype)
        blocks = segment.known.get(key)
        if blocks is None:
            blocks = segment.known[key] = cut_share(self._everybodys(tensor, headers), self.rank)
        return blocks


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source``, unless it already lies in ``target``."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
