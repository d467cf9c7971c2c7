"""Collectives that gradsync runs itself, one after the other, in the order they were started.

A thread runs them while backward goes on. Whoever waits for one does not wait for that thread to wake up: it runs what
is left of the queue itself, so that a collective that is waited for at once costs no change of threads.
"""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from gradsync.communicator.alarm import make_alarm
from gradsync.communicator.base import Handle

__all__ = ["Background"]

# Seconds before the thread begins: more than it takes to get from the start of a collective to the wait for it.
HEAD_START = 100e-6


class _Task:
    """One collective: what to run, and how it went."""

    __slots__ = ("_callbacks", "done", "error", "queue", "run")

    def __init__(self, queue: "_Queue", run: Callable[[], None]) -> None:
        self.queue = queue
        self.run: Callable[[], None] | None = run
        self.done = False
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the collective has ended, on the thread that ran it, or now if it has."""
        self._callbacks.append(callback)
        if self.done:
            self.call_back()

    def call_back(self) -> None:
        while self._callbacks:
            with contextlib.suppress(IndexError):  # the other thread took it
                self._callbacks.pop()()

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
        self._alarm = make_alarm()
        self._closed = False

    def add(self, run: Callable[[], None], *, at_leisure: bool) -> _Task:
        task = _Task(self, run)
        self._tasks.append(task)
        if not at_leisure:
            self._alarm.set(HEAD_START)
        return task

    def close(self) -> None:
        self._closed = True
        self._alarm.set(0.0)

    def run_until(self, task: _Task) -> None:
        # First, so that the alarm of what is added meanwhile stays.
        self._alarm.call_off()
        if self._closed:
            # That alarm was not for this.
            self._alarm.set(0.0)
        while not task.done:
            with self._turn:
                if not task.done:
                    self._run_next()
        if self._tasks:
            self._alarm.set(HEAD_START)

    def serve(self) -> None:
        """The thread's life."""
        while True:
            self._alarm.wait()
            if self._closed:
                return
            # Who waits for one may have run it already. What was added at leisure comes along.
            while self._tasks:
                with self._turn:
                    if self._tasks:
                        self._run_next()

    def _run_next(self) -> None:
        task = self._tasks.popleft()
        assert task.run is not None
        # Whether gradients are recorded is a thread's own setting. torch.no_grad() takes longer than all else here.
        recording = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            task.run()
        except BaseException as error:
            task.error = error
        finally:
            torch._C._set_grad_enabled(recording)
            # Tensors of the collective live on in their owners, not here.
            task.run = None
            task.done = True
            task.call_back()


class Background:
    """A queue of collectives and the thread that works on it, which starts with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue = _Queue()
        self._thread: threading.Thread | None = None
        # The finalizer must not hold this object.
        weakref.finalize(self, _Queue.close, self._queue)

    def start(self, run: Callable[[], None], *, at_leisure: bool = False) -> Handle:
        """Have ``run`` called after all that was started before it; the handle's ``wait`` raises what it raised.

        What is ``at_leisure`` does not wake the thread: it runs with what is started after it, or when it is waited
        for. That is right for a small message, which costs less than the waking.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._queue.serve, name=self._name, daemon=True)
            self._thread.start()
        return self._queue.add(run, at_leisure=at_leisure)

    def close(self) -> None:
        """Stop after the collective that runs. What has not begun then runs only if somebody waits for it."""
        self._queue.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
