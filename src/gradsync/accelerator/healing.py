"""Heals ranks that lag behind: sends them all prepared state from an up-to-date rank, over the communicator, unpickled.

All ranks take part, because a broadcast reaches all of them. Those that need nothing keep nothing: they never hold more
than one piece of the state in memory.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gradsync.accelerator.state_saving import Prepared, load_shared_state, shared_state
from gradsync.checkpoint.tree import decode, encode
from gradsync.communicator import Communicator
from gradsync.parallel.replica_state import BATCH_BYTES, broadcast_tensors

__all__ = ["heal"]

HEALTHY = 0


def heal(prepared: Prepared, communicator: Communicator, lagging: Sequence[int]) -> None:
    """Copy all prepared state of rank 0 to the ``lagging`` ranks. Collective."""
    is_source, lags = communicator.rank == HEALTHY, communicator.rank in lagging
    structure, tensors = encode(shared_state(prepared)) if is_source else (None, {})
    told = json.dumps([structure, [_described(*item) for item in tensors.items()]]) if is_source else ""
    structure, described = json.loads(_from_source(told.encode(), communicator))
    received: dict[str, torch.Tensor] = {}
    for batch in _batches(described):
        pieces = [(tensors[one["name"]] if is_source else _room_for(one, communicator)).contiguous() for one in batch]
        broadcast_tensors(pieces, communicator, HEALTHY)
        if lags:
            received.update({one["name"]: piece for one, piece in zip(batch, pieces, strict=True)})
    if lags:
        load_shared_state(prepared, decode(structure, received), "the state of rank 0")


def _described(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": tensor.device.type,
        "bytes": tensor.nbytes,
    }


def _room_for(described: dict[str, Any], communicator: Communicator) -> torch.Tensor:
    index = communicator.device.index if described["device"] == communicator.device.type else None
    device = torch.device(described["device"], index) if index is not None else torch.device(described["device"])
    return torch.empty(described["shape"], dtype=getattr(torch, described["dtype"]), device=device)


def _batches(described: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for each in described:
        if batch and sum(one["bytes"] for one in batch) + each["bytes"] > BATCH_BYTES:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def _from_source(message: bytes, communicator: Communicator) -> bytes:
    size = torch.tensor([len(message)], dtype=torch.int64, device=communicator.device)
    communicator.broadcast(size, HEALTHY).wait()
    letters = torch.zeros(int(size), dtype=torch.uint8, device=communicator.device)
    if communicator.rank == HEALTHY:
        letters.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    communicator.broadcast(letters, HEALTHY).wait()
    return bytes(letters.cpu().numpy().data)
