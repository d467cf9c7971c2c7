"""Sums over ranks, and the shares in which they are computed.

Values are combined in rank order, rounding each time, so all communicators give the same bits.
"""

from collections.abc import Callable, Sequence

import torch

from gradsync.communicator.base import ReduceOp

__all__ = [
    "BLOCK_BYTES",
    "Blocks",
    "combine",
    "combine_in_order",
    "cut_share",
    "divide",
    "offsets_of",
    "work_on_flat",
]


def combine(one: torch.Tensor, other: torch.Tensor, op: ReduceOp, into: torch.Tensor) -> None:
    if op == "max":
        torch.maximum(one, other, out=into)
    else:
        torch.add(one, other, out=into)


def combine_in_order(values: Sequence[torch.Tensor], output: torch.Tensor, op: ReduceOp) -> None:
    """Combine ``values`` in order into ``output``, which may be one of the first two of them, or another."""
    if len(values) == 1:
        if output.data_ptr() != values[0].data_ptr():
            output.copy_(values[0])
        return
    combine(values[0], values[1], op, output)
    for value in values[2:]:
        combine(output, value, op, output)
    divide(output, op, len(values))


def divide(total: torch.Tensor, op: ReduceOp, world_size: int) -> torch.Tensor:
    return total.div_(world_size) if op == "average" else total


def offsets_of(counts: Sequence[int]) -> list[int]:
    """Where each share begins, and where the last one ends."""
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets


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


def work_on_flat(tensor: torch.Tensor, run: Callable[[torch.Tensor], None]) -> None:
    """Have ``run`` change ``tensor`` as a flat one: itself, a view, or a copy that is copied back if it has gaps."""
    if tensor.is_contiguous():
        # Before the first message every view delays all ranks.
        run(tensor if tensor.dim() == 1 else tensor.view(-1))
        return
    copied = tensor.contiguous().view(-1)
    run(copied)
    tensor.copy_(copied.view(tensor.shape))
