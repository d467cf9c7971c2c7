"""Files that are written as a whole or not at all, and dataclasses from the JSON that files and messages hold.

:func:`whole_file` is an atomic write: temporary file, fsync, rename. A file gets its name only once it is complete and
on disk.

:func:`from_json` checks what a file or another process wrote against the field types of a class. Files get copied,
truncated and edited, and other versions write them. So a value of the wrong type goes no further than this module, and
the error says where it is: ``profile.buckets[3].nbytes: …``. Numbers must be finite. Keys that the class does not have
are ignored; fields with a default may be missing.
"""

import os
import secrets
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

__all__ = ["PARTIAL", "from_json", "from_json_or", "whole_file"]

PARTIAL = ".partial"


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which becomes ``path`` when the block ends; if the block raises, the old file stays.

    Several processes may write the same file at once: each uses its own temporary name, and the last one wins.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            # A full disk does not say which file it was.
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


T = TypeVar("T")
D = TypeVar("D")
Reader = Callable[[Any], Any]

LARGEST = 2**63


def from_json(kind: type[T], data: object) -> T:
    """An object of type ``kind``. A dataclass may be a JSON object, or an array in the order of its fields, the last of
    which may be missing.

    Raises ValueError if that is impossible.
    """
    read: Callable[[object], T] = _reader(typing.cast(Any, kind))
    return read(data)


def from_json_or(kind: type[T], data: object, default: D) -> T | D:
    """:func:`from_json`, or ``default`` for what is something else: another version may have written it."""
    try:
        return from_json(kind, data)
    except ValueError:
        return default


class _ValueError(ValueError):
    """What is wrong with a value, and where it is."""

    def __init__(self, words: str, path: str = "") -> None:
        super().__init__(f"{path.removeprefix('.')}: {words}" if path else words)
        self.words, self.path = words, path

    @classmethod
    def inside(cls, place: str, error: ValueError) -> "_ValueError":
        known = error if isinstance(error, cls) else cls(str(error))
        return cls(known.words, place + known.path)


@cache
def _reader(kind: Any) -> Reader:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return lambda data: _object(kind, data)
    if origin is tuple and inner[-1] is Ellipsis:
        return lambda data: _tuple(data, (inner[0],) * len(_array(data)))
    if origin is tuple:
        return lambda data: _tuple(data, inner)
    if origin in (dict, Mapping):
        return lambda data: _mapping(data, *inner)
    if origin is typing.Literal:
        return lambda data: _one_of(data, inner)
    if origin is types.UnionType and types.NoneType in inner:
        (other,) = (each for each in inner if each is not types.NoneType)
        return lambda data: None if data is None else _reader(other)(data)
    simple: dict[Any, Reader] = {
        float: _number,
        int: _whole,
        bool: lambda data: _wanted(bool, data, "true or false"),
        str: lambda data: _wanted(str, data, "words"),
    }
    return simple[kind]


def _wanted(kind: type[T], data: Any, words: str) -> T:
    # Not isinstance: True is a number to Python, and to nobody who writes one.
    if type(data) is not kind:
        raise _ValueError(f"expected {words}, got {_short(data)}")
    return data


def _array(data: Any) -> Any:
    # dataclasses.asdict() leaves tuples as they are.
    return data if type(data) is tuple else _wanted(list, data, "an array")


def _whole(data: Any) -> int:
    # In JSON it may have any number of digits, and nobody computes with those.
    if abs(_wanted(int, data, "a whole number")) >= LARGEST:
        raise _ValueError(f"expected a whole number of 64 bits, got {_short(data)}")
    return typing.cast(int, data)


def _number(data: Any) -> float:
    if type(data) not in (float, int) or not abs(data) <= sys.float_info.max:
        raise _ValueError(f"expected a finite number, got {_short(data)}")
    return float(data)


def _one_of(data: Any, names: tuple[Any, ...]) -> Any:
    if data not in names:
        raise _ValueError(f"expected one of {', '.join(map(str, names))}, got {_short(data)}")
    return data


def _tuple(data: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(_array(data)) != len(kinds):
        raise _ValueError(f"expected {len(kinds)} values, got {len(data)}")
    made = []
    for place, (kind, each) in enumerate(zip(kinds, data, strict=True)):
        try:
            made.append(_reader(kind)(each))
        except ValueError as error:
            raise _ValueError.inside(f"[{place}]", error) from None
    return tuple(made)


def _mapping(data: Any, name_kind: Any, kind: Any) -> dict[Any, Any]:
    made = {}
    for name, value in _wanted(dict, data, "an object").items():
        try:
            made[_reader(name_kind)(name)] = _reader(kind)(value)
        except ValueError as error:
            raise _ValueError.inside(f".{name}", error) from None
    return made


def _object(kind: Any, data: Any) -> Any:
    readers = _readers(kind)
    if type(data) in (list, tuple) and len(data) <= len(readers):
        # Written before the class had its last fields.
        data = dict(zip(readers, data, strict=False))
    values = {}
    for name, (read, is_needed) in readers.items():
        if name in _wanted(dict, data, "an object"):
            try:
                values[name] = read(data[name])
            except ValueError as error:
                raise _ValueError.inside(f".{name}", error) from None
        elif is_needed:
            raise _ValueError(f"{name} is missing")
    return kind(**values)


@cache
def _readers(kind: Any) -> dict[str, tuple[Reader, bool]]:
    """By name, with whether it is required. Looked up late: a class may contain others of its own kind."""
    types_of = typing.get_type_hints(kind)
    return {
        each.name: (_reader(types_of[each.name]), each.default is MISSING and each.default_factory is MISSING)
        for each in fields(kind)
    }


def _short(data: Any) -> str:
    words = repr(data)
    return words if len(words) < 60 else f"{words[:57]}…"
