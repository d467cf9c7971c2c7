"""Collectives built from point-to-point messages: every rank exchanges pieces directly with every other rank.

A tensor is cut into a *share* for every rank, and a share into *parts*::

                   share 0     share 1     share 2            rank 1, part 0 of an all-reduce
    rank 0      [ . . . . . | a . . . . | . . . . . ]    1  receives a and c, sends its own pieces of shares 0 and 2
    rank 1      [ . . . . . | b . . . . | . . . . . ]    2  adds (a + b) + c: always in the order of the ranks
    rank 2      [ . . . . . | c . . . . | . . . . . ]    3  sends the sum to ranks 0 and 2, receives theirs

The owner of a share sums it for all, so all ranks hold the same bits, and the order of summation depends neither on
timing nor on the sizes: the result equals that of ranks that are threads of one process. Several parts are in flight at
a time, so that sums are computed while bytes cross the link.

Gloo's reduce-scatter is a whole all-reduce and a slice, which moves twice the bytes of this one; its all-gather goes
through a temporary. A small all-reduce takes one step instead of two: every rank sends all pieces to every other rank,
and all ranks sum everything.

With 2 ranks the size of a part makes no difference over a link: 1 to 8 MiB all reach 94 % of the rate or more. On
loopback every message costs thread switches: 100 MB take 63 ms in parts of 8 MiB and 76 in parts of 2, where Gloo's
all-reduce takes 74. A reduce-scatter followed by an all-gather synchronizes twice, each time with a round trip of
messages before any data moves: relative to Gloo's all-reduce it takes 1.1 to 1.2 times as long at 4 MiB and 0.89 at 100
(``benchmarks/peer_exchange.py``).
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from gradsync.base.errors import ConfigurationError
from gradsync.communicator.background import Background, Numbering
from gradsync.communicator.base import Handle, ReduceOp
from gradsync.communicator.base_communicator import BaseCommunicator, Here, Shares, Sizes, Start
from gradsync.communicator.collective import Collective
from gradsync.communicator.peer_link import Exchange, Message, PeerLink
from gradsync.communicator.process_group import ProcessGroupCommunicator, break_gloo, state_of
from gradsync.communicator.reducing import combine, divide, offsets_of, work_on_flat
from gradsync.communicator.transport_state import find_root_cause

__all__ = ["PeerExchangeCommunicator"]

# Memory for parts that are under way to this rank, two from every peer.
SCRATCH_BYTES = 16 << 20
IN_FLIGHT = 2
# The most that a second step costs, in bytes that could cross a slow link meanwhile, and the most worth summing twice.
# Two ranks send as much in one step as in two. On loopback one step took a quarter less time at 2 MiB and a tenth less
# at 4 MiB; over 400 Mbit/s, where sums hide behind the bytes of the other half, 3 % more from 1 MiB on.
STEP_BYTES = 32 << 10
DIRECT_BYTES = 1 << 20
# Sizes of messages for which the rows of the scratch memory are kept. There are few, unless sizes are data.
MOST_KNOWN = 64


# The messages of a part, by the peer that sends it, each with where it arrives.
_Arriving = dict[int, tuple[Message, torch.Tensor]]
# Combines this rank's own piece with those that arrive, into the third argument.
_Fold = Callable[[torch.Tensor, _Arriving, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """How a flat tensor is divided: into shares, some of them smaller or empty, and each share into parts."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    part: int
    parts: int

    def at(self, share: int, part: int) -> slice:
        end = self.ends[share]
        start = min(end, self.starts[share] + part * self.part)
        return slice(start, min(end, start + self.part))

    def share(self, number: int) -> slice:
        return slice(self.starts[number], self.ends[number])


@functools.lru_cache(maxsize=MOST_KNOWN)
def _cut_shares(counts: tuple[int, ...], most: int) -> _Cut:
    """Shares of these sizes, in parts of at most that many elements."""
    largest, offsets = max(counts), tuple(offsets_of(counts))
    part = max(1, min(largest, most))
    return _Cut(starts=offsets[:-1], ends=offsets[1:], part=part, parts=-(-largest // part))


@functools.lru_cache(maxsize=MOST_KNOWN)
def _cut_evenly(numel: int, ranks: int, most: int) -> _Cut:
    """A cut into as many shares as ``ranks``, of one size; the last of them smaller or empty."""
    share = -(-numel // ranks)
    ends = [min(numel, number * share) for number in range(ranks + 1)]
    return _cut_shares(tuple(end - start for start, end in itertools.pairwise(ends)), most)


class PeerExchangeCommunicator(BaseCommunicator):
    """Reduce-scatter, all-gather and collectives composed of them, over the point-to-point messages of a Gloo group.

    ``part_bytes`` is the size of a message; ``in_flight`` is how many are received into their own memory at a time. By
    default all of these take 16 MiB together.
    Tensors that are not on the CPU use Gloo's own collectives.
    """

    tells_failures = True

    def __init__(self, group: dist.ProcessGroup, *, part_bytes: int | None = None, in_flight: int = IN_FLIGHT) -> None:
        if (part_bytes is not None and part_bytes < 1) or in_flight < 1:
            raise ConfigurationError(
                f"part_bytes and in_flight must be at least 1, got part_bytes={part_bytes}, in_flight={in_flight}"
            )
        self._link = PeerLink(group)
        super().__init__(self._link.rank, self._link.world_size, group, state=state_of(group))
        peers = max(1, self.world_size - 1)
        self._part_bytes = max(1, SCRATCH_BYTES // (2 * peers)) if part_bytes is None else part_bytes
        # Of every peer: at least two, so that one is summed while the next arrives.
        self._ahead = max(2, in_flight // peers)
        self._gloo = ProcessGroupCommunicator(group)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._known_rows: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}

    def _make_queue(self) -> Background:
        return Background("gradsync peer exchange")

    def _make_numbering(self, number: int | str) -> Numbering:
        return self._link.place(number)

    def _tell_others(self, reason: str) -> None:
        find_root_cause(self.group, self._given_up_text(reason))
        break_gloo(self._link.backend, self.rank, self.world_size)
        self._link.give_up()

    # -- the collectives ----------------------------------------------------------------------------------------------

    def _route(self, collective: Collective, tensor: torch.Tensor, elsewhere: Start, here: Here) -> Handle:
        return here(collective) if tensor.is_cpu else elsewhere(self._gloo)

    def _all_reduce(self, collective: Collective, tensor: torch.Tensor, op: ReduceOp) -> Handle:
        fold = partial(self._fold, op)
        if self._is_small(tensor):
            return self._start(collective, tensor, 1, lambda x, flat: self._reduce_at_once(x, flat, fold))
        cut = _cut_evenly(tensor.numel(), self.world_size, self._most(tensor))

        def run(exchange: Exchange, flat: torch.Tensor) -> None:
            self._reduce(exchange, flat, flat[cut.share(self.rank)], cut, fold, pass_on=True)

        return self._start(collective, tensor, 2 * cut.parts, run)

    def _broadcast(self, collective: Collective, tensor: torch.Tensor, source: int) -> Handle:
        receivers = max(1, self.world_size - 1)
        # Passing on takes a step more, and spares the source's link all bytes but one copy.
        passed_on = receivers > 1 and tensor.nbytes > STEP_BYTES
        cut = _cut_evenly(tensor.numel(), receivers if passed_on else 1, self._most(tensor))

        def run(exchange: Exchange, flat: torch.Tensor) -> None:
            (self._pass_on if passed_on else self._give)(exchange, flat, source, cut)

        return self._start(collective, tensor, 2 * cut.parts, run)

    def _all_gather(self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, shares: Shares) -> Handle:
        cut = self._cut(output, shares)

        def run(exchange: Exchange, flat: torch.Tensor) -> None:
            mine = flat[cut.share(self.rank)]
            if mine.data_ptr() != tensor.data_ptr():
                mine.copy_(tensor)
            self._gather(exchange, flat, cut)

        return self._start(collective, output, cut.parts, run)

    def _reduce_scatter(
        self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, shares: Shares
    ) -> Handle:
        fold, cut = partial(self._fold, op), self._cut(tensor, shares)

        def run(exchange: Exchange, share: torch.Tensor) -> None:
            self._reduce(exchange, tensor, share, cut, fold, pass_on=False)

        return self._start(collective, output, 2 * cut.parts, run)

    def _all_to_all(
        self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, arriving: Sizes, leaving: Sizes
    ) -> Handle:

        def run(exchange: Exchange, flat: torch.Tensor) -> None:
            # A message for every peer, since no rank knows how many another pair would have.
            into, out = flat.split(arriving), tensor.split(leaving)
            for peer in self._link.peers:
                exchange.receive(peer, into[peer], 0)
                exchange.send(peer, out[peer], 0)
            into[self.rank].copy_(out[self.rank])

        return self._start(collective, output, 1, run)

    # -- what runs in the background ----------------------------------------------------------------------------------

    def _reduce_at_once(self, exchange: Exchange, flat: torch.Tensor, fold: _Fold) -> None:
        """Reduce in one step: every rank sends everything to every other rank, and all sum everything."""
        *rows, total = self._rows(self.world_size, flat.numel(), flat.dtype)
        messages = self._receive_rows(exchange, rows, 0)
        for peer in self._link.peers:
            exchange.send(peer, flat, 0)
        fold(flat, messages, total)
        # The peers must have had the summand before the sum takes its place.
        exchange.finish_sends()
        flat.copy_(total)

    def _reduce(
        self, exchange: Exchange, tensor: torch.Tensor, share: torch.Tensor, cut: _Cut, fold: _Fold, *, pass_on: bool
    ) -> None:
        """Sum this rank's share of ``tensor`` into ``share``, which with ``pass_on`` everybody else receives, too."""
        ahead = min(cut.parts, self._ahead)
        slots = self._rows(ahead * (self.world_size - 1), cut.part, tensor.dtype)
        waiting: dict[int, _Arriving] = {}

        def start(part: int) -> None:
            mine = cut.at(self.rank, part)
            first = part % ahead * (self.world_size - 1)
            rows = slots[first : first + self.world_size - 1]
            if mine.stop - mine.start < cut.part:
                rows = [row[: mine.stop - mine.start] for row in rows]
            waiting[part] = self._receive_rows(exchange, rows, 2 * part)
            for peer in self._link.peers:
                piece = tensor[cut.at(peer, part)]
                exchange.send(peer, piece, 2 * part)
                # Its owner has all of the piece before it sends the sum that takes the piece's place.
                if pass_on:
                    exchange.receive(peer, piece, 2 * part + 1)

        for part in range(ahead):
            start(part)
        for part in range(cut.parts):
            total = share if cut.parts == 1 else share[part * cut.part : (part + 1) * cut.part]
            fold(tensor[cut.at(self.rank, part)], waiting.pop(part), total)
            if pass_on:
                for peer in self._link.peers:
                    exchange.send(peer, total, 2 * part + 1)
            if part + ahead < cut.parts:
                start(part + ahead)

    def _gather(self, exchange: Exchange, flat: torch.Tensor, cut: _Cut) -> None:
        for part, peer in itertools.product(range(cut.parts), self._link.peers):
            exchange.receive(peer, flat[cut.at(peer, part)], part)
            exchange.send(peer, flat[cut.at(self.rank, part)], part)

    def _give(self, exchange: Exchange, flat: torch.Tensor, source: int, cut: _Cut) -> None:
        """The source sends everything to every rank."""
        for part in range(cut.parts):
            piece = flat[cut.at(0, part)]
            if self.rank != source:
                exchange.receive(source, piece, part)
                continue
            for peer in self._link.peers:
                exchange.send(peer, piece, part)

    def _pass_on(self, exchange: Exchange, flat: torch.Tensor, source: int, cut: _Cut) -> None:
        """The source sends every other rank a share, which that rank passes on to the others."""
        receivers = [rank for rank in range(self.world_size) if rank != source]
        if self.rank == source:
            for part in range(cut.parts):
                for share, peer in enumerate(receivers):
                    exchange.send(peer, flat[cut.at(share, part)], 2 * part)
            return
        mine = receivers.index(self.rank)
        others = [(share, peer) for share, peer in enumerate(receivers) if peer != self.rank]
        arrivals = []
        for part in range(cut.parts):
            arrivals.append(exchange.receive(source, flat[cut.at(mine, part)], 2 * part))
            for share, peer in others:
                exchange.receive(peer, flat[cut.at(share, part)], 2 * part + 1)
        for part, arrival in enumerate(arrivals):
            arrival.wait()
            for _, peer in others:
                exchange.send(peer, flat[cut.at(mine, part)], 2 * part + 1)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _start(
        self, collective: Collective, result: torch.Tensor, messages: int, run: Callable[[Exchange, torch.Tensor], None]
    ) -> Handle:
        """Have ``run`` put the outcome into ``result``, which it gets as a flat tensor."""
        self._refuse_after_failure()
        exchange = self._link.exchange(collective, messages, self._place())

        def work(flat: torch.Tensor) -> None:
            run(exchange, flat)
            exchange.finish()

        return self._queue_up(collective, lambda: work_on_flat(result, work))

    def _most(self, tensor: torch.Tensor) -> int:
        """The most elements that a part may have."""
        return max(1, self._part_bytes // tensor.element_size())

    def _cut(self, tensor: torch.Tensor, shares: Shares) -> _Cut:
        if shares is None:
            return _cut_evenly(tensor.numel(), self.world_size, self._most(tensor))
        return _cut_shares(shares, self._most(tensor))

    def _is_small(self, tensor: torch.Tensor) -> bool:
        """Whether to spare a step is worth the bytes: (n - 1) tensors are sent in one step, 2 (n - 1) / n in two."""
        n = self.world_size
        return tensor.nbytes <= DIRECT_BYTES and tensor.nbytes * (n - 1) * (n - 2) <= STEP_BYTES * n

    def _rows(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Memory for ``count`` messages. One collective runs at a time, so it is the same for all of them."""
        key = (count, numel, dtype)
        rows = self._known_rows.get(key)
        if rows is not None:
            return rows
        size = count * numel * dtype.itemsize
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
            self._known_rows.clear()
        rows = (
            list(self._scratch[:size].view(dtype).view(count, numel)) if size else [torch.empty(0, dtype=dtype)] * count
        )
        if len(self._known_rows) < MOST_KNOWN:
            self._known_rows[key] = rows
        return rows

    def _receive_rows(self, exchange: Exchange, rows: list[torch.Tensor], number: int) -> _Arriving:
        return {
            peer: (exchange.receive(peer, row, number), row) for peer, row in zip(self._link.peers, rows, strict=True)
        }

    def _fold(self, op: ReduceOp, mine: torch.Tensor, arriving: _Arriving, total: torch.Tensor) -> None:
        """Combine what the peers sent with this rank's own piece, in rank order, into ``total``, which may be ``mine``.

        What precedes this rank's turn is combined in rank 0's piece.
        """
        so_far = mine
        for rank in range(self.world_size):
            piece = mine
            if rank != self.rank:
                message, piece = arriving[rank]
                message.wait()
            if rank == 0:
                so_far = piece
                continue
            target = so_far if rank < self.rank else total
            combine(so_far, piece, op, target)
            so_far = target
        if self.world_size == 1:
            total.copy_(mine)
        divide(total, op, self.world_size)
