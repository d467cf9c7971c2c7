"""A thread that completes lazy collectives, even if nobody waits for them.

A small collective costs less than waking a thread for it, so it is left to the thread that waits for it, nearly always
a moment later. But that may take a while: the caller may first synchronize with the others elsewhere (a barrier,
another communicator), while they are waiting in this one. So a thread of this process checks all queues with such
collectives now and then, and runs those whose first collective it has seen before. A thread about to sleep in one
collective hands the others over at once (:func:`flush_lazy`), since its peers may be waiting for those.

Setting and cancelling a timer for each of them would cost a tenth of the time that the smallest ones take.
"""

import contextlib
import os
import threading
import time
import weakref
from typing import Protocol

__all__ = ["flush_lazy", "look_after"]

# Between two looks: rare enough not to show where collectives are waited for at once.
LOOK_SECONDS = 2e-3


class Queue(Protocol):
    """A queue that the sweeper checks."""

    # Whether it is; kept by the sweeper.
    is_looked_after: bool

    def first(self) -> object | None:
        """What comes next in it, unless somebody is at work on it."""

    def wake(self) -> None:
        """Have its thread work on it."""


class _Sweeper:
    def __init__(self) -> None:
        self._queues: weakref.WeakKeyDictionary[Queue, object | None] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._has_work = threading.Event()
        self._thread: threading.Thread | None = None

    def look_after(self, queue: Queue) -> None:
        if not self._lock.acquire(timeout=LOOK_SECONDS):
            # See flush_lazy().
            queue.wake()
            return
        try:
            queue.is_looked_after = True
            self._queues[queue] = None
            if self._thread is None:
                thread = threading.Thread(target=self._walk, name="gradsync sweeper", daemon=True)
                # If no further thread can start, the thread that waits for a collective still runs it.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._thread = thread
        finally:
            self._lock.release()
        self._has_work.set()

    def flush_lazy(self) -> None:
        # Nobody holds the lock for long, but for a thread that a signal handler has interrupted with it. The
        # handler may wait for this thread.
        if self._lock.acquire(timeout=LOOK_SECONDS):
            try:
                for queue in self._queues:
                    if queue.first() is not None:
                        queue.wake()
            finally:
                self._lock.release()

    def _walk(self) -> None:
        while True:
            self._has_work.wait()
            time.sleep(LOOK_SECONDS)
            self._look_at_all()

    def _look_at_all(self) -> None:
        # In a separate call: a sleeping thread must hold no queue, which would outlive its communicator.
        with self._lock:
            for queue, seen in list(self._queues.items()):
                self._look(queue, seen)
            if not self._queues:
                self._has_work.clear()

    def _look(self, queue: Queue, seen: object | None) -> None:
        first = queue.first()
        if first is not None and first is seen:
            queue.wake()
        elif first is None:
            # In this order: whoever adds something looks at the flag after it was added.
            queue.is_looked_after = False
            first = queue.first()
            if first is None:
                del self._queues[queue]
                return
            queue.is_looked_after = True
        self._queues[queue] = first


_sweeper = _Sweeper()


def _begin_anew() -> None:
    """In a forked child, which has none of its parent's threads."""
    global _sweeper
    _sweeper = _Sweeper()


os.register_at_fork(after_in_child=_begin_anew)


def look_after(queue: Queue) -> None:
    """Sweep ``queue`` from now on, until it is empty."""
    _sweeper.look_after(queue)


def flush_lazy() -> None:
    """Called before this thread sleeps in a collective: runs the lazy collectives that others have started."""
    if _sweeper._queues:
        _sweeper.flush_lazy()
