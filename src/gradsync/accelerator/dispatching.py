"""``dispatch_batches``: rank 0 reads the batches of all ranks, splits them into parts and sends the parts.

A message (see :mod:`gradsync.accelerator.trees`) holds the parts of all ranks, and each rank takes its own. Rank 0,
too, uses what comes out of the message, so that all ranks see the same types.

Tensors are split along their first dimension. So are lists and tuples that contain no tensor and have one entry per
sample (such as texts): a *column*. Anything else is passed on whole.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, is_namedtuple_instance

from gradsync.accelerator.sharding import RoundShare
from gradsync.accelerator.trees import (
    ALIGNMENT,
    Placed,
    UnsupportedTypeError,
    describe,
    end_of,
    flatten,
    leaves_of,
    plain,
    rebuild,
    write,
)
from gradsync.base.errors import ConfigurationError, PeerFailedError
from gradsync.communicator import Communicator

__all__ = ["dispatch"]

Part = tuple[RoundShare, Any]


def dispatch(
    batches: Iterator[Any], communicator: Communicator, *, group: int, drop_last: bool, even: bool
) -> Iterator[Part]:
    """This rank's part of each round of ``group`` batches, which only rank 0 reads. Collective, round by round.

    A last round whose samples do not divide by the number of ranks is completed from the first one with ``even``;
    otherwise the first ranks get one sample more.
    """
    rounds = _rounds(batches, communicator.world_size, group, drop_last, even)
    while (part := _next_part(rounds, communicator)) is not None:
        yield part


# -- cutting, on rank 0 ------------------------------------------------------------------------------------------------


def _rounds(
    batches: Iterator[Any], world_size: int, group: int, drop_last: bool, even: bool
) -> Iterator[Sequence[Part]]:
    """The parts of all ranks, round by round."""
    first: _Batch | None = None
    while read := list(islice(batches, group)):
        if drop_last and len(read) < group:
            return
        size = sum(map(_size_of, read))
        whole = _Batch.of(read[0]).followed_by(read[1:])
        first = first or whole.cut(0, world_size)
        part, left = divmod(size, world_size)
        if left and even:
            # The first round may have been shorter than what is missing; the last round is then that one.
            whole = whole.followed_by([first.tree] * (world_size - left))
            bounds = [(rank * (part + 1), (rank + 1) * (part + 1)) for rank in range(world_size)]
            yield [(RoundShare("common", size), whole.cut(*each).tree) for each in bounds]
            continue
        starts = [rank * part + min(rank, left) for rank in range(world_size + 1)]
        kind = RoundShare("common" if part else "partial")
        yield [
            (kind, whole.cut(start, stop).tree) if start < stop else (RoundShare("absent"), first.cut(0, 1).tree)
            for start, stop in pairwise(starts)
        ]


@dataclass(frozen=True)
class _Batch:
    """The leaves of a batch, which of them are columns, and how to rebuild the batch from them."""

    leaves: Sequence[Any]
    make: TreeSpec

    @classmethod
    def of(cls, tree: Any) -> "_Batch":
        # A column is recognized by its length, here. Later, when batches are joined and cut, any length may turn up.
        size = _size_of(tree)

        def is_column(node: Any) -> bool:
            if not isinstance(node, list | tuple) or is_namedtuple_instance(node) or len(node) != size:
                return False
            return not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves_of(node))

        return cls(*flatten(tree, stop=is_column))

    @property
    def tree(self) -> Any:
        return self.make.unflatten(self.leaves)

    def cut(self, start: int, stop: int) -> "_Batch":
        return _Batch([leaf[start:stop] if _is_cut(leaf) else leaf for leaf in self.leaves], self.make)

    def followed_by(self, trees: Sequence[Any]) -> "_Batch":
        """One batch out of several of the same structure."""
        rows = [self.leaves, *(self.make.flatten_up_to(plain(tree)) for tree in trees)]
        return _Batch([_join(parts) for parts in zip(*rows, strict=True)], self.make)


def _is_cut(leaf: Any) -> bool:
    return leaf.dim() > 0 if isinstance(leaf, torch.Tensor) else isinstance(leaf, list | tuple)


def _join(parts: Sequence[Any]) -> Any:
    if not _is_cut(parts[0]):
        return parts[0]
    if not isinstance(parts[0], torch.Tensor):
        return type(parts[0])(entry for part in parts for entry in part)
    try:
        return torch.cat(list(parts))
    except RuntimeError as error:
        shapes = [tuple(part.shape) for part in parts]
        raise ConfigurationError(
            f"dispatch_batches=True joins one batch per rank, but these have the shapes {shapes}. Pad them alike, or "
            "pass split_batches=True, so that one batch is cut into parts, or dispatch_batches=False"
        ) from error


def _size_of(batch: Any) -> int:
    """Samples in a batch: the first dimension of the first tensor, or the length of the first list without tensors."""
    sized: list[Any] = [leaf for _, leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    values = batch.values() if isinstance(batch, Mapping) else [batch]
    sized += [value for value in values if isinstance(value, list | tuple)]
    if sized:
        return len(sized[0])
    raise ConfigurationError(
        f"dispatch_batches=True must cut every batch into parts, but this {type(batch).__name__} has neither a tensor "
        "with a batch dimension nor a list. Pass dispatch_batches=False, so that every rank reads for itself"
    )


# -- messages ----------------------------------------------------------------------------------------------------------


def _next_part(rounds: Iterator[Sequence[Part]], communicator: Communicator) -> Part | None:
    """This rank's part of the next round; None at the end."""
    tensors: Placed = []
    failure: Exception | None = None
    head: dict[str, Any] = {}
    if communicator.rank == 0:
        try:
            head["parts"] = [(share, _described(part, tensors)) for share, part in next(rounds, ())]
        except Exception as error:
            failure = error
            tensors.clear()
            kind = "refused" if isinstance(error, ConfigurationError) else "failed"
            head[kind] = str(error) if kind == "refused" else f"{type(error).__name__}: {error}"
    head, payload = _broadcast(communicator, head, tensors)
    if failure is not None:
        raise failure
    if "refused" in head:
        raise ConfigurationError(head["refused"])
    if "failed" in head:
        raise PeerFailedError(f"rank 0 failed to read the batch that it was to dispatch: {head['failed']}")
    if not head["parts"]:
        return None
    share, part = head["parts"][communicator.rank]
    return RoundShare(*share), rebuild(part, payload)


def _broadcast(communicator: Communicator, head: dict[str, Any], tensors: Placed) -> tuple[Any, torch.Tensor]:
    text = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
    lengths = torch.tensor([text.numel(), end_of(tensors)], device=communicator.device)
    communicator.broadcast(lengths, 0).wait()
    text_length, payload_length = map(int, lengths.tolist())
    start = -(-text_length // ALIGNMENT) * ALIGNMENT
    message = torch.zeros(start + payload_length, dtype=torch.uint8, device=communicator.device)
    if communicator.rank == 0:
        message[:text_length] = text
        write(tensors, message[start:])
    communicator.broadcast(message, 0).wait()
    return json.loads(bytes(message[:text_length].tolist())), message[start:]


def _described(part: Any, tensors: Placed) -> Any:
    try:
        return describe(part, tensors, "batch")
    except UnsupportedTypeError as error:
        raise ConfigurationError(
            "dispatch_batches=True sends dicts, lists and tuples of dense tensors, numbers and strings to the other "
            f"ranks, but {error}. Let collate_fn return tensors, or pass dispatch_batches=False, so that every rank "
            "reads for itself"
        ) from error
