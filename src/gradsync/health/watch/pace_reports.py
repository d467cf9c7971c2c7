"""When a rank reports its windows, and what the hub makes of them.

With windows of 20 ms, a report once a second would be 50 windows late. So windows are reported as they complete, eight
at a time, in a few bytes, without the rest of a heartbeat. This costs nothing on the path of backward: the watch's
thread checks about as often as windows complete, within limits, and collects what is there. Waking that thread is most
of the total cost, so it also checks whenever it sends a heartbeat.

The speed of links to other hosts is reported only when the hub asks: when communication has become slow, and once at
the beginning if most of a window is spent waiting for it.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple
from typing import Any

from gradsync.health.watch.links import LinkMeter, Sent, find_slow_link, read_sent
from gradsync.health.watch.messages import Member, slow_communication, slow_link, straggler_text
from gradsync.health.watch.pace_meter import Pace, read_pace
from gradsync.health.watch.protocol import HUB
from gradsync.health.watch.status import Sampler
from gradsync.health.watch.stragglers import CommunicationDetector, Round, StragglerDetector

__all__ = ["PaceDetector", "Pacing", "Rounds"]

LOGGER = logging.getLogger("gradsync")

Message = dict[str, Any]

# With the ten of a first look that is less than 20.
WINDOWS_AT_A_TIME = 8
SHORTEST_SECONDS, LONGEST_SECONDS = 0.05, 1.0
# What the hub receives in a second, from all ranks together.
MOST_REPORTS = 500
# Windows that some rank has not reported yet. A rank that is further behind no longer reports older ones.
MOST_OPEN = 256


class Rounds:
    """Collects the reports of ``members`` ranks into rounds."""

    def __init__(self, members: int) -> None:
        self.members = set(range(members))
        self._model = 0
        self._open: dict[int, dict[int, tuple[float, float]]] = {}
        self._done = 0

    def add(self, member: int, pace: Pace) -> Iterator[Round]:
        """Add a report, and return the windows that all ranks have reported now, in their order."""
        if not pace.own or pace.model < self._model or member not in self.members:
            return
        if pace.model > self._model:
            # The first model is gone: all ranks come to the next one.
            self._model, self._open, self._done = pace.model, {}, 0
        first = pace.last - len(pace.own) + 1
        for window, times in enumerate(zip(pace.own, pace.waited, strict=True), first):
            if window <= self._done:
                continue
            reports = self._open.setdefault(window, {})
            reports[member] = times
            if len(reports) == len(self.members):
                yield self._close(window)
        while len(self._open) > MOST_OPEN:
            del self._open[min(self._open)]

    def forget(self, member: int) -> None:
        """Forget a rank that will report no more windows."""
        self.members.discard(member)
        self._open = {}

    def _close(self, window: int) -> Round:
        reports = self._open.pop(window)
        self._done = window
        for missed in [number for number in self._open if number < window]:
            del self._open[missed]
        worked = {member: times for member, times in sorted(reports.items()) if times[0] > 0}
        return Round(
            model=self._model,
            window=window,
            own={member: own for member, (own, _) in worked.items()},
            waited={member: waited for member, (_, waited) in worked.items()},
            is_whole=len(worked) == len(self.members),
        )


class PaceDetector:
    """The hub's evaluation of what ranks report about their pace and their links."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._has_hosts = len({each.host for each in members}) > 1
        self._rounds = Rounds(len(members))
        self._stragglers, self._communication = StragglerDetector(), CommunicationDetector()
        self._links: dict[int, list[Sent]] = {}
        self._has_looked = False
        # Whether all ranks should measure their links now.
        self.asks_for_links = False

    def add(self, member: int, pace: Pace, now: float, *, models: int = 1) -> list[str]:
        """Add a report, and return the warnings that follow from it, where that many models are trained."""
        # Inside a host communication uses its cores. And where ranks synchronize twice in a window, one may wait for
        # the other before the first model and the other for the one before the second: what both wait is not
        # communication.
        knows_communication = self._has_hosts and models == 1
        windows = list(self._rounds.add(member, pace))
        if not windows:
            return []
        for window in windows:
            self._stragglers.add(window)
            if knows_communication:
                self._communication.add(window)
        slowdown = self._communication.warning(now) if knows_communication else None
        excused = self._communication.rise if knows_communication else 0.0
        warnings = [straggler_text(self._members, each) for each in self._stragglers.warnings(now, excused=excused)]
        if knows_communication:
            self._ask(became_slow=slowdown is not None and not slowdown.is_over)
        return warnings if slowdown is None else [*warnings, slow_communication(slowdown)]

    def _ask(self, *, became_slow: bool) -> None:
        begins = not self._has_looked and self._communication.is_much is not None
        self._has_looked = self._has_looked or begins
        if became_slow or (begins and self._communication.is_much):
            self.asks_for_links = True
            self._links = {}

    def add_links(self, member: int, sent: list[Sent]) -> list[str]:
        """Add what a rank has sent over its links, and return the warnings once all ranks have answered."""
        self._links[member] = sent
        if self._links.keys() != self._rounds.members:
            return []
        links, self._links = self._links, {}
        hosts = {each.source: self._members[number].host for number, sent in links.items() for each in sent}
        # Ranks report both ends of what they send each other. What else they send somewhere is not waited for.
        between = [each for sent in links.values() for each in sent if each.target in hosts]
        found = find_slow_link(between, hosts)
        return [] if found is None else [slow_link(found)]

    def forget(self, member: int) -> None:
        self._rounds.forget(member)
        self._links.pop(member, None)


class Pacing:
    """A rank's part in pacing, on the watch's thread.

    Knowing who is slow is useful, knowing who is lost is essential: an error in here ends only this part.
    """

    def __init__(
        self,
        members: Sequence[Member],
        me: int,
        sampler: Sampler,
        *,
        send: Callable[[Message], None],
        warn: Callable[[str], None],
    ) -> None:
        """``send`` reaches the hub, or from the hub all others; ``warn`` is for people."""
        self._me, self._sampler, self._send, self._warn = me, sampler, send, warn
        self._detector, self._links = PaceDetector(members), LinkMeter()
        self._shortest = max(SHORTEST_SECONDS, len(members) / MOST_REPORTS)
        # The model, and its last window that was reported.
        self._reported = (0, 0)
        # When :meth:`tick` is to be called next.
        self.next = 0.0
        self._has_failed = False

    def tick(self, now: float) -> None:
        """Report the windows that are new."""
        self._unless_failed(self._tick, now)

    def take(self, number: int, message: Message, now: float) -> None:
        """Take what a rank reports to the hub, or what the hub asks for."""
        self._unless_failed(self._take, number, message, now)

    def forget(self, member: int) -> None:
        """Forget a rank that will report nothing more."""
        self._unless_failed(self._detector.forget, member)

    def _unless_failed(self, action: Callable[..., None], *arguments: Any) -> None:
        if self._has_failed:
            return
        try:
            action(*arguments)
        except Exception:
            self._has_failed, self.next = True, math.inf
            LOGGER.exception(
                "slow ranks are not looked for any more, by an error of gradsync; lost ones still are. Please report it"
            )

    def _tick(self, now: float) -> None:
        number, meter = self._sampler.meter or (0, None)
        seconds = LONGEST_SECONDS if meter is None else WINDOWS_AT_A_TIME * meter.seconds
        self.next = now + max(self._shortest, min(LONGEST_SECONDS, seconds))
        if meter is not None and self._reported != (number, meter.count):
            pace = meter.since(self._reported[1] if self._reported[0] == number else 0, model=number)
            if pace.own:
                self._reported = number, pace.last
                self._pass_on({"pace": asdict(pace)}, now)
        sent = self._links.result(self._windows, now)
        if sent is not None:
            self._pass_on({"links": [astuple(each) for each in sent]}, now)

    @property
    def _windows(self) -> int:
        meter = self._sampler.meter
        return 0 if meter is None else meter[1].count

    def _pass_on(self, message: Message, now: float) -> None:
        if self._me == HUB:
            self._take(HUB, message, now)
        else:
            self._send(message)

    def _take(self, number: int, message: Message, now: float) -> None:
        if self._me != HUB:
            if number == HUB and "measure links" in message:
                self._links.begin(self._windows, now)
            return
        warnings = []
        if "pace" in message:
            models = len(self._sampler.models)
            warnings += self._detector.add(number, read_pace(message["pace"]), now, models=models)
        if "links" in message:
            warnings += self._detector.add_links(number, read_sent(message["links"]))
        for each in warnings:
            self._warn(each)
        if self._detector.asks_for_links:
            self._detector.asks_for_links = False
            self._send({"measure links": True})
            self._links.begin(self._windows, now)
