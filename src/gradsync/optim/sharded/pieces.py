"""Optimizer state for ``torch.distributed.checkpoint``: every rank writes what it has, and reads what it needs.

A state with one number per element of a parameter is saved flat, in the order in which the elements lie in memory, in
one piece per part that a rank owns. Ownership may differ when it is loaded: the checkpoint is read in the pieces that
are needed then.

Imported only where it is used: importing this part of torch takes time.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from gradsync.base.errors import ConfigurationError
from gradsync.optim.sharded.states import ParameterState

__all__ = ["StateReader", "pieces_of"]

STATE, GROUPS = "state", "param_groups"


class CheckpointPiece(torch.Tensor):
    """Part of a flat tensor, with the attributes that torch's planners ask for."""

    local: torch.Tensor
    whole: torch.Size
    stored: ChunkStorageMetadata

    @classmethod
    def of(cls, values: torch.Tensor, offset: int, whole: int) -> "CheckpointPiece":
        """The piece whose ``values`` are the elements from ``offset`` on, of ``whole``."""
        piece: CheckpointPiece = torch.Tensor._make_subclass(cls, values.detach())
        piece.local, piece.whole = values.detach(), torch.Size([whole])
        piece.stored = ChunkStorageMetadata(offsets=torch.Size([offset]), sizes=values.shape)
        return piece

    def size(self, dim: Any = None) -> Any:
        """The size of the whole, which a planner compares with what was saved."""
        return self.whole if dim is None else self.whole[dim]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        data = TensorWriteData(chunk=self.stored, properties=properties, size=self.whole)
        return [WriteItem(MetadataIndex(fqn, self.stored.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.stored]

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        return self.local


def pieces_of(
    states: Mapping[str, tuple[ParameterState, int, int]], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What this rank saves: its ``states`` by the names of parameters, and the options of ``groups``. The tensors of
    a state begin at an offset in the parameter, which has a number of elements."""
    state = {
        name: {
            **_scalars(state),
            **{key: CheckpointPiece.of(value, offset, whole) for key, value in state.tensors.items()},
        }
        for name, (state, offset, whole) in states.items()
    }
    return {STATE: state, GROUPS: [dict(group) for group in groups]}


def _scalars(state: ParameterState) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.scalars.items()}


class StateReader:
    """Reads what a checkpoint has under ``name`` of an optimizer with this number of ``groups``. ``sizes`` are those of
    all its parameters: what does not fit is refused on every rank."""

    def __init__(
        self,
        checkpoint: str | PathLike[str] | StorageReader,
        name: str,
        sizes: Mapping[str, int],
        groups: int,
    ) -> None:
        self._reader = checkpoint if isinstance(checkpoint, StorageReader) else FileSystemReader(checkpoint)
        self._name, self._sizes = name, sizes
        known = self._reader.read_metadata().state_dict_metadata
        self._known = {
            key.removeprefix(f"{name}."): value for key, value in known.items() if key.startswith(f"{name}.")
        }
        self._options = [self._below(f"{GROUPS}.{number}.") for number in range(groups)]
        if not self._below(f"{GROUPS}."):
            raise ConfigurationError(
                f"the checkpoint has no sharded optimizer under {name!r}. Save it with "
                f"dcp.save({{{name!r}: optimizer.sharded_state_dict(), …}}), or say its name"
            )
        if not all(self._options) or self._below(f"{GROUPS}.{groups}."):
            raise ConfigurationError(
                f"the saved optimizer has not {groups} parameter groups, as this one has: it belongs to other settings"
            )
        for parameter, size in sizes.items():
            self._require_size(parameter, size)

    def _below(self, begin: str) -> dict[str, Any]:
        return {key.removeprefix(begin): value for key, value in self._known.items() if key.startswith(begin)}

    def _state_of(self, parameter: str) -> dict[str, Any]:
        # One parameter's name may be a prefix of another's.
        found = self._below(f"{STATE}.{parameter}.")
        return {key: value for key, value in found.items() if "." not in key}

    def _require_size(self, parameter: str, size: int) -> None:
        for known in self._state_of(parameter).values():
            if _is_by_element(known, size) and tuple(known.size) != (size,):
                raise ConfigurationError(
                    f"the saved state of parameter {parameter!r} has {tuple(known.size)} numbers, and the parameter "
                    f"{size}: it belongs to another model"
                )

    def read(
        self, needed: Mapping[str, slice], device: torch.device, group: Any
    ) -> tuple[dict[str, ParameterState], list[dict[str, Any]]]:
        """States of the ``needed`` elements of parameters, and options of all groups. Collective over ``group``, if
        there is one."""
        wanted = {name: self._wanted(name, elements, device) for name, elements in needed.items()}
        options = [{key: _memory(known) for key, known in each.items()} for each in self._options]
        found: dict[str, Any] = {STATE: {name: each for name, each in wanted.items() if each}, GROUPS: options}
        load({self._name: found}, storage_reader=self._reader, process_group=group, no_dist=group is None)
        return {name: _read(each) for name, each in found[STATE].items()}, found[GROUPS]

    def _wanted(self, parameter: str, elements: slice, device: torch.device) -> dict[str, Any]:
        """The checkpoint's entries for a parameter, as memory to read them into."""
        wanted, whole = dict[str, Any](), self._sizes[parameter]
        for key, known in self._state_of(parameter).items():
            wanted[key] = _memory(known)
            if _is_by_element(known, whole):
                count = elements.stop - elements.start
                memory = torch.empty(count, dtype=known.properties.dtype, device=device)
                wanted[key] = CheckpointPiece.of(memory, elements.start, whole)
        return wanted


def _is_by_element(known: Any, whole: int) -> bool:
    """Whether there is one entry per element of a parameter of this size. A number may have a dimension, too."""
    return isinstance(known, TensorStorageMetadata) and (
        known.size.numel() != 1 or (whole == 1 and len(known.size) > 0)
    )


def _memory(known: Any) -> Any:
    """Memory for a number; anything else is read as it was saved."""
    if not isinstance(known, TensorStorageMetadata):
        return None
    return torch.zeros(known.size if known.size.numel() == 1 else (), dtype=known.properties.dtype)


def _read(saved: Mapping[str, Any]) -> ParameterState:
    tensors = {key: value.local for key, value in saved.items() if isinstance(value, CheckpointPiece)}
    return ParameterState(tensors=tensors, scalars={key: value for key, value in saved.items() if key not in tensors})
