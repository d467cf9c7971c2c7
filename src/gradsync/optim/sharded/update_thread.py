"""The update thread: changes parameters one action at a time, and never where a signal handler could see half of one.

A signal handler runs on the main thread, in the middle of whatever that thread does, and may read parameters. An
interrupt ends whatever the main thread is doing, at any point. So the main thread changes no parameters itself: another
thread does it, and the main thread only waits. Then

- a handler that reads a parameter waits behind the action that is running, and sees all of it;
- an interrupt ends the wait and nothing else: the action goes on, and the next wait gets its result;
- two threads that read never run two actions at the same time.

Threads other than the main one run their actions themselves, under the same lock.

On a GPU an action queues work for the device, on the stream that is current for the thread that asked for it, as if
that thread ran it. Alternative considered: to let the main thread run it there, which saves a switch between threads.
But an interrupt may leave a ``with`` statement without calling ``__exit__``, and a handler that reads a parameter may
come just after the lock was taken: one leaves torch functions switched off for good, the other waits for itself.

[Note: switched off] torch switches ``__torch_function__`` off in some places where it runs Python code. A signal
handler that runs there finds it off, too: awaited parameters are not asked, and it reads old values, or half of a new
one. On the main thread of a training run that is the end of every ``record_function``, so of every
``optimizer.step()`` and of every batch of a ``DataLoader``.
"""

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any

import torch
from torch.autograd.profiler import record_function

from gradsync.base.errors import MisuseError
from gradsync.communicator.collective import add_waited, is_waiting_here, waited_here

__all__ = ["UpdateThread", "end_records_at_once"]

Action = Callable[[], None]


class UpdateThread:
    """Runs actions that change parameters on ``device``, and others that must not run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = _UpdateLock()
        self._process = os.getpid()
        self._jobs: SimpleQueue[_Job | None] | None = None

    def run(self, action: Action) -> None:
        """Run ``action``; return when it is done, or raise what it raised. Actions of one thread run in order.

        An interrupt of the main thread leaves the action running.
        """
        if os.getpid() != self._process:
            raise MisuseError(
                "this process was forked while new parameters were on their way, and they arrive in its parent only. "
                "Call optimizer.flush() before you fork"
            )
        if self._lock.owner == threading.get_ident():
            raise MisuseError(
                "a parameter was read inside of the step that updates it, by a hook or by a signal handler. Read it "
                "before or after the step; in a signal handler set a flag, and look at it after the step"
            )
        if self._is_main_here:
            self._hand_over(action)
        else:
            self._lock.run(action)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No action begins inside, but those of this thread: for reads by a thread other than the main one, which
        begins steps itself."""
        if self._is_main_here or threading.get_ident() in (self._lock.owner, self._lock.pauser):
            yield
        else:
            with self._lock.paused():
                yield

    @property
    def _is_main_here(self) -> bool:
        """Whether this is the main thread, whose actions are run by another one."""
        return threading.current_thread() is threading.main_thread()

    def _hand_over(self, action: Action) -> None:
        if is_waiting_here():
            raise MisuseError(
                "a signal handler has read a parameter that is on its way, while the main thread is in a collective "
                "that may have to end first. Set a flag in the handler, and read parameters when the flag is seen"
            )
        jobs = self._jobs
        if jobs is None:
            jobs = SimpleQueue()
            threading.Thread(target=_serve, args=(jobs, self._lock), name="gradsync updates", daemon=True).start()
            # Not at the end of the process, where others may still read parameters.
            weakref.finalize(self, jobs.put, None).atexit = False
            self._jobs = jobs
        job = _Job(
            action if self._device.type != "cuda" else _on_stream(torch.cuda.current_stream(self._device), action)
        )
        jobs.put(job)
        job.wait()


class _UpdateLock:
    """The lock held by the thread that changes parameters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The thread that changes parameters, and the one that keeps others from it while it reads.
        self.owner: int | None = None
        self.pauser: int | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._lock:
            self.pauser = threading.get_ident()
            try:
                yield
            finally:
                self.pauser = None

    def run(self, action: Action) -> None:
        with nullcontext() if self.pauser == threading.get_ident() else self._lock:
            self.owner = threading.get_ident()
            try:
                # The reader of a parameter may be in inference mode, or recording gradients; that must not matter.
                with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    action()
            finally:
                self.owner = None


class _Job:
    """An action and its outcome."""

    __slots__ = ("_action", "_ended", "_error", "_waited")

    def __init__(self, action: Action) -> None:
        self._action: Action | None = action
        self._error: BaseException | None = None
        self._waited = 0.0
        # Held until it has ended. Events have a lock that a signal handler could find held by its own thread.
        self._ended = threading.Lock()
        self._ended.acquire()

    def run(self, lock: _UpdateLock) -> None:
        waited = waited_here()
        try:
            assert self._action is not None
            lock.run(self._action)
        except BaseException as error:
            self._error = error
        finally:
            self._waited = waited_here() - waited
            self._action = None
            self._ended.release()

    def wait(self) -> None:
        self._ended.acquire()
        add_waited(self._waited)
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                # Its traceback refers to this frame.
                del error


def _on_stream(stream: torch.cuda.Stream, action: Action) -> Action:
    """``action`` as the thread would run it whose current stream, and device, this is."""

    def run() -> None:
        with torch.cuda.stream(stream):
            action()

    return run


def _serve(jobs: "SimpleQueue[_Job | None]", lock: _UpdateLock) -> None:
    """The thread's main loop. It holds no job while it waits, so that an unused optimizer can be freed."""
    while (job := jobs.get()) is not None:
        job.run(lock)
        del job


def end_records_at_once() -> None:
    """Make records end in a single call, during which no Python code runs, and so no signal handler.

    See [Note: switched off]. Alternative considered: to check wherever an attribute of a parameter is looked up.
    ``torch.sum(parameter)`` looks up none.
    """
    leave = record_function.__exit__
    if hasattr(leave, "_told_to_gradsync"):
        return

    @functools.wraps(leave)
    def leave_at_once(self: record_function, *raised: Any) -> None:
        ends, self.run_callbacks_on_exit = self.run_callbacks_on_exit, False
        try:
            # Everything that the original does, except the end itself.
            leave(self, *raised)
        finally:
            self.run_callbacks_on_exit = ends
        if ends:
            # The record ends with its last reference. A call that ends it would go through torch function modes, such
            # as that of torch.set_default_device(), which are Python code.
            self.record = None

    leave_at_once._told_to_gradsync = True  # type: ignore[attr-defined]
    record_function.__exit__ = leave_at_once  # type: ignore[method-assign]
