"""The codings of blocks as one kernel each, for CUDA, where Triton is installed: as fast as memory is, same bits.

Written without the help of a compiler that could reorder: divisions are rounded as on the host, numbers are rounded to
the nearest even one. ``available(tensor)`` says whether they can be used; whoever cannot takes plain torch.
"""

import functools
import importlib.util
from typing import Any

import torch

__all__ = ["available", "decode_blocks", "encode_blocks"]

# A program of one warp and two blocks: on an H200 it is the fastest of those tried, from 256 numbers to 8192.
NUMBERS = 512
WARPS = 1


def available(tensor: torch.Tensor, block: int) -> bool:
    """Whether kernels run where ``tensor`` lies, for blocks of this size (they need a power of two)."""
    return tensor.is_cuda and torch.version.hip is None and block & (block - 1) == 0 and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def encode_blocks(values: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor, bits: int) -> None:
    """Rows of ``values`` as whole numbers in ``packed``, and their scales."""
    _launch("encode", values, scales, packed, bits)


def decode_blocks(scales: torch.Tensor, packed: torch.Tensor, values: torch.Tensor, bits: int) -> None:
    """The other way round."""
    _launch("decode", values, scales, packed, bits)


def _launch(kernel: str, values: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor, bits: int) -> None:
    block, total = values.shape[1] // scales.shape[1], scales.numel()
    group = max(1, NUMBERS // block)
    _kernels()[kernel][(-(-total // group),)](
        values, scales, packed, total, scales.shape[1], values.stride(0), scales.stride(0), packed.stride(0),
        BLOCK=block, GROUP=group, BITS=bits, num_warps=WARPS,
    )  # fmt: skip


@functools.cache
def _kernels() -> dict[str, Any]:
    """Compiled when first needed: to import Triton takes a second, and most never need it."""
    from gradsync.core.reduction import kernels

    return {"encode": kernels.encode, "decode": kernels.decode}
