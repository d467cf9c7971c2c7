"""Predictions of all processes, each sample of the data once."""

from typing import Any

import torch

from gradsync.accelerator import operations
from gradsync.accelerator.gradient_state import GradientState
from gradsync.communicator import Communicator

__all__ = ["gather_for_metrics"]


def gather_for_metrics(communicator: Communicator, data: Any, state: GradientState, *, objects: bool = False) -> Any:
    """Gather ``data`` and drop what the active loader has only repeated.

    Tensors may differ in length between processes, where the last batches of a loader do. ``objects``: a list of plain
    values instead of tensors.
    """
    repeated = state.in_dataloader and state.active_dataloader.is_padding
    if objects:
        gathered = operations.gather_objects(communicator, [] if repeated else list(data))
        return gathered[: state.remainder] if _completed(state) else gathered
    if state.in_dataloader and state.active_dataloader.uneven:
        return operations.map_tensors(lambda tensor: _of_any_length(communicator, tensor, repeated), data)
    gathered = operations.gather(communicator, data)
    if not _completed(state):
        return gathered
    remainder = state.remainder
    return operations.map_tensors(lambda tensor: tensor[:remainder] if tensor.dim() else tensor, gathered)


def _completed(state: GradientState) -> bool:
    return state.end_of_dataloader and state.remainder > 0


def _of_any_length(communicator: Communicator, tensor: torch.Tensor, repeated: bool) -> torch.Tensor:
    """One after the other along the first dimension, however long each is."""
    if tensor.dim() == 0:
        tensor = tensor.unsqueeze(0)
    kept = tensor[:0] if repeated else tensor
    lengths = operations.gather(communicator, torch.tensor([len(kept)], device=communicator.device)).tolist()
    longest = max(lengths)
    padded = operations.pad_across_processes(communicator, kept)
    gathered: torch.Tensor = operations.gather(communicator, padded)
    parts = [gathered[rank * longest : rank * longest + length] for rank, length in enumerate(lengths)]
    return torch.cat(parts)
