"""Argument checks before anything is sent or counted: the same error messages on every communicator and rank."""

import re
from collections.abc import Mapping, Sequence
from typing import get_args

import torch

from gradsync.base.errors import ConfigurationError, MismatchError
from gradsync.communicator.base import Counts, ReduceOp
from gradsync.communicator.logs import join_names

__all__ = [
    "SUMMED_BY_TORCH",
    "check_dense",
    "check_operation",
    "check_parts",
    "check_shares",
    "check_source",
    "check_summed",
    "check_together",
    "collectives_differ",
    "has_gaps",
    "missing_step",
]

OPERATIONS = get_args(ReduceOp)
REDUCING = frozenset({"all_reduce", "reduce_scatter"})
REDUCING_OR_GATHERING = re.compile(r"\b(all_reduce|reduce_scatter|all_gather)\b")
# What torch adds up on the CPU.
SUMMED_BY_TORCH = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8})
SUMMED_BY_TORCH |= {torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128}


def check_dense(kind: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise ConfigurationError(
            f"{kind} expects dense tensors, got layout {tensor.layout}. Pass tensor.to_dense(), or its values"
        )


def check_summed(kind: str, tensor: torch.Tensor, summed: frozenset[torch.dtype]) -> None:
    """Refuse to reduce a dtype that is not in ``summed``: those the communicator adds up. Others it can only move."""
    if kind in REDUCING and tensor.dtype not in summed:
        raise ConfigurationError(f"{kind}: this communicator cannot add up {tensor.dtype}. Convert it before")


def has_gaps(tensor: torch.Tensor) -> bool:
    """Whether its elements, in whatever order, are not all of a piece of memory, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return True
        expected *= size
    return False


def collectives_differ(started: Sequence[str]) -> MismatchError:
    """The error for ranks that have ``started`` different collectives."""
    named = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(started))
    hint = missing_step({f"rank {rank}": each for rank, each in enumerate(started)})
    advice = hint or "All ranks must run the same collectives in the same order"
    return MismatchError(f"ranks started different collectives: {named}. {advice}")


def missing_step(started: Mapping[str, str]) -> str:
    """What to say where some ranks gather and others reduce, as after a step() that not all of them have called.
    ``started`` describes the collective of each rank."""
    kinds = {rank: REDUCING_OR_GATHERING.search(each) for rank, each in started.items()}
    gather = [rank for rank, kind in kinds.items() if kind and kind[0] == "all_gather"]
    reduce = {rank: kind[0] for rank, kind in kinds.items() if kind and kind[0] in REDUCING}
    if not gather or not reduce:
        return ""
    return (
        f"With a ShardedOptimizer or OverlappedOptimizer: {join_names(gather)} called step() (all_gather), and "
        f"{join_names(list(reduce))} went on without it ({next(iter(reduce.values()))}). Call step() on every rank in "
        "each window, also on one that has no batch or leaves out its loss"
    )


def check_operation(op: ReduceOp, dtype: torch.dtype) -> None:
    """Refuse operations that do not exist or do not suit ``dtype``; a sum, as in backward, costs nothing."""
    if op == "sum":
        return
    if op not in OPERATIONS:
        raise ConfigurationError(f"op must be one of {', '.join(OPERATIONS)}, got {op!r}")
    if op == "average" and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigurationError(f"whole numbers have no average, got {dtype}. Sum instead, and divide")
    if op == "max" and dtype.is_complex:
        raise ConfigurationError(f"complex numbers have no order, and so no maximum, got {dtype}")


def check_source(source: int, world_size: int) -> None:
    if not 0 <= source < world_size:
        raise ConfigurationError(f"source must be in 0..{world_size - 1}, got {source}")


def check_together(kind: str, output: torch.Tensor, tensor: torch.Tensor) -> None:
    """Refuse two tensors of one collective unless they are dense, contiguous, of one dtype and on one device."""
    for name, each in (("output", output), ("tensor", tensor)):
        check_dense(kind, each)
        if not each.is_contiguous():
            raise ConfigurationError(
                f"{kind} expects {name} to be contiguous, got shape {list(each.shape)} with strides "
                f"{list(each.stride())}. Pass {name}.contiguous()"
            )
    if output.dtype != tensor.dtype or output.device != tensor.device:
        raise ConfigurationError(
            f"{kind} expects one dtype and one device: output is {_described(output)} on {output.device}, tensor is "
            f"{_described(tensor)} on {tensor.device}"
        )


def check_shares(
    kind: str, whole: torch.Tensor, share: torch.Tensor, counts: Counts, rank: int, world_size: int
) -> tuple[int, ...] | None:
    """The sizes of the shares of ``whole``, of which ``share`` is this rank's; None where they are equal."""
    sides = ("output", "tensor") if kind == "all_gather" else ("tensor", "output")
    if counts is None:
        if whole.numel() != share.numel() * world_size:
            raise ConfigurationError(
                f"{kind} over {world_size} ranks expects {world_size} equal shares: {sides[0]} is {_described(whole)}, "
                f"{sides[1]} is {_described(share)}. Pass counts= if shares differ"
            )
        return None
    sizes = _checked(kind, "counts", counts, world_size, sides[0], whole)
    if sizes[rank] != share.numel():
        raise ConfigurationError(
            f"{kind}: counts {list(sizes)} give this rank {sizes[rank]} elements, {sides[1]} is {_described(share)}"
        )
    return None if len(set(sizes)) == 1 else sizes


def check_parts(kind: str, name: str, tensor: torch.Tensor, counts: Counts, world_size: int) -> tuple[int, ...]:
    """The sizes of the parts of ``tensor``, which is ``name``, one for every rank."""
    if counts is None:
        if tensor.numel() % world_size:
            raise ConfigurationError(
                f"{kind} over {world_size} ranks expects {world_size} equal parts: {name} is {_described(tensor)}. "
                "Pass output_counts= and input_counts= if parts differ"
            )
        return (tensor.numel() // world_size,) * world_size
    counted = "output_counts" if name == "output" else "input_counts"
    return _checked(kind, counted, counts, world_size, name, tensor)


def _checked(
    kind: str, name: str, counts: Sequence[int], world_size: int, whole_name: str, whole: torch.Tensor
) -> tuple[int, ...]:
    """The ``counts``, which the caller passed as ``name``, of all parts of ``whole``, which was ``whole_name``."""
    sizes = tuple(int(count) for count in counts)
    if len(sizes) != world_size or min(sizes) < 0:
        raise ConfigurationError(
            f"{kind}: {name} must be {world_size} numbers that are not negative, one for every rank, got {list(sizes)}"
        )
    if sum(sizes) != whole.numel():
        raise ConfigurationError(
            f"{kind}: counts {list(sizes)} make {sum(sizes)} elements, {whole_name} is {_described(whole)}"
        )
    return sizes


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} × {tensor.dtype}"
