"""Codings: compact formats for sending numbers. A coding turns rows of numbers into rows of bytes, and back.

It computes in float32. Rows of float64 are converted piece by piece, and decoded numbers are added to them in float64.

All but bfloat16 work on *blocks*: a fixed number of neighbours share one scale, which is stored before them as a
float32. A block that holds NaN or Inf has a scale that is not finite, so that all of it decodes to numbers that are not
finite: errors stay visible. The same bytes decode to the same bits on every rank.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch

from gradsync.core.reduction import fused

__all__ = ["Blocks", "Coding", "FourLevels", "Noise", "Rounded", "Signs"]

SCALE_BYTES = torch.float32.itemsize
# How many float16 numbers share a scale, which only has to keep the largest in range.
WIDE_BLOCK = 1024
# How many of them a core works on at a time.
CACHED = 256 * 1024


class Coding(Protocol):
    """Converts rows of ``multiple`` numbers, or of several times as many, to bytes and back."""

    @property
    def multiple(self) -> int:
        """The number that the length of a row must be a multiple of."""

    def nbytes(self, numel: int) -> int:
        """The length in bytes of a row of ``numel`` numbers."""

    def encode(self, values: torch.Tensor, coded: torch.Tensor) -> None:
        """Encode the rows of ``values``, float32 or float64, into those of ``coded``, uint8."""

    def decode(self, coded: torch.Tensor, values: torch.Tensor, *, add: float | None = None) -> None:
        """Decode the rows of ``coded`` into ``values``; or add the result, times ``add``, to what is there."""


class Rounded:
    """A coding as a different floating-point type. float16 gets scales that are powers of two: they shift exponents."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # A type with the exponents of float32 needs no scaling.
        self.scales = torch.finfo(dtype).max < torch.finfo(torch.float32).max / 2
        self.multiple = WIDE_BLOCK if self.scales else 4

    def nbytes(self, numel: int) -> int:
        scales = numel // self.multiple * SCALE_BYTES if self.scales else 0
        return scales + numel * self.dtype.itemsize

    def encode(self, values: torch.Tensor, coded: torch.Tensor) -> None:
        if not self.scales:
            coded.view(self.dtype).copy_(values)
            return
        for piece, scales, numbers in _pieces(values, coded, self.multiple):
            self._encode(piece.float(), scales, numbers)

    def _encode(self, values: torch.Tensor, scales: torch.Tensor, numbers: torch.Tensor) -> None:
        blocks = values.unflatten(-1, (-1, self.multiple))
        largest = _largest(blocks)
        # The largest ends up between a half and one, far from where float16 overflows and from where it loses digits.
        exponents = torch.frexp(largest)[1].clamp_(-125, 126)
        scales.copy_(torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), exponents), largest))
        numbers.view(self.dtype).unflatten(-1, (-1, self.multiple)).copy_(blocks / scales.unsqueeze(-1))

    def decode(self, coded: torch.Tensor, values: torch.Tensor, *, add: float | None = None) -> None:
        if not self.scales:
            numbers = coded.view(self.dtype)
            values.copy_(numbers) if add is None else values.add_(numbers, alpha=add)
            return
        for values_here, scales, numbers in _pieces(values, coded, self.multiple):
            blocks = values_here.unflatten(-1, (-1, self.multiple))
            rounded = numbers.view(self.dtype).unflatten(-1, (-1, self.multiple))
            if add is None:
                blocks.copy_(rounded).mul_(scales.unsqueeze(-1))
            else:
                # Scales are powers of two, so that products are exact and only the sum is rounded.
                blocks.addcmul_(rounded.to(values.dtype), scales.unsqueeze(-1).to(values.dtype), value=add)


class Blocks:
    """A coding as integers of 8 or 4 bits, times the scale of their block.

    Rounding is to nearest; with ``noise`` it is up or down at random, so that the expected value is the number.
    """

    def __init__(self, bits: int, block: int, noise: "Noise | None" = None) -> None:
        self.bits, self.multiple = bits, block
        self._levels = 2 ** (bits - 1) - 1
        self._noise = noise

    def nbytes(self, numel: int) -> int:
        return numel // self.multiple * SCALE_BYTES + numel * self.bits // 8

    def encode(self, values: torch.Tensor, coded: torch.Tensor) -> None:
        for piece, scales, packed in _pieces(values, coded, self.multiple):
            self._encode(piece.float(), scales, packed)

    def _encode(self, values: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor) -> None:
        if self._noise is None and fused.available(values, self.multiple):
            fused.run_blocks("encode", values, scales, packed, self.bits)
            return
        blocks = values.unflatten(-1, (-1, self.multiple))
        scales.copy_(_largest(blocks))
        # A block of zeros has no scale, and needs none. If a scale is too small to have an inverse, it counts as zero.
        factors = (self._levels / scales).unsqueeze(-1)
        numbers = blocks * factors.masked_fill_(factors.isinf(), 0.0)
        if self._noise is None:
            # The largest of a block is off by some of its last bits: what it rounds to is the highest level.
            numbers.round_()
        else:
            numbers.add_(self._noise.like(numbers)).floor_().clamp_(-self._levels, self._levels)
        # Not by a Python number: a GPU would multiply with its inverse, and round differently.
        scales.div_(torch.full_like(scales, self._levels))
        if self.bits == 8:
            packed.view(torch.int8).copy_(numbers.flatten(-2))
            return
        # The first half of a block lies in the lower bits, the second in the upper ones, both from 1 to 15.
        lower, upper = numbers.to(torch.int8).add_(8).view(torch.uint8).chunk(2, dim=-1)
        torch.add(lower, upper, alpha=16, out=packed.unflatten(-1, (-1, self.multiple // 2)))

    def decode(self, coded: torch.Tensor, values: torch.Tensor, *, add: float | None = None) -> None:
        _decode_pieces(self._decode, _pieces(values, coded, self.multiple), add)

    def _decode(self, scales: torch.Tensor, packed: torch.Tensor, values: torch.Tensor) -> None:
        if fused.available(values, self.multiple):
            fused.run_blocks("decode", values, scales, packed, self.bits)
            return
        blocks = values.unflatten(-1, (-1, self.multiple))
        if self.bits == 8:
            blocks.copy_(packed.view(torch.int8).unflatten(-1, (-1, self.multiple)))
        else:
            halves = packed.unflatten(-1, (-1, self.multiple // 2))
            lower, upper = blocks.chunk(2, dim=-1)
            lower.copy_((halves & 15).view(torch.int8).sub_(8))
            upper.copy_((halves >> 4).view(torch.int8).sub_(8))
        blocks.mul_(scales.unsqueeze(-1))


class Noise:
    """An independent source of random numbers, the same for the same ``key``.

    Compression does not change anyone's dropout, and a run that resumes elsewhere continues alike.
    """

    def __init__(self, *key: int) -> None:
        self._seed = zlib.crc32(repr(key).encode())
        self._generator: torch.Generator | None = None

    def like(self, numbers: torch.Tensor) -> torch.Tensor:
        """Random numbers from 0 to 1, of the same shape as ``numbers`` and on the same device."""
        if self._generator is None:
            self._generator = torch.Generator(numbers.device).manual_seed(self._seed)
        return torch.rand(numbers.shape, generator=self._generator, device=numbers.device)


class Signs:
    """A coding of one bit per number: whether it is negative. All of a block decode to their average magnitude."""

    def __init__(self, block: int) -> None:
        self.multiple = block

    def nbytes(self, numel: int) -> int:
        return numel // self.multiple * SCALE_BYTES + numel // 8

    def encode(self, values: torch.Tensor, coded: torch.Tensor) -> None:
        scales, packed = _split(coded, values.shape[-1] // self.multiple)
        torch.linalg.vector_norm(values.float().unflatten(-1, (-1, self.multiple)), 1, dim=-1, out=scales)
        scales.div_(self.multiple)
        # A row in eight parts, one per bit: neighbours in a part are neighbours in memory.
        packed.zero_()
        for bit, part in enumerate(torch.signbit(values).chunk(8, dim=-1)):
            packed.add_(part.to(torch.uint8), alpha=1 << bit)

    def decode(self, coded: torch.Tensor, values: torch.Tensor, *, add: float | None = None) -> None:
        scales, packed = _split(coded, values.shape[-1] // self.multiple)
        _decode_pieces(self._decode, [(values, scales, packed)], add)

    def _decode(self, scales: torch.Tensor, packed: torch.Tensor, values: torch.Tensor) -> None:
        for bit, part in enumerate(values.chunk(8, dim=-1)):
            part.copy_(packed & (1 << bit)).clamp_(max=1.0).mul_(-2.0).add_(1.0)
        values.unflatten(-1, (-1, self.multiple)).mul_(scales.unsqueeze(-1))


class FourLevels:
    """A coding of two bits per number: whether it is negative, and whether its magnitude is above its block's mean.

    Each of the two classes of a block decodes to its mean magnitude, so what is lost is always less than what is sent.
    No level is zero: the numbers that are sent this way are the largest, or have error feedback.
    """

    def __init__(self, block: int) -> None:
        self.multiple = block

    def nbytes(self, numel: int) -> int:
        return numel // self.multiple * 2 * SCALE_BYTES + numel // 4

    def encode(self, values: torch.Tensor, coded: torch.Tensor) -> None:
        for piece, scales, packed in _pieces(values, coded, self.multiple, per_block=2):
            self._encode(piece.float(), scales, packed)

    def _encode(self, values: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor) -> None:
        sizes = values.abs().unflatten(-1, (-1, self.multiple))
        is_large = sizes > sizes.mean(-1, keepdim=True)
        means = scales.unflatten(-1, (-1, 2))
        for place, is_member in enumerate((~is_large, is_large)):
            # Not a product with the mask, which would make NaN of an infinite number in the other class.
            total = torch.where(is_member, sizes, 0.0).sum(-1)
            means[..., place] = total / is_member.sum(-1).clamp_(min=1)
        codes = is_large.flatten(-2).to(torch.uint8).mul_(2).add_(torch.signbit(values))
        # A piece in four parts, one per pair of bits: neighbours in a part are neighbours in memory.
        packed.zero_()
        for number, part in enumerate(codes.chunk(4, dim=-1)):
            packed.add_(part, alpha=4**number)

    def decode(self, coded: torch.Tensor, values: torch.Tensor, *, add: float | None = None) -> None:
        _decode_pieces(self._decode, _pieces(values, coded, self.multiple, per_block=2), add)

    def _decode(self, scales: torch.Tensor, packed: torch.Tensor, values: torch.Tensor) -> None:
        codes = torch.cat([packed >> 2 * number & 3 for number in range(4)], dim=-1)
        blocks = codes.unflatten(-1, (-1, self.multiple))
        small, large = (each.unsqueeze(-1) for each in scales.unflatten(-1, (-1, 2)).unbind(-1))
        sizes = torch.where(blocks >= 2, large, small).flatten(-2)
        torch.where((codes & 1).bool(), -sizes, sizes, out=values)


def _pieces(
    values: torch.Tensor, coded: torch.Tensor, multiple: int, *, per_block: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Iterate over values, their scales (``per_block`` for each block of ``multiple``) and the packed bytes, in pieces.

    On a CPU pieces are small enough to stay in its cache with all that is computed from them. Memory for more would be
    new every time, which costs more than the computation itself.
    """
    if not values.numel():
        return
    blocks, most = values.shape[-1] // multiple, max(1, CACHED // multiple)
    scales, packed = _split(coded, blocks * per_block)
    if not values.is_cpu:
        yield values, scales, packed
        return
    width = packed.shape[-1] // blocks
    for row in range(values.shape[0]) if values.dim() > 1 else [...]:
        for first in range(0, blocks, most):
            end = min(blocks, first + most)
            yield (
                values[row][first * multiple : end * multiple],
                scales[row][first * per_block : end * per_block],
                packed[row][first * width : end * width],
            )


def _decode_pieces(
    decode: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
    pieces: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    add: float | None,
) -> None:
    for values, scales, packed in pieces:
        if add is None and values.dtype == torch.float32:
            decode(scales, packed, values)
            continue
        part = torch.empty_like(values, dtype=torch.float32)
        decode(scales, packed, part)
        values.copy_(part) if add is None else values.add_(part, alpha=add)


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each block; NaN where there is one. Several times as fast on a CPU as the equal norm."""
    return torch.maximum(blocks.amax(-1).abs_(), blocks.amin(-1).abs_())


def _split(coded: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split coded rows into the scales of each row, and the bytes after them."""
    return coded[..., : blocks * SCALE_BYTES].view(torch.float32), coded[..., blocks * SCALE_BYTES :]
