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


def from_json(kind: type[T], told: object) -> T:
    """An object of type ``kind``. A dataclass may be a JSON object, or an array in the order of its fields, the last of
    which may be missing.

    Raises ValueError if that is impossible.
    """
    read: Callable[[object], T] = _reader(typing.cast(Any, kind))
    return read(told)


def from_json_or(kind: type[T], told: object, otherwise: D) -> T | D:
    """:func:`from_json`, or ``otherwise`` for what is something else: another version may have written it."""
    try:
        return from_json(kind, told)
    except ValueError:
        return otherwise


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
        return lambda told: _object(kind, told)
    if origin is tuple and inner[-1] is Ellipsis:
        return lambda told: _tuple(told, (inner[0],) * len(_array(told)))
    if origin is tuple:
        return lambda told: _tuple(told, inner)
    if origin in (dict, Mapping):
        return lambda told: _mapping(told, *inner)
    if origin is typing.Literal:
        return lambda told: _one_of(told, inner)
    if origin is types.UnionType and types.NoneType in inner:
        (other,) = (each for each in inner if each is not types.NoneType)
        return lambda told: None if told is None else _reader(other)(told)
    simple: dict[Any, Reader] = {
        float: _number,
        int: _whole,
        bool: lambda told: _wanted(bool, told, "true or false"),
        str: lambda told: _wanted(str, told, "words"),
    }
    return simple[kind]


def _wanted(kind: type[T], told: Any, words: str) -> T:
    # Not isinstance: True is a number to Python, and to nobody who writes one.
    if type(told) is not kind:
        raise _ValueError(f"expected {words}, got {_short(told)}")
    return told


def _array(told: Any) -> Any:
    # dataclasses.asdict() leaves tuples as they are.
    return told if type(told) is tuple else _wanted(list, told, "an array")


def _whole(told: Any) -> int:
    # In JSON it may have any number of digits, and nobody computes with those.
    if abs(_wanted(int, told, "a whole number")) >= LARGEST:
        raise _ValueError(f"expected a whole number of 64 bits, got {_short(told)}")
    return typing.cast(int, told)


def _number(told: Any) -> float:
    if type(told) not in (float, int) or not abs(told) <= sys.float_info.max:
        raise _ValueError(f"expected a finite number, got {_short(told)}")
    return float(told)


def _one_of(told: Any, names: tuple[Any, ...]) -> Any:
    if told not in names:
        raise _ValueError(f"expected one of {', '.join(map(str, names))}, got {_short(told)}")
    return told


def _tuple(told: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(_array(told)) != len(kinds):
        raise _ValueError(f"expected {len(kinds)} values, got {len(told)}")
    made = []
    for place, (kind, each) in enumerate(zip(kinds, told, strict=True)):
        try:
            made.append(_reader(kind)(each))
        except ValueError as error:
            raise _ValueError.inside(f"[{place}]", error) from None
    return tuple(made)


def _mapping(told: Any, name_kind: Any, kind: Any) -> dict[Any, Any]:
    made = {}
    for name, value in _wanted(dict, told, "an object").items():
        try:
            made[_reader(name_kind)(name)] = _reader(kind)(value)
        except ValueError as error:
            raise _ValueError.inside(f".{name}", error) from None
    return made


def _object(kind: Any, told: Any) -> Any:
    readers = _readers(kind)
    if type(told) in (list, tuple) and len(told) <= len(readers):
        # Of one that was written before the class had its last fields.
        told = dict(zip(readers, told, strict=False))
    values = {}
    for name, (read, is_needed) in readers.items():
        if name in _wanted(dict, told, "an object"):
            try:
                values[name] = read(told[name])
            except ValueError as error:
                raise _ValueError.inside(f".{name}", error) from None
        elif is_needed:
            raise _ValueError(f"{name} is missing")
    return kind(**values)


@cache
def _readers(kind: Any) -> dict[str, tuple[Reader, bool]]:
    """By name, with whether it must be told. Looked up late: a class may have others of its own kind inside."""
    types_of = typing.get_type_hints(kind)
    return {
        each.name: (_reader(types_of[each.name]), each.default is MISSING and each.default_factory is MISSING)
        for each in fields(kind)
    }


def _short(told: Any) -> str:
    words = repr(told)
    return words if len(words) < 60 else f"{words[:57]}…"
