"""What is in flight on a transport, its first failure, and which rank failed first.

Other threads read it, without ever waiting for a lock.

On an accelerator nobody waits in a handle: the stream does, and the host only blocks much later, in
``torch.cuda.synchronize()`` or ``.item()``. To tell which collective a rank is stuck in, started collectives are
listed here until they complete. The training thread only appends. Another thread, the watch, asks for the oldest.

Completion is read from the future that torch's own NCCL watchdog completes (``Work.get_future_result``):

- it holds no tensors, so listing it here keeps nothing in memory;
- reading it is not a CUDA call, which would break a graph that another thread is capturing.

Work that failed has a result as well. It counts as outstanding: its kernels hang until something aborts them.

[Note: root cause] A rank that fails disconnects its peers, which fail and disconnect theirs in turn: a rank that sees a
connection close does not know where the failure began. So the first rank that fails leaves a message in the rendezvous
store before it closes anything, and the others find it there. Nobody waits for a store that does not answer. The store
may outlive its groups: when a group is created again, messages of earlier ones are deleted.
"""

import itertools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradsync.base.errors import GradsyncError

__all__ = [
    "BEFORE",
    "FailureDomain",
    "Outstanding",
    "PendingWait",
    "StartedCollective",
    "TransportState",
    "clear_root_cause",
    "find_root_cause",
]

SUCCESS = 0
# Looking for the oldest removes those that have ended. From this many on, appending does, in case nobody looks.
MOST_LISTED = 4096


class StartedCollective(NamedTuple):
    """The ``place``-th collective of a communicator, with its start time on the monotonic clock.

    It is created on the path of backward, so it is only described when somebody asks.
    """

    # A future, whose value is SUCCESS if the work succeeded.
    outcome: Any
    place: int
    started_at: float
    number: int | str
    kind: str
    detail: str
    numel: int
    dtype: Any

    def describe(self) -> str:
        """Describe it in the words of :meth:`gradsync.communicator.Handle.describe`."""
        what = f"{self.kind} {self.detail}".rstrip()
        return f"collective {self.number} ({what} of {self.numel} × {self.dtype})"

    @property
    def has_ended(self) -> bool:
        """Whether the device has finished it."""
        return bool(self.outcome.done() and self.outcome.value() == SUCCESS)

    @property
    def has_failed(self) -> bool:
        """Whether the backend has given it up, by an error or by its own timeout."""
        return bool(self.outcome.done() and self.outcome.value() != SUCCESS)


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


class PendingWait(NamedTuple):
    """A collective that a thread waits for, or the device: the ``place``-th of its communicator, since when."""

    place: int
    since: float
    describe: Callable[[], str]
    on_device: bool = False
    has_failed: bool = False


class TransportState:
    """The first failure of a transport, and what is in flight on it. Communicators over the same transport share one.

    Other threads read it while collectives run, without ever waiting for a lock.
    """

    __slots__ = (
        "_flag",
        "_places",
        "complete_message",
        "device_timeout",
        "failure",
        "lost_after",
        "lost_rank",
        "outstanding",
        "report_given_up",
        "started",
        "waits",
    )

    def __init__(self) -> None:
        self.failure: GradsyncError | None = None
        self._flag: torch.Tensor | None = None
        # The message of a rank that was lost, and the last place that it may have taken part in.
        self.lost_rank: str | None = None
        self.lost_after = 0
        # How many collectives were started, and those (:class:`Collective`) that a thread waits for, since when.
        self._places = itertools.count(1)
        self.started = 0
        self.waits: dict[Any, float] = {}
        # Those that a device is at, where there is a watch and the backend reports them. Else None.
        self.outstanding: Outstanding | None = None
        self.device_timeout = math.inf
        # May know more about the other ranks than the communicator does: it gets a failure message, and completes it.
        self.complete_message: Callable[[str], str] | None = None
        # Reports to the other ranks that this one has given the communicator up, with a message: no device tells them.
        self.report_given_up: Callable[[str], None] | None = None

    def next_place(self) -> int:
        self.started = place = next(self._places)
        return place

    def fail(self, failure: GradsyncError) -> None:
        """Keep the first failure."""
        if self.failure is None:
            self.failure = failure
        if self._flag is not None:
            self._flag.fill_(1.0)

    def pending_waits(self) -> list[PendingWait]:
        # The copy is atomic, whatever other threads do to the dictionary.
        waits = [PendingWait(each.place, since, each.describe) for each, since in self.waits.copy().items()]
        oldest = None if self.outstanding is None else self.outstanding.oldest()
        if oldest is not None:
            first, since = oldest
            waits.append(PendingWait(first.place, since, first.describe, on_device=True, has_failed=first.has_failed))
        return waits

    @property
    def flag(self) -> torch.Tensor:
        """A number in host memory that devices can read: 1.0 once there is a failure, and before anything is aborted.

        So a copy to the device that is queued behind a collective tells whether the collective was aborted.
        """
        if self._flag is None:
            self._flag = torch.zeros((), pin_memory=torch.cuda.is_available())
            if self.failure is not None:
                self._flag.fill_(1.0)
        return self._flag


# -- the rank that failed first: see [Note: root cause] ---------------------------------------------------------------

# How much longer a failure may take for it. A store answers in less than a thousandth of that, if it does.
STORE_SECONDS = 0.5
FAILED_KEY = "gradsync/failed"
# Between a rank's own message and that of the first rank to fail.
BEFORE = ". Before that, "


class FailureDomain:
    """The groups of one communicator, which was created over ``group``: if one of them fails, all do."""

    def __init__(self, group: Any) -> None:
        self.group = group
        # Made on all ranks alike, so that it has the same number everywhere.
        _made[group] = self.number = _made.get(group, 0) + 1
        _delete(group, self.key)

    @property
    def key(self) -> str:
        return f"{FAILED_KEY}/{self.number}"

    def add(self, group: Any) -> None:
        _failure_domains[group] = self


_made: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
_failure_domains: "weakref.WeakKeyDictionary[Any, FailureDomain]" = weakref.WeakKeyDictionary()
# Groups whose store has not answered: with one whose rank is stopped, each question would cost the whole patience.
_unanswered: "weakref.WeakSet[Any]" = weakref.WeakSet()


def find_root_cause(group: Any, message: str) -> str:
    """The ``message``, followed by that of the first rank of ``group`` that failed, unless this is the first."""
    domain = _failure_domains.get(group)
    root, key = (group, FAILED_KEY) if domain is None else (domain.group, domain.key)

    def ask() -> bytes:
        answer: bytes = _store_of(root).compare_set(key, "", message)
        return answer

    answer = None if root in _unanswered else _within(STORE_SECONDS, ask)
    if answer is None:
        _unanswered.add(root)
    first = (answer or b"").decode(errors="replace")
    return message if first in ("", message) or first in message else f"{message}{BEFORE}{first}"


def clear_root_cause(group: Any) -> None:
    """Delete messages of earlier groups, when the first communicator over ``group`` is created."""
    if group not in _failure_domains:
        _delete(group, FAILED_KEY)


def _delete(group: Any, key: str) -> None:
    """Delete the message under ``key``, on rank 0 only.

    One rank is enough: the others cannot get far enough to fail before rank 0 has been here.
    """

    def ask() -> bytes:
        _store_of(group).delete_key(key)
        return b""

    if dist.get_rank(group) == 0 and dist.get_world_size(group) > 1:
        _within(STORE_SECONDS, ask)


def _store_of(group: Any) -> Any:
    return dist.distributed_c10d._get_process_group_store(group)


def _within(seconds: float, ask: Callable[[], bytes]) -> bytes | None:
    answers: list[bytes] = []

    def run() -> None:
        # Whatever is wrong with the store: the failure is another one.
        try:
            answers.append(ask())
        except Exception:
            return

    try:
        thread = threading.Thread(target=run, name="gradsync root cause", daemon=True)
        thread.start()
        thread.join(seconds)
    except RuntimeError:  # no thread left, or the interpreter ends
        return None
    return answers[0] if answers else None
