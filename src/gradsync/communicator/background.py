"""Collectives that gradsync runs itself, one after the other, in the order they were started.

A thread runs them while backward goes on. Whoever waits for one does not wait for that thread to wake up: it runs what
is left of the queue itself, so that a collective that is waited for at once costs no change of threads.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from gradsync.communicator.base import Handle

__all__ = ["Background"]


class _Task:
    """One collective: what to run, and how it went."""

    __slots__ = ("done", "error", "queue", "run")

    def __init__(self, queue: "_Queue", run: Callable[[], None]) -> None:
        self.queue = queue
        self.run: Callable[[], None] | None = run
        self.done = False
        self.error: BaseException | None = None

    def wait(self) -> None:
        if not self.done:
            self.queue.run_until(self)
        if self.error is not None:
            raise self.error


class _Queue:
    """What the thread knows: it holds no communicator, so that one nobody uses any more goes away."""

    def __init__(self) -> None:
        self._tasks: deque[_Task] = deque()
        # Held by whoever runs a collective: never two at a time, never out of order.
        self._turn = threading.Lock()
        self._started = threading.Semaphore(0)
        self._closed = False

    def add(self, run: Callable[[], None]) -> _Task:
        task = _Task(self, run)
        self._tasks.append(task)
        self._started.release()
        return task

    def close(self) -> None:
        self._closed = True
        self._started.release()

    def run_until(self, task: _Task) -> None:
        while not task.done:
            with self._turn:
                if not task.done:
                    self._run_next()

    def serve(self) -> None:
        """The thread's life."""
        while True:
            self._started.acquire()
            if self._closed:
                return
            with self._turn:
                # Who waited for it may have run it already.
                if self._tasks:
                    self._run_next()

    def _run_next(self) -> None:
        task = self._tasks.popleft()
        assert task.run is not None
        try:
            # Whether gradients are recorded is a thread's own setting.
            with torch.no_grad():
                task.run()
        except BaseException as error:
            task.error = error
        finally:
            # Tensors of the collective live on in their owners, not here.
            task.run = None
            task.done = True


class Background:
    """A queue of collectives and the thread that works on it, which starts with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue = _Queue()
        self._thread: threading.Thread | None = None
        # The finalizer must not hold this object.
        weakref.finalize(self, _Queue.close, self._queue)

    def start(self, run: Callable[[], None]) -> Handle:
        """Have ``run`` called after all that was started before it; the handle's ``wait`` raises what it raised."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._queue.serve, name=self._name, daemon=True)
            self._thread.start()
        return self._queue.add(run)

    def close(self) -> None:
        """Stop after the collective that runs. What has not begun then runs only if somebody waits for it."""
        self._queue.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
