"""Shutdown and fork handling for communicators: what happens when the interpreter exits, or a child is forked.

[Note: the end] A thread that wants the interpreter's lock while the interpreter shuts down is terminated on the spot.
In C++ code that aborts the process, ``terminate called without an active exception``, with exit code -6. It happens to
our threads when they return from a message, and to Gloo's threads when they release the last reference to a tensor. So
before the interpreter shuts down

- communicators with collectives in flight are given up, which wakes their threads, and the threads are joined;
- threads that abort NCCL's communicators, and also return from C++, are joined, too;
- tensors of collectives that Gloo still works on are kept forever, so that releasing them needs no lock;
- Gloo's threads that have finished a collective get a moment to release it, also for collectives that a user started.

Each of these has a time limit: a process that should exit does exit.
"""

import atexit
import ctypes
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gradsync.communicator.logs import log_errors

__all__ = ["UnderWay", "join_at_exit", "keep_forever", "keep_past_exit", "register", "shut_down_all"]

# For all threads of all communicators together, and for those of Gloo.
PATIENCE_SECONDS = 2.0
# For aborts, each of which waits for the device to end its kernels.
ABORT_SECONDS = 5.0
SETTLE_SECONDS = 0.5
LOOK_SECONDS = 1e-3
GLOO_THREAD = "pt_gloo_runloop"
# When this many have accumulated, the completed ones are released.
MOST_KEPT = 64


# In the order in which they were made.
_communicators: "weakref.WeakKeyDictionary[Any, None]" = weakref.WeakKeyDictionary()


def register(communicator: Any) -> None:
    """Call ``communicator.after_fork()`` in forked children, and ``communicator.shutdown(seconds)``, which stops its
    threads within that time, at exit."""
    _communicators[communicator] = None


class UnderWay:
    """Collectives that a thread outside Python works on, each with its tensors."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Callable[[], bool], tuple[torch.Tensor, ...]]] = {}
        # Ranks may be threads, and a number must be nobody else's.
        self._numbers = itertools.count()

    def begin(self, is_done: Callable[[], bool], tensors: tuple[torch.Tensor, ...]) -> int:
        """Keep ``tensors`` until :meth:`end`, or until they are done and others have been added."""
        if len(self._tensors) >= MOST_KEPT:
            for number, (ended, _) in list(self._tensors.items()):
                if ended():
                    self.end(number)
        number = next(self._numbers)
        self._tensors[number] = (is_done, tensors)
        return number

    def end(self, number: int) -> None:
        self._tensors.pop(number, None)

    def left(self) -> Iterator[torch.Tensor]:
        """The tensors of collectives that are not done."""
        for is_done, tensors in list(self._tensors.values()):
            if not is_done():
                yield from tensors


_under_way: list[UnderWay] = []


def keep_past_exit(under_way: UnderWay) -> UnderWay:
    """Keep its remaining tensors alive past the end of the process."""
    _under_way.append(under_way)
    return under_way


def keep_forever(thing: object) -> None:
    """Keep an object alive past the end of the interpreter, which then does not run its destructor."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


_awaited: list[threading.Thread] = []


def join_at_exit(thread: threading.Thread) -> None:
    """Join this thread, which returns from C++ within seconds, when the process exits."""
    _awaited[:] = [each for each in _awaited if each.is_alive()]
    _awaited.append(thread)


@atexit.register
def shut_down_all() -> None:
    """Shuts down all communicators. See [Note: the end]."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    # A communicator over others was created after them. It leaves first: while its thread runs, it restarts theirs.
    for communicator in reversed(list(_communicators)):
        # One that cannot must not keep the others from it.
        with log_errors("a communicator could not be closed"):
            communicator.shutdown(max(0.0, deadline - time.monotonic()))
    deadline = time.monotonic() + ABORT_SECONDS
    for thread in _awaited:
        thread.join(max(0.0, deadline - time.monotonic()))
    for tensor in (tensor for each in _under_way for tensor in each.left()):
        keep_forever(tensor)
    _await_idle_gloo()


def _await_idle_gloo() -> None:
    """Wait until no thread of Gloo's has run in two looks, one after the other."""
    deadline, quiet = time.monotonic() + SETTLE_SECONDS, 0
    while quiet < 2 and time.monotonic() < deadline:
        states = list(_gloo_states())
        if not states:
            return
        quiet = 0 if "R" in states else quiet + 1
        time.sleep(LOOK_SECONDS)


def _gloo_states() -> Iterator[str]:
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().partition(" (")[2].rpartition(") ")
        except OSError:  # it has ended meanwhile
            continue
        if name == GLOO_THREAD:
            yield rest[0]


def _after_fork() -> None:
    for communicator in list(_communicators):
        communicator.after_fork()


os.register_at_fork(after_in_child=_after_fork)
