"""Broadcast of a replica's parameters and buffers to all ranks, coalesced by dtype and device."""

from collections import defaultdict
from collections.abc import Iterable

import torch

from gradsync.communicator import Communicator

__all__ = ["BATCH_BYTES", "agree_on_rank", "broadcast_tensors"]

# At most this much is copied at a time: a model must not need room for a second copy of itself, and an allocator may
# keep for a long time whatever it was once asked for.
BATCH_BYTES = 8 * 1024 * 1024


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], communicator: Communicator, source: int = 0) -> None:
    """Overwrite the tensors with those of rank ``source``. Collective."""
    if communicator.world_size == 1:
        return
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            alike[(tensor.dtype, tensor.device)].append(tensor.detach())
    for group in alike.values():
        for batch in _batches(group):
            _broadcast_batch(batch, communicator, source)


def _batches(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if batch and size + tensor.nbytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.nbytes
    if batch:
        yield batch


def _broadcast_batch(tensors: list[torch.Tensor], communicator: Communicator, source: int) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        communicator.broadcast(_bytes_of(tensors[0]), source).wait()
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    communicator.broadcast(_bytes_of(flat), source).wait()
    if communicator.rank != source:
        for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(values.view(tensor.shape))
    # Gloo's threads hold the tensor until their next collective; its memory need not wait that long.
    # A tensor whose memory was exposed, as numpy() does, cannot be resized.
    storage = flat.untyped_storage()
    if storage.resizable():
        storage.resize_(0)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: values are copied, not computed with, and every backend supports bytes (not all, bool)."""
    return tensor.reshape(-1).view(torch.uint8)


def agree_on_rank(communicator: Communicator, *, candidate: bool) -> int:
    """The highest rank among the candidates. Collective."""
    rank = torch.tensor([communicator.rank if candidate else -1], device=communicator.device)
    communicator.all_reduce(rank, "max").wait()
    return int(rank)
