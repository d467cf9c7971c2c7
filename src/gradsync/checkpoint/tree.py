"""State as a tree of plain values, turned into JSON and named tensors, and back, bit by bit and type by type.

``None``, booleans, strings, integers, finite floats and lists are themselves in JSON; everything else is an object
whose first key is its kind::

    {"dict": [["lr", 0.1], ["betas", {"tuple": [0.9, 0.999]}], ["exp_avg", {"tensor": "state.0.exp_avg"}]]}

Nothing in such a file can name a class or a function, so reading one runs no code from its writer. An unsupported value
is refused when it is saved, with its path in the tree: at that time it can still be saved differently.
"""

import contextlib
import math
import random
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.checkpoint.files import DTYPE_NAMES, RESERVED_NAME

__all__ = ["decode", "encode", "rng_state", "set_rng_state"]

Path = tuple[str, ...]

# Enough for every state, and far from where Python and its JSON reader give up.
DEPTH = 100

# JSON has no limit for whole numbers, but Python has one for decimal digits.
PLAIN_INT = 2**63

# Stored as tensors of another dtype, over the same bytes.
BYTES = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
PAIRS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
STORED_AS = {**dict.fromkeys(DTYPE_NAMES), **dict.fromkeys(BYTES, torch.uint8), **PAIRS}

TAKEN = (
    "A checkpoint holds dicts, lists, tuples, texts, numbers, None, dense tensors, NumPy arrays and scalars, "
    "torch.Size, torch.dtype, torch.device, Counter and OrderedDict; keys are texts, numbers, booleans, None and "
    "tuples of these. Turn it into these, or leave it out"
)


def encode(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """``tree`` as something that JSON can say, and the tensors it names. Those are views, not copies.

    Tensors over the same memory with the same shape, as tied weights are, are stored once. Other overlaps are not
    kept: each of those tensors gets memory of its own. Strides, gradients and graphs are not kept either.
    """
    encoder = _Encoder()
    return encoder.node(tree, ()), encoder.tensors


def decode(structure: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree that :func:`encode` took. Its tensors are those in ``tensors``, or views of them.

    Stored once is one tensor: tied weights come back tied. A ``defaultdict`` comes back as a dict.
    """
    if isinstance(structure, list):
        return [decode(child, tensors) for child in structure]
    if not isinstance(structure, dict):
        return structure
    kind = next(iter(structure), None)
    if kind not in DECODERS:
        raise ConfigurationError(f"the tree has an unknown kind of value, {kind!r}. Update gradsync to read it")
    return DECODERS[kind](structure, tensors)


# -- there ------------------------------------------------------------------------------------------------------------


class _Encoder:
    """One traversal of a tree: the tensors found so far, and the memory they refer to."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._name_of_memory: dict[tuple[Any, ...], str] = {}

    def node(self, value: Any, path: Path) -> Any:
        # By the exact type: an instance of a subclass would come back as something else.
        kind = type(value)
        if len(path) > DEPTH:
            where = _spell(path[:3])
            raise ConfigurationError(f"{where}… is nested deeper than {DEPTH} levels; does it contain itself?")
        if kind in CONTAINERS:
            return self._container(value, path)
        if kind in (torch.Tensor, torch.nn.Parameter):
            return self._tensor(value, path)
        if kind is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": str(value)}
        numpy = sys.modules.get("numpy")
        if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
            return self._numpy(value, path, numpy)
        return _scalar(value, path)

    def _container(self, value: Any, path: Path) -> Any:
        kind = CONTAINERS[type(value)]
        if isinstance(value, list | tuple):
            children = [self.node(child, (*path, str(number))) for number, child in enumerate(value)]
            return children if kind == "list" else {kind: children}
        pairs = [[_key(key, path), self.node(child, (*path, str(key)))] for key, child in value.items()]
        node: dict[str, Any] = {kind: pairs}
        attributes = dict(getattr(value, "__dict__", {}))
        # The versions of a module's state, which load_state_dict looks for there.
        if "_metadata" in attributes:
            node["metadata"] = self.node(attributes.pop("_metadata"), (*path, "_metadata"))
        if attributes:
            raise _refusal(path, f"a {type(value).__name__} with attributes ({', '.join(attributes)})")
        return node

    def _tensor(self, tensor: torch.Tensor, path: Path) -> dict[str, Any]:
        stored = _storable(tensor, path)
        reading = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), *reading)
        name = self._name_of_memory.get(memory)
        if name is None:
            name = self._name_of_memory[memory] = self._store(stored, path)
        node: dict[str, Any] = {"tensor": name}
        if stored.dtype != tensor.dtype:
            node["dtype"] = str(tensor.dtype).removeprefix("torch.")
        if type(tensor) is torch.nn.Parameter:
            node["parameter"] = True
        if tensor.requires_grad:
            node["requires_grad"] = True
        return node

    def _numpy(self, value: Any, path: Path, numpy: Any) -> dict[str, Any]:
        dtype = value.dtype
        # The text names the dtype, except where there are fields, Python objects or somebody's own type.
        if dtype.hasobject or numpy.dtype(dtype.str) != dtype:
            raise _refusal(path, f"numpy.{type(value).__name__} of dtype {dtype}")
        if isinstance(value, numpy.generic):
            return {"scalar": dtype.str, "bytes": value.tobytes().hex()}
        data = bytearray(value.tobytes())
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return {"array": self._store(flat, path), "dtype": dtype.str, "shape": list(value.shape)}

    def _store(self, tensor: torch.Tensor, path: Path) -> str:
        """Keep it under its path: a name that is meaningful in other tools that open the file."""
        # The format takes any text that has a UTF-8 form.
        plain = ".".join(path).encode("utf-8", "backslashreplace").decode() or "tensor"
        name, number = plain, 1
        while name in self.tensors or name == RESERVED_NAME:
            number += 1
            name = f"{plain}#{number}"
        self.tensors[name] = tensor
        return name


CONTAINERS: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    torch.Size: "size",
    dict: "dict",
    defaultdict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
}


def _scalar(value: Any, path: Path) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < PLAIN_INT else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    raise _refusal(path, f"{kind.__module__}.{kind.__qualname__}")


def _key(key: Any, path: Path) -> Any:
    if type(key) is tuple:
        return {"tuple": [_key(part, path) for part in key]}
    return _scalar(key, (*path, f"key {key!r}"))


def _storable(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """The tensor over the same bytes, with a dtype that the file has."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise _refusal(path, "a tensor without memory (meta)" if tensor.is_meta else f"a {kind} tensor")
    plain = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype not in STORED_AS:
        raise _refusal(path, f"a tensor of {tensor.dtype}")
    dtype = STORED_AS[tensor.dtype]
    return plain if dtype is None else (plain.unsqueeze(-1) if tensor.is_complex() else plain).view(dtype)


def _spell(path: Iterable[str]) -> str:
    return ".".join(path) or "the tree"


def _refusal(path: Path, what: str) -> ConfigurationError:
    return ConfigurationError(f"{_spell(path)} is {what}, which a checkpoint cannot hold. {TAKEN}")


# -- and back ---------------------------------------------------------------------------------------------------------

Tensors = Mapping[str, torch.Tensor]


def _mapping(make: Callable[..., Any], node: dict[str, Any], tensors: Tensors) -> Any:
    pairs = next(iter(node.values()))
    mapping = make({decode(key, tensors): decode(value, tensors) for key, value in pairs})
    if "metadata" in node:
        mapping._metadata = decode(node["metadata"], tensors)
    return mapping


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"the tree names the dtype {name!r}, which this torch does not have. Update torch")
    return dtype


def _tensor(node: dict[str, Any], tensors: Tensors) -> torch.Tensor:
    tensor = tensors[node["tensor"]]
    if "dtype" in node:
        dtype = _dtype(node["dtype"])
        tensor = tensor.view(dtype).squeeze(-1) if dtype.is_complex else tensor.view(dtype)
    if "parameter" in node:
        return torch.nn.Parameter(tensor, requires_grad="requires_grad" in node)
    return tensor.detach().requires_grad_() if "requires_grad" in node else tensor


def _array(dtype: str, shape: list[int], data: bytes) -> Any:
    try:
        import numpy
    except ImportError as error:
        raise ConfigurationError("the checkpoint holds NumPy values, but NumPy is not installed") from error
    # Through a copy: the array owns its memory, and may be written to.
    return numpy.ndarray(tuple(shape), dtype, bytearray(data)).copy()


DECODERS: dict[str, Callable[[dict[str, Any], Tensors], Any]] = {
    "int": lambda node, _: int(node["int"], 16),
    "float": lambda node, _: struct.unpack(">d", bytes.fromhex(node["float"]))[0],
    "tuple": lambda node, tensors: tuple(decode(child, tensors) for child in node["tuple"]),
    "size": lambda node, _: torch.Size(node["size"]),
    "dict": partial(_mapping, dict),
    "ordered": partial(_mapping, OrderedDict),
    "counter": partial(_mapping, Counter),
    "dtype": lambda node, _: _dtype(node["dtype"]),
    "device": lambda node, _: torch.device(node["device"]),
    "tensor": _tensor,
    "array": lambda node, tensors: _array(node["dtype"], node["shape"], tensors[node["array"]].numpy().tobytes()),
    "scalar": lambda node, _: _array(node["scalar"], [], bytes.fromhex(node["bytes"]))[()],
}


def rng_state() -> dict[str, Any]:
    """The states of Python's, torch's and, where they are in use, NumPy's and the current CUDA device's generator."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # The long form: the short one, a tuple, knows one kind of generator only.
        state["numpy"] = numpy.random.get_state(legacy=False)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Go on where :func:`rng_state` stood. What this process does not have, CUDA or NumPy, is passed over."""
    if not isinstance(state, dict) or not {"python", "torch"} <= state.keys():
        have = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise ConfigurationError(
            f"set_rng_state takes what rng_state() returned, with 'python' and 'torch'; got {have}"
        )
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        with contextlib.suppress(ImportError):
            import numpy

            numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
