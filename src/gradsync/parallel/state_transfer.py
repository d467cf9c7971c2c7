"""Copies the state that rank 0 has to all ranks, unpickled: plain values as JSON, tensors in batches."""

import json
from collections.abc import Callable
from typing import Any

import torch

from gradsync.checkpoint import decode, encode
from gradsync.communicator import Communicator
from gradsync.communicator.agreement import make_together
from gradsync.parallel.replica import broadcast_tensors, in_batches

__all__ = ["state_of_rank_0"]


def state_of_rank_0(communicator: Communicator, state: Callable[[], Any], *, keep: bool = True) -> Any:
    """What ``state`` returns on rank 0, copied; None where the rank does not ``keep`` it. Collective."""
    is_source = communicator.rank == 0
    structure, tensors = make_together(
        communicator, "send its state", lambda: encode(state()) if is_source else (None, dict[str, torch.Tensor]())
    )
    described = [
        (name, list(each.shape), str(each.dtype).removeprefix("torch."), each.device.type, each.nbytes)
        for name, each in tensors.items()
    ]
    structure, described = json.loads(_bytes_of_rank_0(json.dumps([structure, described]).encode(), communicator))
    received: dict[str, torch.Tensor] = {}
    for batch in in_batches(described, lambda one: int(one[-1])):
        pieces = {
            name: tensors[name].contiguous() if is_source else _empty(communicator, shape, dtype, kind)
            for name, shape, dtype, kind, _ in batch
        }
        broadcast_tensors(pieces.values(), communicator)
        if keep:
            received.update(pieces)
    return decode(structure, received) if keep else None


def _empty(communicator: Communicator, shape: list[int], dtype: str, kind: str) -> torch.Tensor:
    device = communicator.device if kind == communicator.device.type else torch.device(kind)
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def _bytes_of_rank_0(message: bytes, communicator: Communicator) -> bytes:
    size = torch.tensor([len(message)], dtype=torch.int64, device=communicator.device)
    communicator.broadcast(size, 0).wait()
    letters = torch.zeros(int(size), dtype=torch.uint8, device=communicator.device)
    if communicator.rank == 0:
        letters.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    communicator.broadcast(letters, 0).wait()
    return bytes(letters.tolist())
