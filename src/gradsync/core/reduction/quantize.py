"""Reductions that send gradients in fewer bytes per number: ``Cast``, ``Quantize`` and ``Sign``.

[Note: coded sums] Sums go through a coding; the bytes per rank do not depend on the number of ranks.

::

    rank 0   a0 b0 c0  ── all to all ──▶  a0 a1 a2  ── decode, sum in float32, encode ──▶  A  ── all-gather ──▶  A B C
    rank 1   a1 b1 c1                     b0 b1 b2                                         B                     A B C
    rank 2   a2 b2 c2                     c0 c1 c2                                         C                     A B C

Each rank sums one share, in float32 and in the order of ranks, and its sum is coded once more: a number is rounded
twice, not once per rank, and what a rank adds to its own share is not rounded first. All ranks decode the same bytes in
the end.

Two ranks on accelerators use a shortcut: each gathers what the other has coded, and adds up both. That takes the same
number of bytes in one collective instead of two that wait for each other, and one rounding instead of two.

::

    rank 0   a0 b0  ── all-gather ──▶  a0 b0 a1 b1  ── decode, sum in float32 ──▶  A B

Where several ranks of a host share memory, they first compute one exact sum of theirs, and "ranks" above are hosts:
only what leaves a host is coded, by one rank for each part of it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator, Handle, HandleWithFinish, HierarchicalCommunicator
from gradsync.core.bucket import Bucket
from gradsync.core.reduction.base import Compressing, sends_nothing
from gradsync.core.reduction.codings import Blocks, Coding, FourLevels, Noise, Rounded, Signs

__all__ = ["Cast", "CodedReduction", "Quantize", "Sign", "gaps_of", "sum_coded"]


class CodedReduction(Compressing):
    """Sends gradients in the format of ``coding``."""

    def __init__(self, coding: Coding) -> None:
        self.coding = coding

    def unit(self, ranks: int) -> int:
        return self.coding.multiple * ranks

    def send(
        self, values: torch.Tensor, bucket: Bucket, communicator: Communicator, lost: torch.Tensor | None = None
    ) -> Handle:
        coding = self.coding_of(bucket, communicator)
        return sum_coded(coding, values, communicator, lost, gaps=gaps_of(bucket))

    def coding_of(self, bucket: Bucket, communicator: Communicator) -> Coding:
        """The coding to use for this bucket."""
        return self.coding


def sum_coded(
    coding: Coding,
    values: torch.Tensor,
    communicator: Communicator,
    lost: torch.Tensor | None = None,
    *,
    gaps: Sequence[slice] = (),
) -> Handle:
    """Sum ``values`` over the ranks, in place; ``lost`` gets the part of this rank's values that is not in the sum.

    The ``gaps`` between gradients stay empty, whatever the coding makes of them: what a block with NaN left there would
    break the next window, and a norm of the whole would include it.
    """

    def across(part: torch.Tensor, between: Communicator) -> Handle:
        begin = (part.data_ptr() - values.data_ptr()) // values.element_size()
        lost_here = None if lost is None else lost[begin : begin + part.numel()]
        if between.world_size == 2 and not part.is_cpu:
            return _gather(coding, part, between, lost_here)
        return _CodedSum(coding, part, between, lost_here).start()

    if isinstance(communicator, HierarchicalCommunicator):
        if lost is not None:
            # Inside hosts sums are exact. What is lost between hosts is lost by the rank that sends it.
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


def _gather(coding: Coding, values: torch.Tensor, communicator: Communicator, lost: torch.Tensor | None) -> Handle:
    """Sum ``values`` by an all-gather of what each rank has coded: all ranks decode and add everything."""
    missing = -values.numel() % coding.multiple
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    coded = values.new_empty(coding.nbytes(padded.numel()), dtype=torch.uint8)
    coding.encode(padded, coded)
    if lost is not None:
        decoded = torch.empty_like(padded)
        coding.decode(coded, decoded)
        torch.sub(values, decoded[: values.numel()], out=lost)
    arrived = coded.new_empty(communicator.world_size, coded.numel())

    def add() -> None:
        coding.decode(arrived[0], padded)
        for row in arrived[1:]:
            coding.decode(row, padded, add=1.0)
        if missing:
            values.copy_(padded[: values.numel()])

    return communicator.all_gather(arrived.view(-1), coded).then(add)


class _CodedSum:
    """The sum of one tensor over the ranks, while it is computed: by an all-to-all, and an all-gather of the sums."""

    def __init__(
        self, coding: Coding, values: torch.Tensor, communicator: Communicator, lost: torch.Tensor | None = None
    ) -> None:
        self._coding, self._values, self._communicator, self._lost = coding, values, communicator, lost
        ranks = communicator.world_size
        self._share = -(-values.numel() // (ranks * coding.multiple)) * coding.multiple
        self._row = coding.nbytes(self._share)
        # Rows are as long as the longest. Full rows lie in ``values``, the others are padded with zeros.
        self._full = values.numel() // self._share
        self._end = self._full * self._share
        self._rows = values[: self._end].view(self._full, self._share)
        missing = ranks * self._share - values.numel()
        self._rest = torch.nn.functional.pad(values[self._end :], (0, missing)).view(ranks - self._full, self._share)

    def start(self) -> Handle:
        coded = self._values.new_empty((self._communicator.world_size, self._row), dtype=torch.uint8)
        for rows, target in self._others(self._rows, self._rest, coded):
            self._coding.encode(rows, target)
        if self._lost is not None:
            self._lost.copy_(self._values)
            full, rest = self._lost[: self._end].view_as(self._rows), self._rest.clone()
            for rows, sent in self._others(full, rest, coded):
                self._coding.decode(sent, rows, add=-1.0)
            self._own(full, rest).zero_()
            self._lost[self._end :] = rest.view(-1)[: self._values.numel() - self._end]
        self._arrived = torch.empty_like(coded)
        return self._communicator.all_to_all(self._arrived.view(-1), coded.view(-1)).then(self._sum).then(self._spread)

    def _others(
        self, full: torch.Tensor, rest: torch.Tensor, coded: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The rows for other ranks, and the memory to code them in. This rank adds its own uncoded: it is not sent."""
        own, ranks = self._communicator.rank, self._communicator.world_size
        for first, end in ((0, own), (own + 1, ranks)):
            middle = min(max(first, self._full), end)
            yield full[first:middle], coded[first:middle]
            yield rest[max(middle - self._full, 0) : max(end - self._full, 0)], coded[max(middle, self._full) : end]

    def _own(self, full: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        own = self._communicator.rank
        return full[own] if own < self._full else rest[own - self._full]

    def _sum(self) -> Handle:
        # In the order of ranks, where it matters: for two numbers the sum is the same either way.
        mine = self._communicator.rank
        own_first = len(self._arrived) == 2 or mine == 0
        total = self._own(self._rows, self._rest) if own_first else self._values.new_zeros(self._share)
        for rank, row in enumerate(self._arrived):
            if rank != mine:
                self._coding.decode(row, total, add=1.0)
            elif not own_first:
                total.add_(self._own(self._rows, self._rest))
        own = self._arrived.new_empty(self._row)
        self._coding.encode(total, own)
        if self._lost is not None:
            self._add_lost(total, own)
        return self._communicator.all_gather(self._arrived.view(-1), own)

    def _add_lost(self, total: torch.Tensor, own: torch.Tensor) -> None:
        """Count as lost by this rank what the second coding has lost of the share that this rank summed."""
        assert self._lost is not None
        self._coding.decode(own, total, add=-1.0)
        begin = self._communicator.rank * self._share
        mine = self._lost[begin : begin + self._share]
        mine.add_(total[: mine.numel()])

    def _spread(self) -> None:
        self._coding.decode(self._arrived[: self._full], self._rows)
        self._coding.decode(self._arrived[self._full :], self._rest)
        self._values[self._end :] = self._rest.view(-1)[: self._values.numel() - self._end]


def gaps_of(bucket: Bucket) -> list[slice]:
    """The parts of a bucket's payload that hold no gradient."""
    ends = [slot.offset + slot.numel for slot in bucket.plan.slots]
    starts = [*(slot.offset for slot in bucket.plan.slots[1:]), bucket.plan.payload]
    return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


class Cast(CodedReduction):
    """Sends gradients in ``dtype``.

    In a wider dtype they are summed in it, too. In a narrower one they are summed in float32, whatever the number of
    ranks: see [Note: coded sums]. float16, whose numbers end at 65504, gets a scale for every
    thousand of them, so that neither large nor small gradients are lost.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ConfigurationError(f"Cast needs a floating-point dtype such as torch.bfloat16, got {dtype}")
        self.dtype = dtype
        self._scales = Rounded(dtype).scales
        super().__init__(Rounded(dtype))

    def __repr__(self) -> str:
        return f"Cast({self.dtype})"

    @property
    def carries_tail(self) -> bool:  # type: ignore[override]
        # A flag that shared its scale with large numbers would vanish.
        return not self._scales

    def unit(self, ranks: int) -> int:
        return super().unit(ranks) if self._scales else 1

    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        flat = bucket.flat if self.carries_tail else bucket.payload.data
        if not self.carries_tail and sends_nothing(bucket, communicator):
            return super().start(bucket, communicator, divisor)
        if flat.dtype == self.dtype or communicator.world_size == 1:
            return communicator.all_reduce(flat)
        if torch.promote_types(flat.dtype, self.dtype) == self.dtype or self._adds_alike(communicator):
            cast = flat.to(self.dtype)
            return HandleWithFinish(communicator.all_reduce(cast), lambda: flat.copy_(cast))
        values = flat.float()
        gaps = [] if self.carries_tail else gaps_of(bucket)

        def put_back() -> None:
            flat.copy_(values)

        return sum_coded(self.coding, values, communicator, gaps=gaps).then(put_back)

    def _adds_alike(self, communicator: Communicator) -> bool:
        """Whether numbers can be summed in place equally well: with two, the sum is rounded once either way."""
        return communicator.world_size == 2 and not self._scales


BLOCK = 256
BITS = (8, 4, 2)


class Quantize(CodedReduction):
    """Integers of 8 or 4 bits; ``block`` neighbours share a scale, and their largest is exact. With 2 bits, their signs
    and two magnitudes that suit the block.

    ``stochastic`` rounds up or down at random, so that the mean over many windows is right. By default the error of a
    single window is smaller, and :class:`~gradsync.core.reduction.error_feedback.ErrorFeedback` makes up for it; 2 bits
    need it.
    """

    def __init__(self, bits: int = 8, *, block: int = BLOCK, stochastic: bool = False, seed: int = 0) -> None:
        if bits not in BITS:
            raise ConfigurationError(f"Quantize offers {', '.join(map(str, BITS))} bits, got {bits!r}")
        if bits == 2 and stochastic:
            raise ConfigurationError(
                "Quantize(2) has no equal steps to round between at random. Use 4 or 8 bits with stochastic=True, or "
                "ErrorFeedback(Quantize(2))"
            )
        _check_block(block, "Quantize")
        self.bits, self.block, self.stochastic, self.seed = bits, block, stochastic, seed
        self._windows = 0
        super().__init__(FourLevels(block) if bits == 2 else Blocks(bits, block))

    def __repr__(self) -> str:
        block = "" if self.block == BLOCK else f", block={self.block}"
        return f"Quantize({self.bits}{block}" + (f", stochastic=True, seed={self.seed})" if self.stochastic else ")")

    def coding_of(self, bucket: Bucket, communicator: Communicator) -> Coding:
        if not self.stochastic:
            return self.coding
        # If all ranks erred alike, errors would not average out; and buckets come in no reproducible order.
        return Blocks(self.bits, self.block, Noise(self.seed, communicator.rank, self._windows, bucket.index))

    def window_ended(self, *, succeeded: bool, correction: float | torch.Tensor = 1.0) -> None:
        self._windows += succeeded

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self._windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._windows = int(state.get("windows", 0))


class Sign(CodedReduction):
    """One bit per number; ``block`` neighbours all decode to their average magnitude.

    By itself it does not converge: wrap it in :class:`~gradsync.core.reduction.error_feedback.ErrorFeedback`.
    """

    def __init__(self, *, block: int = BLOCK) -> None:
        _check_block(block, "Sign")
        self.block = block
        super().__init__(Signs(block))

    def __repr__(self) -> str:
        return "Sign()" if self.block == BLOCK else f"Sign(block={self.block})"


def _check_block(block: int, name: str) -> None:
    if not isinstance(block, int) or block < 32 or block % 32:
        raise ConfigurationError(f"{name} needs blocks of a multiple of 32 numbers, got {block!r}")
