"""The simulated machine: an event loop, cores that compute, and a link that runs collectives.

A collective begins when all ranks have joined it and the link has a slot for it. Each of its phases takes a latency,
during which the link is free for others, and then the link, in the order of arrival.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence

from gradsync.observe.plan.network import Cost

__all__ = ["Core", "EventLoop", "SharedLink", "Transfer"]

Action = Callable[[], None]


class EventLoop:
    """Simulated events in order of time; at the same moment, in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._planned: list[tuple[float, int, Action]] = []

    def at(self, moment: float, action: Action) -> None:
        heapq.heappush(self._planned, (max(moment, self.now), next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def run(self) -> None:
        """Run events until nothing is left to happen."""
        while self._planned:
            self.now, _, action = heapq.heappop(self._planned)
            action()


class Transfer:
    """One collective, or several in a row for one bucket: joined by each rank, then in flight, then done.

    ``phases`` are seconds in which nobody uses the link, and then the cost of what goes through it; ``after`` are
    seconds after the last of them.
    """

    def __init__(self, ranks: int, phases: Sequence[tuple[float, Cost]], after: float = 0.0) -> None:
        self.phases, self.after = phases, after
        self.missing = ranks
        self.began_at = self.done_at = math.nan
        self._waiting: list[Action] = []

    def when_done(self, then: Action) -> None:
        if math.isnan(self.done_at):
            self._waiting.append(then)
        else:
            then()

    def finish(self, now: float) -> None:
        self.done_at = now
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()


class SharedLink:
    """Transfers begin in the order in which all ranks have joined them, ``in_flight`` of them at a time.

    Bytes go first come, first served. What the link did not use of its ``burst`` it saves up.
    """

    def __init__(self, loop: EventLoop, *, burst: float, in_flight: int) -> None:
        self._loop, self._burst, self._in_flight = loop, burst, in_flight
        self._saved, self._saved_at = burst, 0.0
        self._free_at = 0.0
        self._queue: deque[Transfer] = deque()
        self._under_way, self._active_since = 0, 0.0
        # When at least one transfer was under way.
        self.active: list[tuple[float, float]] = []
        # How many transfers have bytes on the link, and which cores are told when it becomes busy or free.
        self._users = 0
        self._watchers: list[Callable[[bool], None]] = []

    @property
    def is_busy(self) -> bool:
        return self._users > 0

    def watch(self, watcher: Callable[[bool], None]) -> None:
        """Call ``watcher`` when the link becomes busy or free."""
        self._watchers.append(watcher)

    def join(self, transfer: Transfer) -> None:
        """Note that a rank has started the transfer."""
        transfer.missing -= 1
        if not transfer.missing:
            self._queue.append(transfer)
            self._admit()

    def _admit(self) -> None:
        while self._queue and self._under_way < self._in_flight:
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
        before, cost = transfer.phases[number]
        self._loop.after(before + cost.latency, lambda: self._send(cost, lambda: self._run(transfer, number + 1)))

    def _send(self, cost: Cost, then: Action) -> None:
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

    def _end(self, transfer: Transfer) -> None:
        self._under_way -= 1
        if not self._under_way and self._loop.now > self._active_since:
            self.active.append((self._active_since, self._loop.now))
        transfer.finish(self._loop.now)
        self._admit()


class Core:
    """The core of a rank: computes at full speed, or at ``slowed`` while communication takes its part."""

    def __init__(self, loop: EventLoop, link: SharedLink, slowed: float) -> None:
        self._loop, self._link, self._slowed = loop, link, slowed
        self._left, self._since, self._version = 0.0, 0.0, 0
        self._then: Action | None = None
        if slowed < 1:
            link.watch(self._pace_changes)

    def compute(self, seconds: float, then: Action) -> None:
        """Compute: call ``then`` after that much work."""
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
