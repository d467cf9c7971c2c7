"""Block codings as one CUDA kernel each, where Triton is installed: as fast as memory, with the same bits.

Written so that no compiler can reorder operations: divisions are rounded as on the host, and numbers are rounded to the
nearest even one. ``available(tensor)`` says whether the kernels can be used; otherwise plain torch is used.
"""

import functools
import importlib.util
from typing import Any, Literal

import torch

__all__ = ["available", "run_blocks"]

# A program of one warp and two blocks is the fastest of those tried on an H200, from 256 numbers to 8192.
NUMBERS = 512
WARPS = 1


def available(tensor: torch.Tensor, block: int) -> bool:
    """Whether kernels run on the device of ``tensor``, for blocks of this size (they need a power of two)."""
    return tensor.is_cuda and torch.version.hip is None and block & (block - 1) == 0 and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def run_blocks(
    kernel: Literal["encode", "decode"], values: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor, bits: int
) -> None:
    """Encode rows of ``values`` as integers in ``packed``, with their scales; or decode them."""
    values, scales, packed = (torch.atleast_2d(each) for each in (values, scales, packed))
    block, total = values.shape[1] // scales.shape[1], scales.numel()
    group = max(1, NUMBERS // block)
    _kernels()[kernel][(-(-total // group),)](
        values, scales, packed, total, scales.shape[1], values.stride(0), scales.stride(0), packed.stride(0),
        BLOCK=block, GROUP=group, BITS=bits, num_warps=WARPS,
    )  # fmt: skip


@functools.cache
def _kernels() -> dict[str, Any]:
    """Compiled when first needed: importing Triton takes a second, and most runs never need it."""
    from gradsync.core.reduction import kernels

    return {"encode": kernels.encode, "decode": kernels.decode}
