"""Ctrl-C and SIGTERM request a stop; the loop finishes its step first."""

import signal
import threading
import time
from types import FrameType
from typing import Any

__all__ = ["Interruption"]


class Interruption:
    """While entered, the first SIGINT or SIGTERM is noted; one that comes seconds later acts as usual.

    Not one that comes at once: a terminal signals all processes, and a launcher passes its own signal on to the ranks.
    """

    ECHO_SECONDS = 2.0

    def __init__(self) -> None:
        self.signal = 0
        self._noted_at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._previous = {each: signal.signal(each, self._note) for each in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if not self.signal:
            self.signal, self._noted_at = number, now
        elif now - self._noted_at > self.ECHO_SECONDS:
            self.__exit__()
            signal.raise_signal(number)
