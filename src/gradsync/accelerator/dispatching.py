"""Batches as nested structures: rank 0 sends them to the others (``dispatch_batches``), and they go to the device.

A message is a JSON text, which says how the batch is built, with the bytes of its tensors behind. Nothing else can be
sent: numbers, strings, None, and dicts, lists, tuples and named tuples of such things. All ranks, rank 0 too, use what
comes out of the message, so that they see the same types.

Everybody gets the whole global batch and cuts its part. Tensors are cut along their first dimension, and so are lists
and tuples without a tensor inside that have an entry a sample (texts, say). Anything else is passed on whole.
"""

import copy
import json
import sys
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice
from typing import Any

import torch

from gradsync.accelerator.sharding import Share
from gradsync.communicator import Communicator
from gradsync.errors import ConfigurationError, PeerFailedError

__all__ = ["dispatch", "to_device"]

# So that any dtype may look at its bytes in place.
ALIGNMENT = 16

PLAIN = (bool, int, float, str, type(None))


def dispatch(
    batches: Iterator[Any], communicator: Communicator, *, group: int, drop_last: bool, even: bool
) -> Iterator[tuple[Share, Any]]:
    """This rank's part of each round of ``group`` batches, which only rank 0 reads. Collective, round by round.

    A last round whose samples do not divide by the number of ranks is completed from the first one with ``even``;
    otherwise the first ranks get one sample more.
    """
    world_size = communicator.world_size
    first: Any = None
    while (message := _next_round(batches, communicator, group, drop_last)) is not None:
        size, batch = message
        first = _cut(batch, slice(0, world_size)) if first is None else first
        share, part = _part(batch, size, first, communicator, even)
        yield share, _unmark(part)


def _part(batch: Any, size: int, first: Any, communicator: Communicator, even: bool) -> tuple[Share, Any]:
    rank, world_size = communicator.rank, communicator.world_size
    part, left = divmod(size, world_size)
    if left and even:
        # The first round may have been shorter than what is missing; the last round is then that one.
        completed = _join([batch, *[first] * (world_size - left)])
        return Share("common", size), _cut(completed, slice(rank * (part + 1), (rank + 1) * (part + 1)))
    start = rank * part + min(rank, left)
    stop = start + part + (rank < left)
    if start == stop:
        return Share("absent"), _cut(first, slice(0, 1))
    return Share("common" if part else "partial"), _cut(batch, slice(start, stop))


# -- the wire ----------------------------------------------------------------------------------------------------------


def _next_round(
    batches: Iterator[Any], communicator: Communicator, group: int, drop_last: bool
) -> tuple[int, Any] | None:
    """The next round and its number of samples, on every rank; None at the end."""
    tensors: list[torch.Tensor] = []
    failure: Exception | None = None
    head: dict[str, Any] = {}
    if communicator.rank == 0:
        try:
            head, tensors = _describe_round(list(islice(batches, group)), group, drop_last)
        except Exception as error:
            failure = error
            kind = "refused" if isinstance(error, ConfigurationError) else "failed"
            head = {kind: str(error) if kind == "refused" else f"{type(error).__name__}: {error}"}
    head, payload = _broadcast(communicator, head, tensors)
    if failure is not None:
        raise failure
    if "refused" in head:
        raise ConfigurationError(head["refused"])
    if "failed" in head:
        raise PeerFailedError(f"rank 0 failed to read the batch that it was to dispatch: {head['failed']}")
    return None if "end" in head else (head["size"], _rebuild(head["batch"], payload))


def _describe_round(batches: list[Any], group: int, drop_last: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
    if not batches or (drop_last and len(batches) < group):
        return {"end": True}, []
    sizes = [_size_of(batch) for batch in batches]
    tensors: list[torch.Tensor] = []
    joined = _join([_mark(batch, size) for batch, size in zip(batches, sizes, strict=True)])
    return {"size": sum(sizes), "batch": _describe(joined, tensors, "batch")}, tensors


def _broadcast(
    communicator: Communicator, head: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> tuple[dict[str, Any], torch.Tensor]:
    text = json.dumps(head).encode()
    lengths = torch.tensor([len(text), sum(map(_room, tensors))], device=communicator.device)
    communicator.broadcast(lengths, 0).wait()
    text_length, payload_length = map(int, lengths.tolist())
    start = _aligned(text_length)
    message = torch.zeros(start + payload_length, dtype=torch.uint8, device=communicator.device)
    if communicator.rank == 0:
        message[:text_length] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(message.device)
        offset = start
        for tensor in tensors:
            message[offset : offset + tensor.nbytes] = _bytes_of(tensor).to(message.device)
            offset += _room(tensor)
    communicator.broadcast(message, 0).wait()
    return json.loads(bytes(message[:text_length].tolist())), message[start:]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _room(tensor: torch.Tensor) -> int:
    return _aligned(tensor.nbytes)


def _describe(value: Any, tensors: list[torch.Tensor], path: str) -> Any:
    """How to build ``value``, as JSON; its tensors are appended to ``tensors``."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        offset = sum(map(_room, tensors))
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), offset]}
    if isinstance(value, Mapping) and all(isinstance(key, PLAIN) for key in value):
        return {"dict": [[key, _describe(each, tensors, f"{path}[{key!r}]")] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        entries = [_describe(each, tensors, f"{path}[{number}]") for number, each in enumerate(value)]
        if hasattr(value, "_fields"):
            return {"named": [type(value).__module__, type(value).__qualname__, list(value._fields), entries]}
        if isinstance(value, _Column):
            return {"column": [value.is_list, entries]}
        return {"list" if isinstance(value, list) else "tuple": entries}
    if isinstance(value, PLAIN):
        return {"value": value}
    raise ConfigurationError(
        f"dispatch_batches=True sends dicts, lists and tuples of dense tensors, numbers and strings to the other "
        f"ranks, but {path} is a {type(value).__module__}.{type(value).__qualname__}. Let collate_fn return tensors, "
        "or pass dispatch_batches=False, so that every rank reads for itself"
    )


def _rebuild(described: dict[str, Any], payload: torch.Tensor) -> Any:
    ((kind, content),) = described.items()
    if kind == "tensor":
        name, shape, offset = content
        dtype: torch.dtype = getattr(torch, name)
        numel = torch.Size(shape).numel()
        return payload[offset : offset + numel * dtype.itemsize].view(dtype).reshape(shape)
    if kind == "dict":
        return {key: _rebuild(each, payload) for key, each in content}
    if kind == "named":
        module, name, fields, entries = content
        return _named_tuple(module, name, fields)(*(_rebuild(each, payload) for each in entries))
    if kind == "column":
        is_list, entries = content
        return _Column([_rebuild(each, payload) for each in entries], is_list)
    if kind in ("list", "tuple"):
        rebuilt = [_rebuild(each, payload) for each in content]
        return rebuilt if kind == "list" else tuple(rebuilt)
    return content


def _named_tuple(module: str, name: str, fields: list[str]) -> Any:
    """The class of that name if it is here and has these fields, or else a new one. Nothing is imported."""
    found = getattr(sys.modules.get(module), name, None)
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == tuple(fields):
        return found
    return namedtuple(name.rpartition(".")[2], fields)


# -- structures --------------------------------------------------------------------------------------------------------


def _size_of(batch: Any) -> int:
    """Samples in a batch: the first dimension of the first tensor, or the length of the first list without tensors."""
    tensors = [leaf for leaf in _leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    if tensors:
        return len(tensors[0])
    lists = batch.values() if isinstance(batch, Mapping) else [batch]
    for value in lists:
        if isinstance(value, list | tuple):
            return len(value)
    raise ConfigurationError(
        f"dispatch_batches=True must cut every batch into parts, but this {type(batch).__name__} has neither a tensor "
        "with a batch dimension nor a list. Pass dispatch_batches=False, so that every rank reads for itself"
    )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


class _Column(list[Any]):
    """A list, or what was a tuple, with an entry a sample.

    It is told by its length, when the batch is read. Later, when batches are joined and cut, any length may turn up.
    """

    def __init__(self, entries: Iterable[Any], is_list: bool) -> None:
        super().__init__(entries)
        self.is_list = is_list


def _mark(value: Any, size: int) -> Any:
    """The same batch with its columns marked."""
    if isinstance(value, Mapping):
        return {key: _mark(each, size) for key, each in value.items()}
    if not isinstance(value, list | tuple):
        return value
    tensors_inside = any(isinstance(leaf, torch.Tensor) for leaf in _leaves(value))
    if len(value) == size and not hasattr(value, "_fields") and not tensors_inside:
        return _Column(value, isinstance(value, list))
    return _like(value, [_mark(each, size) for each in value])


def _unmark(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _unmark(each) for key, each in value.items()}
    if isinstance(value, _Column):
        return list(value) if value.is_list else tuple(value)
    return _like(value, [_unmark(each) for each in value]) if isinstance(value, list | tuple) else value


def _join(batches: list[Any]) -> Any:
    """One batch out of several of the same structure."""
    value = batches[0]
    if isinstance(value, torch.Tensor):
        return _concatenate(batches) if value.dim() else value
    if isinstance(value, _Column):
        return _Column([entry for each in batches for entry in each], value.is_list)
    if isinstance(value, Mapping):
        return {key: _join([each[key] for each in batches]) for key in value}
    if isinstance(value, list | tuple):
        return _like(value, [_join(list(each)) for each in zip(*batches, strict=True)])
    return value


def _concatenate(tensors: list[torch.Tensor]) -> torch.Tensor:
    try:
        return torch.cat(tensors)
    except RuntimeError as error:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ConfigurationError(
            f"dispatch_batches=True joins one batch a rank, but these have the shapes {shapes}. Pad them alike, or "
            "pass split_batches=True, so that one batch is cut into parts, or dispatch_batches=False"
        ) from error


def _cut(value: Any, part: slice) -> Any:
    if isinstance(value, torch.Tensor):
        # A copy, so that the part does not keep the whole message alive.
        return value[part].clone() if value.dim() else value.clone()
    if isinstance(value, _Column):
        return _Column(value[part], value.is_list)
    if isinstance(value, Mapping):
        return {key: _cut(each, part) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return _like(value, [_cut(each, part) for each in value])
    return value


def _like(value: Any, entries: list[Any]) -> Any:
    return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)


def to_device(value: Any, device: torch.device, non_blocking: bool) -> Any:
    """The same structure on ``device``. Whatever has a ``to`` method is asked by it; other leaves stay as they are."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if callable(getattr(value, "to", None)):
        try:
            return value.to(device, non_blocking=non_blocking)
        except TypeError:  # many a batch class has to(device) alone
            return value.to(device)
    if isinstance(value, Mapping):
        moved = {key: to_device(each, device, non_blocking) for key, each in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return moved
        same_type = copy.copy(value)
        same_type.update(moved)
        return same_type
    if isinstance(value, list | tuple):
        return _like(value, [to_device(each, device, non_blocking) for each in value])
    return value
