"""The sum over ranks through any coding, in as many bytes whatever the number of ranks.

::

    rank 0   a0 b0 c0  ── all to all ──▶  a0 a1 a2  ── decode, sum in float32, encode ──▶  A  ── all-gather ──▶  A B C
    rank 1   a1 b1 c1                     b0 b1 b2                                         B                     A B C
    rank 2   a2 b2 c2                     c0 c1 c2                                         C                     A B C

Each rank adds one share up, in float32 and in the order of ranks, and its sum is coded once more: a number is rounded
twice, never once for every rank. What everybody decodes in the end are the same bytes.

Where several ranks of a host share memory, they first make one exact sum of theirs, and "ranks" above are hosts: only
what leaves a host is coded, by one rank for each part of it.
"""

from collections.abc import Sequence

import torch

from gradsync.bucket import Bucket
from gradsync.communicator import Communicator, Handle, HierarchicalCommunicator
from gradsync.reduction.codings import Coding
from gradsync.reduction.compressing import Compressing

__all__ = ["Exchanged", "exchange", "gaps_of"]


class Exchanged(Compressing):
    """Sends what ``coding`` makes of gradients."""

    def __init__(self, coding: Coding) -> None:
        self.coding = coding

    def send(
        self, values: torch.Tensor, bucket: Bucket, communicator: Communicator, lost: torch.Tensor | None = None
    ) -> Handle:
        coding = self._coding_of(bucket, communicator)
        return exchange(coding, values, communicator, lost, gaps=gaps_of(bucket))

    def _coding_of(self, bucket: Bucket, communicator: Communicator) -> Coding:
        """What this bucket is coded with."""
        return self.coding


def exchange(
    coding: Coding,
    values: torch.Tensor,
    communicator: Communicator,
    lost: torch.Tensor | None = None,
    *,
    gaps: Sequence[slice] = (),
) -> Handle:
    """Sum ``values`` over the ranks, in place; ``lost`` gets what of this rank's is not in the sum.

    In ``gaps`` between gradients there is nothing, whatever the coding makes of it: what a block with NaN left there
    would break the next window, and a norm of the whole would count it.
    """

    def across(part: torch.Tensor, wire: Communicator) -> Handle:
        begin = (part.data_ptr() - values.data_ptr()) // values.element_size()
        lost_here = None if lost is None else lost[begin : begin + part.numel()]
        return _Exchange(coding, part, wire, lost_here).start()

    if isinstance(communicator, HierarchicalCommunicator):
        if lost is not None:
            # Inside hosts sums are exact. What is lost between them is lost by whoever takes it there.
            lost.zero_()
        handle = communicator.sum_by(values, across)
    else:
        handle = across(values, communicator)
    if not gaps:
        return handle

    def empty_gaps() -> None:
        for gap in gaps:
            values[gap].zero_()

    return handle.then(empty_gaps)


class _Exchange:
    """One tensor on its way."""

    def __init__(
        self, coding: Coding, values: torch.Tensor, communicator: Communicator, lost: torch.Tensor | None = None
    ) -> None:
        self._coding, self._values, self._communicator, self._lost = coding, values, communicator, lost
        ranks = communicator.world_size
        self._share = -(-values.numel() // (ranks * coding.multiple)) * coding.multiple
        self._row = coding.nbytes(self._share)
        # Rows are as long as the longest: the last ones are filled up with zeros.
        missing = ranks * self._share - values.numel()
        self._rows = torch.nn.functional.pad(values, (0, missing)).view(ranks, self._share)

    def start(self) -> Handle:
        coded = self._rows.new_empty((self._communicator.world_size, self._row), dtype=torch.uint8)
        self._coding.encode(self._rows, coded)
        if self._lost is not None:
            sent = torch.empty_like(self._rows)
            self._coding.decode(coded, sent)
            torch.sub(self._values, sent.view(-1)[: self._values.numel()], out=self._lost)
        self._arrived = torch.empty_like(coded)
        return self._communicator.all_to_all(self._arrived.view(-1), coded.view(-1)).then(self._sum).then(self._spread)

    def _sum(self) -> Handle:
        total, part = self._rows.new_zeros(self._share), self._rows.new_empty(self._share)
        for row in self._arrived:
            self._coding.decode(row, part)
            total.add_(part)
        own = self._arrived.new_empty(self._row)
        self._coding.encode(total, own)
        if self._lost is not None:
            self._lose(total, own, part)
        self._all = self._arrived.view(-1)
        return self._communicator.all_gather(self._all, own)

    def _lose(self, total: torch.Tensor, own: torch.Tensor, part: torch.Tensor) -> None:
        """What the second coding has lost of the share that this rank added up counts as lost by this rank."""
        assert self._lost is not None
        self._coding.decode(own, part)
        begin = self._communicator.rank * self._share
        mine = self._lost[begin : begin + self._share]
        mine.add_(total.sub_(part)[: mine.numel()])

    def _spread(self) -> None:
        self._coding.decode(self._all.view_as(self._arrived), self._rows)
        self._values.copy_(self._rows.view(-1)[: self._values.numel()])


def gaps_of(bucket: Bucket) -> list[slice]:
    """Where in a bucket's payload no gradient lies."""
    ends = [slot.offset + slot.numel for slot in bucket.plan.slots]
    starts = [*(slot.offset for slot in bucket.plan.slots[1:]), bucket.plan.payload]
    return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
