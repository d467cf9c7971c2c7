"""How values of all ranks are combined: in rank order, rounding each time, so all communicators give the same bits."""

from collections.abc import Sequence

import torch

from gradsync.communicator.base import ReduceOp

__all__ = ["combine", "combine_in_order", "divide", "offsets_of"]


def combine(one: torch.Tensor, other: torch.Tensor, op: ReduceOp, into: torch.Tensor) -> None:
    if op == "max":
        torch.maximum(one, other, out=into)
    else:
        torch.add(one, other, out=into)


def combine_in_order(values: Sequence[torch.Tensor], output: torch.Tensor, op: ReduceOp) -> None:
    """Into ``output``, which may be one of the first two of ``values`` or none of them."""
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
