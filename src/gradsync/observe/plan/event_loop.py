"""The simulated machine: an event loop, cores that compute, and a wire that runs collectives one after another.

A collective is in flight when all ranks have joined it and the wire has a slot for it. Each of its phases takes a
latency, during which the link is free for others, and then the link, in the order of arrival.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradsync.observe.plan.network import Cost

__all__ = ["Core", "EventLoop", "SharedLink", "Traffic", "Transfer", "TransferPhase"]


class EventLoop:
    """Simulated events in order of time; at the same moment, in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._planned: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, moment: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._planned, (max(moment, self.now), next(self._numbers), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._planned:
            self.now, _, action = heapq.heappop(self._planned)
            action()


class Core:
    """The core of a rank: computes at full speed, or at ``slowed`` while communication takes its part."""

    def __init__(self, loop: EventLoop, link: "SharedLink", slowed: float) -> None:
        self._loop, self._link, self._slowed = loop, link, slowed
        self._left, self._since, self._version = 0.0, 0.0, 0
        self._then: Callable[[], None] | None = None
        if slowed < 1:
            link.watch(self._pace_changes)

    def compute(self, seconds: float, then: Callable[[], None]) -> None:
        """Call ``then`` after so much work."""
        if self._slowed == 1:
            self._loop.after(seconds, then)
            return
        self._left, self._since, self._then = seconds, self._loop.now, then
        self._plan(self._link.is_busy)

    def _plan(self, busy: bool) -> None:
        self._version += 1
        version = self._version
        self._loop.after(self._left / (self._slowed if busy else 1.0), lambda: self._end(version))

    def _pace_changes(self, busy: bool) -> None:
        if self._then is not None:
            # Until now it was the other way round.
            pace = 1.0 if busy else self._slowed
            self._left = max(0.0, self._left - (self._loop.now - self._since) * pace)
            self._since = self._loop.now
            self._plan(busy)

    def _end(self, version: int) -> None:
        then = self._then
        if version == self._version and then is not None:
            self._then = None
            then()


class SharedLink:
    """Bytes, first come, first served. What it did not use of its ``burst`` it saves up."""

    def __init__(self, loop: EventLoop, burst: float) -> None:
        self._loop, self._burst = loop, burst
        self._saved, self._saved_at = burst, 0.0
        self._free_at = 0.0
        self._users = 0
        self._watchers: list[Callable[[bool], None]] = []

    @property
    def is_busy(self) -> bool:
        return self._users > 0

    def watch(self, watcher: Callable[[bool], None]) -> None:
        """Have it told when the link becomes busy or free."""
        self._watchers.append(watcher)

    def send(self, cost: Cost, then: Callable[[], None]) -> None:
        """Call ``then`` when the bytes have gone through."""
        begin = max(self._loop.now, self._free_at)
        saved = self._saved
        if self._burst:
            saved = min(self._burst, saved + (begin - self._saved_at) * cost.bandwidth)
        seconds = max(0.0, cost.nbytes - saved) / cost.bandwidth
        self._saved, self._saved_at = max(0.0, saved - cost.nbytes), begin + seconds
        self._free_at = begin + seconds
        if self._watchers and seconds > 0:
            self._loop.at(begin, lambda: self._use(1))
            self._loop.at(self._free_at, lambda: self._use(-1))
        self._loop.at(self._free_at, then)

    def _use(self, change: int) -> None:
        before = self.is_busy
        self._users += change
        if self.is_busy is not before:
            for watcher in self._watchers:
                watcher(self.is_busy)


@dataclass(frozen=True, kw_only=True)
class TransferPhase:
    """Seconds in which nobody uses the link, then what goes through it."""

    before: float
    cost: Cost


class Transfer:
    """One collective, or several in a row for one bucket: joined by each rank, then in flight, then done."""

    def __init__(self, ranks: int, phases: Sequence[TransferPhase], after: float = 0.0) -> None:
        self.phases, self.after = phases, after
        self._missing = ranks
        self._waiting: list[Callable[[], None]] = []
        self.began_at: float | None = None
        self.done_at: float | None = None

    def join(self) -> bool:
        """One rank more; True if it was the last one."""
        self._missing -= 1
        return self._missing == 0

    def when_done(self, then: Callable[[], None]) -> None:
        if self.done_at is not None:
            then()
        else:
            self._waiting.append(then)

    def finish(self, now: float) -> None:
        self.done_at = now
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()


class Traffic:
    """The wire: transfers begin in the order in which they were complete, ``in_flight`` of them at a time."""

    def __init__(self, loop: EventLoop, link: SharedLink, in_flight: int) -> None:
        self._loop, self._link = loop, link
        self._places = in_flight
        self._queue: deque[Transfer] = deque()
        # When at least one transfer was under way.
        self.active: list[tuple[float, float]] = []
        self._under_way, self._active_since = 0, 0.0

    def join(self, transfer: Transfer) -> None:
        """A rank has started it."""
        if transfer.join():
            self._queue.append(transfer)
            self._admit()

    def _admit(self) -> None:
        while self._queue and self._places:
            self._places -= 1
            transfer = self._queue.popleft()
            transfer.began_at = self._loop.now
            if not self._under_way:
                self._active_since = self._loop.now
            self._under_way += 1
            self._run(transfer, 0)

    def _run(self, transfer: Transfer, number: int) -> None:
        if number == len(transfer.phases):
            self._loop.after(transfer.after, lambda: self._end(transfer))
            return
        phase = transfer.phases[number]

        def send() -> None:
            self._link.send(phase.cost, lambda: self._run(transfer, number + 1))

        self._loop.after(phase.before + phase.cost.latency, send)

    def _end(self, transfer: Transfer) -> None:
        self._places += 1
        self._under_way -= 1
        if not self._under_way and self._loop.now > self._active_since:
            self.active.append((self._active_since, self._loop.now))
        transfer.finish(self._loop.now)
        self._admit()
