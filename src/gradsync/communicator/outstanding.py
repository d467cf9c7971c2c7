"""Tracks collectives that a device has not finished yet, although the host that started them has moved on.

On an accelerator nobody waits in a handle: the stream does, and the host only blocks much later, in
``torch.cuda.synchronize()`` or ``.item()``. To tell which collective a rank is stuck in, started collectives are
listed here until they complete. The training thread only appends. Another thread, the watch, asks for the oldest.

Completion is read from the future that torch's own NCCL watchdog completes (``Work.get_future_result``):

- it holds no tensors, so listing it here keeps nothing in memory;
- reading it is not a CUDA call, which would break a graph that another thread is capturing.

Work that failed has a result as well. It counts as outstanding: its kernels hang until something aborts them.
"""

import threading
import time
from collections import deque
from typing import Any, NamedTuple, Protocol

__all__ = ["Outstanding", "StartedCollective"]

SUCCESS = 0
# Who looks for the oldest takes those out that have ended. Where nobody does, whoever appends does it from here on.
MOST_LISTED = 4096


class Outcome(Protocol):
    """The part of a future that is used here: its value is :data:`SUCCESS` if the work succeeded."""

    def done(self) -> bool: ...

    def value(self) -> Any: ...


class StartedCollective(NamedTuple):
    """The ``place``-th collective of a communicator, with its start time on the monotonic clock.

    It is created on the path of backward, so it is only described when somebody asks.
    """

    outcome: Outcome
    place: int
    started_at: float
    number: int | str
    kind: str
    detail: str
    numel: int
    dtype: Any

    def describe(self) -> str:
        """In the words of :meth:`gradsync.communicator.Handle.describe`."""
        what = f"{self.kind} {self.detail}".rstrip()
        return f"collective {self.number} ({what} of {self.numel} × {self.dtype})"

    @property
    def has_ended(self) -> bool:
        """Whether the device has finished it."""
        return self.outcome.done() and self.outcome.value() == SUCCESS

    @property
    def has_failed(self) -> bool:
        """Whether the backend has given it up, by an error or by its own timeout."""
        return self.outcome.done() and self.outcome.value() != SUCCESS


class Outstanding:
    """The outstanding collectives of one communicator, in the order they were started.

    Nothing is reported as waiting until one collective has been seen to complete. If nothing completes the futures, all
    of them would seem to hang.
    """

    __slots__ = ("_has_ended_one", "_listed", "_lock", "_since")

    def __init__(self) -> None:
        self._listed: deque[StartedCollective] = deque()
        self._lock = threading.Lock()
        self._has_ended_one = False
        # When all before the oldest were seen to have ended.
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._listed)

    def add(self, collective: StartedCollective) -> None:
        self._listed.append(collective)
        if len(self._listed) > MOST_LISTED:
            self.oldest()
            if len(self._listed) > 2 * MOST_LISTED:
                # Whatever completes these futures has stopped to do so.
                self._listed.popleft()

    def oldest(self) -> tuple[StartedCollective, float] | None:
        """The first one that has not ended, and since when the device can have been at it."""
        with self._lock:
            listed = self._listed
            while listed:
                first = listed[0]
                if not first.has_ended:
                    return (first, max(first.started_at, self._since)) if self._has_ended_one else None
                self._has_ended_one = True
                self._since = time.monotonic()
                listed.popleft()
        return None

    def overdue(self, limit: float) -> StartedCollective | None:
        """The oldest, if it was started ``limit`` seconds ago or before. Costs next to nothing while there is none."""
        try:
            first = self._listed[0]
        except IndexError:
            return None
        now = time.monotonic()
        if now - first.started_at < limit:
            return None
        oldest = self.oldest()
        return oldest[0] if oldest is not None and now - oldest[0].started_at >= limit else None
