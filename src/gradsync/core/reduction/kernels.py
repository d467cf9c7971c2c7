"""Triton kernels for :mod:`gradsync.core.reduction.fused`, which imports them where they can run.

A program handles ``GROUP`` blocks. In a block of 4-bit numbers the first half is in the lower bits of its bytes and the
second in the upper ones, so both halves are loaded side by side.
"""

# Triton reads the source of these functions: its own annotations are used here, not our types.
# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.extra import libdevice

__all__ = ["decode", "encode"]


@triton.jit
def _quantized(numbers, factors, LEVELS: tl.constexpr):
    rounded = libdevice.rint(numbers * factors[:, None])
    return tl.minimum(tl.maximum(rounded, -LEVELS), LEVELS)


@triton.jit
def encode(
    values, scales, packed, total, per_row, values_row, scales_row, packed_row,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Encode into integers of ``BITS`` bits, with a scale per block."""
    LEVELS: tl.constexpr = 127.0 if BITS == 8 else 7.0
    blocks = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    here = blocks < total
    row, place = blocks // per_row, blocks % per_row
    if BITS == 8:
        offsets = tl.arange(0, BLOCK)[None, :]
        numbers = tl.load(values + (row * values_row + place * BLOCK)[:, None] + offsets, mask=here[:, None], other=0.0)
        largest = tl.max(tl.abs(numbers), axis=1)
        broken = tl.max((numbers != numbers).to(tl.int32), axis=1)
    else:
        offsets = tl.arange(0, BLOCK // 2)[None, :]
        begin = values + (row * values_row + place * BLOCK)[:, None] + offsets
        numbers = tl.load(begin, mask=here[:, None], other=0.0)
        others = tl.load(begin + BLOCK // 2, mask=here[:, None], other=0.0)
        largest = tl.maximum(tl.max(tl.abs(numbers), axis=1), tl.max(tl.abs(others), axis=1))
        broken = tl.max(((numbers != numbers) | (others != others)).to(tl.int32), axis=1)
    # Here the maximum of NaN and a number is the number.
    largest = tl.where(broken > 0, float("nan"), largest)
    factors = tl.div_rn(tl.full([GROUP], LEVELS, tl.float32), largest)
    factors = tl.where(factors == float("inf"), 0.0, factors)
    tl.store(scales + row * scales_row + place, tl.div_rn(largest, tl.full([GROUP], LEVELS, tl.float32)), mask=here)
    lower = _quantized(numbers, factors, LEVELS)
    if BITS == 8:
        target = packed + (row * packed_row + place * BLOCK)[:, None] + offsets
        tl.store(target, lower.to(tl.int8).to(tl.uint8, bitcast=True), mask=here[:, None])
    else:
        upper = _quantized(others, factors, LEVELS)
        both = (lower + 8.0).to(tl.int32) + ((upper + 8.0).to(tl.int32) << 4)
        target = packed + (row * packed_row + place * (BLOCK // 2))[:, None] + offsets
        tl.store(target, both.to(tl.uint8), mask=here[:, None])


@triton.jit
def decode(
    values, scales, packed, total, per_row, values_row, scales_row, packed_row,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Decode what :func:`encode` has packed into float32."""
    blocks = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    here = blocks < total
    row, place = blocks // per_row, blocks % per_row
    factors = tl.load(scales + row * scales_row + place, mask=here, other=0.0)[:, None]
    if BITS == 8:
        offsets = tl.arange(0, BLOCK)[None, :]
        coded = tl.load(packed + (row * packed_row + place * BLOCK)[:, None] + offsets, mask=here[:, None], other=0)
        numbers = coded.to(tl.int8, bitcast=True).to(tl.float32) * factors
        tl.store(values + (row * values_row + place * BLOCK)[:, None] + offsets, numbers, mask=here[:, None])
    else:
        offsets = tl.arange(0, BLOCK // 2)[None, :]
        source = packed + (row * packed_row + place * (BLOCK // 2))[:, None] + offsets
        coded = tl.load(source, mask=here[:, None], other=0).to(tl.int32)
        target = values + (row * values_row + place * BLOCK)[:, None] + offsets
        tl.store(target, ((coded & 15).to(tl.float32) - 8.0) * factors, mask=here[:, None])
        tl.store(target + BLOCK // 2, ((coded >> 4).to(tl.float32) - 8.0) * factors, mask=here[:, None])
