"""Nested structures: traversed by torch's pytree, also in containers that torch takes for leaves, and serialized.

torch goes by the exact class of a container. A mapping, list or tuple of another class (a tokenizer's batch is a
``UserDict``) is opened here and rebuilt as its own class. None of these classes is registered with torch: its registry
is global to the process, and registering a class is up to its authors.

A message is a JSON text with the structure, followed by the bytes of the tensors. Only these can be sent: tensors,
numbers, texts, None, and dicts, lists, tuples and named tuples of such values. A message can name no function, and no
class except a named tuple that already exists in the receiver: nothing is pickled.
"""

import copy
import json
import sys
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils._pytree import (
    TreeSpec,
    is_namedtuple_instance,
    keystr,
    tree_flatten,
    tree_leaves_with_path,
    tree_map,
)

from gradsync.base.errors import ConfigurationError

__all__ = [
    "ALIGNMENT",
    "Placed",
    "UnsupportedTypeError",
    "describe",
    "end_of",
    "flatten",
    "leaves_of",
    "map_leaves",
    "pack",
    "plain",
    "rebuild",
    "unpack",
    "write",
]

Stop = Callable[[Any], bool]

# Others that somebody has registered stay leaves: many of them cannot say where in them a leaf lies.
KNOWN = (dict, OrderedDict, defaultdict, list, tuple)

# So that any dtype may look at its bytes in place.
ALIGNMENT = 16
PLAIN = (bool, int, float, str, type(None))

# Tensors, each with its place among the bytes of a message.
Placed = list[tuple[int, torch.Tensor]]


def map_leaves(function: Callable[[Any], Any], tree: Any, *, stop: Stop = lambda _: False) -> Any:
    """``tree`` with ``function(leaf)`` in the place of every leaf; also of what ``stop`` does not want opened."""

    def visit(node: Any) -> Any:
        if not isinstance(node, Mapping | list | tuple) or stop(node):
            return function(node)
        return _refilled(node, map_leaves(function, _opened(node), stop=stop))

    return tree_map(visit, tree, is_leaf=lambda node: _is_unknown(node) or stop(node))


def plain(tree: Any) -> Any:
    """``tree`` with dicts, lists and tuples in the place of the containers that torch does not know."""

    def visit(node: Any) -> Any:
        return plain(_opened(node)) if isinstance(node, Mapping | list | tuple) else node

    return tree_map(visit, tree, is_leaf=_is_unknown)


def flatten(tree: Any, *, stop: Stop = lambda _: False) -> tuple[list[Any], TreeSpec]:
    """The leaves of ``plain(tree)``, and how it is built."""
    return tree_flatten(plain(tree), is_leaf=lambda node: _is_unknown(node) or stop(node))


def leaves_of(tree: Any, name: str = "value") -> list[tuple[str, Any]]:
    """The leaves, each with the expression that finds it in ``name``."""
    return [(name + keystr(path), leaf) for path, leaf in tree_leaves_with_path(plain(tree), is_leaf=_is_unknown)]


def _is_unknown(node: Any) -> bool:
    return type(node) not in KNOWN and not is_namedtuple_instance(node)


def _opened(container: Any) -> Any:
    if isinstance(container, Mapping):
        return dict(container)
    return list(container) if isinstance(container, list) else tuple(container)


def _refilled(container: Any, children: Any) -> Any:
    if not isinstance(container, MutableMapping):
        return type(container)(children)
    # A copy, as constructors differ; key by key, as some classes refuse update().
    filled = copy.copy(container)
    for key, child in children.items():
        filled[key] = child
    return filled


# -- messages ---------------------------------------------------------------------------------------------------------


class UnsupportedTypeError(ConfigurationError, TypeError):
    """A value of a type that cannot be sent. Accelerate raises a TypeError there."""


def pack(value: Any, name: str = "value") -> bytes:
    """Pack ``value`` into one message. Tensors are read from any device."""
    tensors: Placed = []
    text = json.dumps(describe(value, tensors, name)).encode()
    payload = bytearray(end_of(tensors))
    if payload:
        write(tensors, torch.frombuffer(payload, dtype=torch.uint8))
    return len(text).to_bytes(8, "little") + text + bytes(payload)


def unpack(message: bytes) -> Any:
    """What :func:`pack` was given; tensors are on the CPU."""
    start = 8 + int.from_bytes(message[:8], "little")
    # A copy that is aligned, and that may be written.
    payload = torch.frombuffer(bytearray(message[start:]) or bytearray(1), dtype=torch.uint8)
    return rebuild(json.loads(message[8:start]), payload)


def write(tensors: Placed, payload: torch.Tensor) -> None:
    """Put the bytes of the tensors, from any device, into their places."""
    for offset, tensor in tensors:
        payload[offset : offset + tensor.nbytes] = tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def end_of(tensors: Placed) -> int:
    """The offset at which the next tensor may begin."""
    if not tensors:
        return 0
    offset, last = tensors[-1]
    return -(-(offset + last.nbytes) // ALIGNMENT) * ALIGNMENT


def describe(value: Any, tensors: Placed, path: str) -> Any:
    """Describe as JSON how to build ``value``; its tensors are appended to ``tensors``."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        tensors.append((end_of(tensors), value))
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), tensors[-1][0]]}
    if isinstance(value, Mapping) and all(isinstance(key, PLAIN) for key in value):
        return {"dict": [[key, describe(each, tensors, f"{path}[{key!r}]")] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        entries = [describe(each, tensors, f"{path}[{number}]") for number, each in enumerate(value)]
        if is_namedtuple_instance(value):
            kind: Any = type(value)
            return {"named": [kind.__module__, kind.__qualname__, kind._fields, entries]}
        return entries if isinstance(value, list) else {"tuple": entries}
    if isinstance(value, PLAIN):
        return value
    raise UnsupportedTypeError(f"{path} is a {type(value).__module__}.{type(value).__qualname__}")


def rebuild(described: Any, payload: torch.Tensor) -> Any:
    """The value that was described, with its tensors out of ``payload``."""
    if isinstance(described, list):
        return [rebuild(each, payload) for each in described]
    if not isinstance(described, dict):
        return described
    ((kind, content),) = described.items()
    if kind == "tensor":
        name, shape, offset = content
        dtype: torch.dtype = getattr(torch, name)
        numel = torch.Size(shape).numel()
        # A copy, so that it does not keep the whole message alive.
        return payload[offset : offset + numel * dtype.itemsize].view(dtype).reshape(shape).clone()
    if kind == "dict":
        return {key: rebuild(each, payload) for key, each in content}
    if kind == "tuple":
        return tuple(rebuild(content, payload))
    module, name, fields, entries = content
    return _named_tuple(module, name, fields)(*rebuild(entries, payload))


def _named_tuple(module: str, name: str, fields: list[str]) -> Any:
    """The class of that name if it is here and has these fields, or else a new one. Nothing is imported."""
    found = getattr(sys.modules.get(module), name, None)
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == tuple(fields):
        return found
    return namedtuple(name.rpartition(".")[2], fields)
