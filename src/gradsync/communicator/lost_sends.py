"""Ends the wait for a send that Gloo has lost.

[Note: lost sends] A send waits until its receiver says that it is ready. If that message is the last one that arrived
before the connection was reset, Gloo takes the send off its list, fails to write it, and reports the error to all
operations on its lists; this one is no longer on any. Waiting for it then takes until the timeout of the group,
whatever is closed or times out meanwhile. Python cannot end another thread's wait in C++. torch could
(``SendWork::abort``), but does not expose that to Python, so it is called through its symbol in torch's library. Only
objects that are ``SendWork`` beyond doubt are touched: their first word points to that class's vtable. If any of this
is not found, the wait ends at the timeout.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["end_wait"]

LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib")
ABORT = "_ZN4c10d16ProcessGroupGloo8SendWork5abortEv"
METHODS = "_ZTVN4c10d16ProcessGroupGloo8SendWorkE"
# A table begins with an offset and the class's name, in front of the methods.
BEFORE_METHODS = 2 * ctypes.sizeof(ctypes.c_void_p)


def end_wait(work: Any) -> bool:
    """Make ``work.wait()`` of a send return False, now or when it is called. Returns False if that cannot be done."""
    known = _methods()
    if known is None or work is None:
        return False
    methods, abort = known
    # Behind what every object has, one of pybind11's has the address of what it stands for.
    address = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
    if not address or ctypes.c_void_p.from_address(address).value != methods:
        return False
    abort(address)
    return True


@functools.cache
def _methods() -> tuple[int, Callable[[int], None]] | None:
    for path in (Path(torch.__file__).parent / "lib" / name for name in LIBRARIES):
        try:
            library = ctypes.CDLL(str(path))
            table = ctypes.addressof(ctypes.c_char.in_dll(library, METHODS))
            abort = library[ABORT]
        except (OSError, ValueError, AttributeError):
            continue
        abort.argtypes, abort.restype = [ctypes.c_void_p], None
        return table + BEFORE_METHODS, abort
    return None
