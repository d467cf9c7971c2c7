"""A timer that wakes a thread a moment from now, unless it is cancelled first.

Waking a thread takes a core and, in Python, the interpreter's lock: on a machine whose cores are all computing, that is
more expensive than a collective of a few hundred kilobytes. Most collectives that need no thread are waited for at
once. On Linux the timer is a kernel timer, which costs only two system calls when it is cancelled. Elsewhere the thread
is woken immediately, and sleeps for that moment itself.
"""

import ctypes
import functools
import os
import sys
import time
from queue import SimpleQueue
from typing import Any

__all__ = ["Timer", "make_timer"]


class _Times(ctypes.Structure):
    """The kernel's ``itimerspec``: an interval, which is unused here, and the time from now."""

    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


@functools.lru_cache(maxsize=8)
def _times(seconds: float) -> Any:
    # At least a nanosecond: nothing at all would call it off.
    whole, rest = divmod(max(1, int(seconds * 1e9)), 1_000_000_000)
    return ctypes.byref(_Times(0, 0, whole, rest))


class KernelTimer:
    """A kernel timer behind a file descriptor. Any thread may set it, any number of times; one thread waits for it."""

    # Quick calls, which keep the interpreter's lock: to give it back would cost more.
    _libc = ctypes.PyDLL(None, use_errno=True)
    _never = ctypes.byref(_Times())

    def __init__(self) -> None:
        self._descriptor = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._is_set = False

    def set(self, seconds: float) -> None:
        """Fire in ``seconds``."""
        self._is_set = True
        self._libc.timerfd_settime(self._descriptor, 0, _times(seconds), None)

    def cancel(self) -> None:
        """Cancel the timer, if that is still possible. The thread may be woken all the same."""
        if self._is_set:
            self._is_set = False
            self._libc.timerfd_settime(self._descriptor, 0, self._never, None)

    def wait(self) -> None:
        """Return when the timer has fired."""
        os.read(self._descriptor, 8)

    def __del__(self) -> None:
        # At the very end of the interpreter there is no os any more, and the kernel closes what is open.
        if os is not None and self._descriptor >= 0:
            os.close(self._descriptor)


class SleepingTimer:
    """A substitute where no kernel timer exists: a call that wakes the thread at once."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[float] = SimpleQueue()

    def set(self, seconds: float) -> None:
        self._calls.put(seconds)

    def cancel(self) -> None:
        pass

    def wait(self) -> None:
        time.sleep(self._calls.get())


Timer = KernelTimer | SleepingTimer


def make_timer() -> Timer:
    return KernelTimer() if sys.platform == "linux" else SleepingTimer()
