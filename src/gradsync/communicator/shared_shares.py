"""Splits tensors in shared memory into one share per rank, in blocks; builds flat tensors from others, and back."""

from collections.abc import Iterator

import torch

__all__ = ["BLOCK_BYTES", "Blocks", "cut_share", "flatten", "in_pieces", "put_back"]

# Sums are written while their summands are still in a cache, and the cost of an operation does not show: 25 MB take
# a sixth longer in blocks of a quarter of this, and 100 MB longer in one.
BLOCK_BYTES = 1024 * 1024

Blocks = list[tuple[torch.Tensor, ...]]


def cut_share(everybodys: list[torch.Tensor], rank: int) -> Blocks:
    """The share of ``rank``, in blocks; each with the tensors of all ranks."""
    numel, itemsize = everybodys[0].numel(), everybodys[0].itemsize
    # Shares begin at whole cache lines, so that no two ranks write to one.
    line = max(64 // itemsize, 1)
    share = -(-numel // (len(everybodys) * line)) * line
    first, end = min(rank * share, numel), min((rank + 1) * share, numel)
    step = BLOCK_BYTES // itemsize
    return [tuple(tensor[start : min(start + step, end)] for tensor in everybodys) for start in range(first, end, step)]


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1)


def put_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Where ``flat`` is a copy and not a view, ``tensor`` gets what it holds."""
    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))


def in_pieces(tensor: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
    """At least one, so that all ranks meet also for nothing."""
    return iter(tensor.split(max(nbytes // tensor.itemsize, 1)) if tensor.numel() else [tensor])
