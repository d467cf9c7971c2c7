"""A queue and a thread for the collectives that gradsync runs itself, one after another, in the order of their start.

The thread runs them while backward continues. A thread that waits for a collective does not wait for the queue's thread
to wake up: it runs the rest of the queue itself. So a collective that is waited for at once costs no thread switch.

Stages of :meth:`Handle.then` run here, too. A collective that a running stage starts is not appended to the queue,
which would put it behind everything started in the meantime: it runs immediately.

[Note: lazy collectives] A small collective costs less than waking a thread for it, so it is left to the thread that
waits for it, nearly always a moment later. But the caller may first synchronize with the others elsewhere (a barrier,
another communicator), while they are waiting in this one. So one thread, the sweeper, checks all queues with such
collectives now and then, and wakes those whose first collective it has seen before. A thread about to sleep in one
collective hands the others over at once (:func:`flush_lazy`), since its peers may be waiting for those. Setting and
cancelling a timer for each of them would cost a tenth of the time that the smallest ones take.
"""

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import torch

from gradsync.base.errors import MisuseError
from gradsync.communicator.logs import LOGGER
from gradsync.communicator.timer import make_timer

__all__ = ["Background", "GivenUpError", "Numbering", "Task", "call_back", "flush_lazy"]

# Between two looks: rare enough not to show where collectives are waited for at once.
SWEEP_SECONDS = 2e-3


class _Sweeper:
    """Wakes queues with lazy collectives that nobody has run. See [Note: lazy collectives]."""

    def __init__(self) -> None:
        self._queues: weakref.WeakKeyDictionary[_Queue, object | None] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._has_work = threading.Event()
        self._thread: threading.Thread | None = None

    def look_after(self, queue: "_Queue") -> None:
        if not self._lock.acquire(timeout=SWEEP_SECONDS):
            # See flush_lazy().
            queue.wake()
            return
        try:
            queue.is_looked_after = True
            self._queues[queue] = None
            if self._thread is None:
                thread = threading.Thread(target=self._sweep, name="gradsync sweeper", daemon=True)
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
        if self._lock.acquire(timeout=SWEEP_SECONDS):
            try:
                for queue in self._queues:
                    if queue.first() is not None:
                        queue.wake()
            finally:
                self._lock.release()

    def _sweep(self) -> None:
        while True:
            self._has_work.wait()
            time.sleep(SWEEP_SECONDS)
            self._look_at_all()

    def _look_at_all(self) -> None:
        # In a separate call: a sleeping thread must hold no queue, which would outlive its communicator.
        with self._lock:
            for queue, seen in list(self._queues.items()):
                self._look(queue, seen)
            if not self._queues:
                self._has_work.clear()

    def _look(self, queue: "_Queue", seen: object | None) -> None:
        first = queue.first()
        if first is not None and first is seen:
            queue.wake()
        elif first is None:
            # In this order: a thread that adds something looks at the flag after adding it.
            queue.is_looked_after = False
            first = queue.first()
            if first is None:
                del self._queues[queue]
                return
            queue.is_looked_after = True
        self._queues[queue] = first


_sweeper = _Sweeper()


def _restart_sweeper() -> None:
    """Start with a new sweeper in a forked child, which has none of its parent's threads."""
    global _sweeper
    _sweeper = _Sweeper()


os.register_at_fork(after_in_child=_restart_sweeper)


def flush_lazy() -> None:
    """Run the lazy collectives that others have started, before this thread sleeps in a collective."""
    if _sweeper._queues:
        _sweeper.flush_lazy()


# Seconds before the thread begins: more than it takes to get from the start of a collective to the wait for it.
HEAD_START = 100e-6
# How often a thread that waits for another thread's collective checks whether it has been given up.
LOOK_SECONDS = 0.5


class GivenUpError(Exception):
    """The queue was given up while a thread waited for a collective that another thread is stuck in."""


def call_back(callback: Callable[[], None]) -> None:
    """Call ``callback``, and only log its errors: they are not the collective's, and must not end the thread."""
    try:
        callback()
    except Exception:
        LOGGER.exception("a callback of when_done() failed")


class Numbering:
    """A counter that gives each collective its place in the order: one per communicator, and one per stage."""

    __slots__ = ("count", "name")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.count = 0

    def next(self) -> int | str:
        self.count += 1
        return f"{self.name}.{self.count}" if self.name else self.count


class Task:
    """A piece of work and its outcome."""

    __slots__ = ("_callbacks", "_error", "_hurries", "_queue", "ended", "place", "run")

    def __init__(self, queue: "_Queue", run: Callable[[], None], place: Numbering | None) -> None:
        self._queue = queue
        self.run: Callable[[], None] | None = run
        self.place = place
        self.ended = False
        self._hurries = False
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        if not self.ended and not self._hurries:
            # Somebody asks and does not wait: a lazy task must complete without a waiter.
            self._hurries = True
            self._queue.wake()
        return self.ended

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when it has ended, on the thread that ran it, or now if it has.

        A lazy task stays lazy: an observer must not change what it observes.
        """
        self._callbacks.append(callback)
        if self.ended:
            self._call_back()

    def wait(self) -> None:
        if not self.ended:
            self._queue.run_until(self)
        error = self._error
        if error is not None:
            if not isinstance(error, Exception):
                # An interrupt is raised once. The next wait raises what it has broken.
                self._error = GivenUpError()
            raise error

    def run_now(self) -> None:
        assert self.run is not None
        # Whether gradients are recorded is a thread's own setting. torch.no_grad() takes longer than all else here.
        recording = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            self.run()
        except BaseException as error:
            self._error = error
        finally:
            torch._C._set_grad_enabled(recording)
            # Tensors of the collective live on in their owners, not here.
            self.run = None
            self.ended = True
            self._call_back()

    def _call_back(self) -> None:
        while self._callbacks:
            with contextlib.suppress(IndexError):  # the other thread took it
                callback = self._callbacks.pop()
                call_back(callback)


class _Queue:
    """The thread's view of the queue. It holds no reference to the communicator, so that an unused one can be freed."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        # Held by the thread that runs a collective: never two at a time, never out of order.
        self._turn = threading.Lock()
        self._timer = make_timer()
        self._closed = False
        self._running = False
        self._stage_thread: int | None = None
        self._stage_numbering: Numbering | None = None
        self.given_up = False
        # Kept by the sweeper.
        self.is_looked_after = False

    @property
    def busy(self) -> bool:
        return bool(self._tasks) or self._running

    def place(self) -> Numbering | None:
        """The numbering of the stage that calls, if a stage does."""
        if self._stage_thread is not None and self._stage_thread == threading.get_ident():
            return self._stage_numbering
        return None

    def add(self, run: Callable[[], None], place: Numbering | None, *, lazy: bool) -> Task:
        task = Task(self, run, place)
        if self._stage_thread is not None and self.place() is not None:
            task.run_now()
            return task
        self._tasks.append(task)
        if not lazy:
            self._timer.set(HEAD_START)
        elif not self.is_looked_after:
            _sweeper.look_after(self)
        return task

    def first(self) -> Task | None:
        """The task that comes next; None if somebody is at work here, who takes it along."""
        if self._running:
            return None
        try:
            return self._tasks[0]
        except IndexError:
            return None

    def wake(self) -> None:
        self._timer.set(HEAD_START)

    def close(self) -> None:
        self._closed = True
        self._timer.set(0.0)

    def run_until(self, task: Task) -> None:
        if self.place() is not None:
            raise MisuseError(
                "a stage waits for a collective that was started after the stage, and so comes after it: each would "
                "wait for the other. Start it before, or chain it to the stage with then()"
            )
        # First, so that the timer of tasks added in the meantime stays set.
        self._timer.cancel()
        if self._closed:
            # That timer was not for this.
            self._timer.set(0.0)
        try:
            while not task.ended:
                self._take_turn(task)
        finally:
            if self._tasks:
                self._timer.set(HEAD_START)

    def _take_turn(self, task: Task) -> None:
        if self._turn.acquire(timeout=LOOK_SECONDS):
            try:
                if not task.ended:
                    self._run_next()
            finally:
                self._turn.release()
        elif self.given_up:
            raise GivenUpError

    def serve(self) -> None:
        """Run tasks until the queue is closed: what the thread does all its life."""
        while True:
            self._timer.wait()
            if self._closed:
                return
            # A thread that waits for one may have run it already. Lazy tasks run along with it.
            while self._tasks:
                with self._turn:
                    if self._tasks:
                        self._run_next()

    def _run_next(self) -> None:
        # Before it leaves the queue: at no time does an unfinished one look finished.
        self._running = True
        task = self._tasks.popleft()
        try:
            if task.place is not None:
                self._stage_numbering, self._stage_thread = task.place, threading.get_ident()
            task.run_now()
        finally:
            self._stage_thread = self._stage_numbering = None
            self._running = False


class Background:
    """A queue of collectives and its worker thread, which starts with the first collective.

    Without a thread, a collective runs when it, or a later one, is waited for.
    """

    def __init__(self, name: str, *, has_thread: bool = True) -> None:
        self._name, self._has_thread = name, has_thread
        self._queue = _Queue()
        self._thread: threading.Thread | None = None
        # The finalizer must not hold this object.
        weakref.finalize(self, _Queue.close, self._queue)

    def start(self, run: Callable[[], None], *, place: Numbering | None = None, lazy: bool = False) -> Task:
        """Call ``run`` after everything that was started before it; the task's ``wait`` raises what it raised.

        A ``lazy`` task does not wake the thread: it runs with what is started after it, when it is waited for, or after
        a while. That suits a small message, which costs less than the wake-up. With a ``place`` it is a stage: what it
        starts here runs at once.
        """
        if self._thread is None:
            self.begin()
        return self._queue.add(run, place, lazy=lazy)

    @property
    def busy(self) -> bool:
        """Whether any task has not been completed."""
        return self._queue.busy

    def place(self) -> Numbering | None:
        """The numbering of the running stage, if it is the one that asks."""
        return self._queue.place()

    def give_up(self) -> None:
        """Stop waiting for a task that another thread is stuck in."""
        self._queue.given_up = True

    def close(self, seconds: float | None = None) -> None:
        """Stop after the current collective, waiting no longer than that. Those not started then only run if somebody
        waits for them."""
        self._queue.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def begin(self) -> None:
        """Start the thread, which else comes with the first collective."""
        if not self._has_thread:
            return
        thread = threading.Thread(target=self._queue.serve, name=self._name, daemon=True)
        thread.start()
        self._thread = thread
