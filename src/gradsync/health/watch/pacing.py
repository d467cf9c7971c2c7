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
from dataclasses import asdict, astuple, dataclass
from typing import Any

from gradsync.health.watch.links import LinkMeter, Sent, find_slow_link, read_sent
from gradsync.health.watch.messages import Member, slow_link, slow_wire, straggling
from gradsync.health.watch.pace import Pace, PaceMeter, read_pace
from gradsync.health.watch.protocol import HUB
from gradsync.health.watch.rounds import Rounds
from gradsync.health.watch.stragglers import SlowWire, Stragglers

__all__ = ["PaceDetector", "PaceTeller", "Pacing", "Ways"]

LOGGER = logging.getLogger("gradsync")

Message = dict[str, Any]
Meter = tuple[int, PaceMeter]

# With the ten of a first look that is less than 20.
WINDOWS_AT_A_TIME = 8
SHORTEST_SECONDS, LONGEST_SECONDS = 0.05, 1.0
# What the hub hears in a second, of all ranks together.
MOST_TOLD = 500


class PaceTeller:
    """Reports the windows of one rank, out of ``members`` ranks."""

    def __init__(self, members: int) -> None:
        self._shortest = max(SHORTEST_SECONDS, members / MOST_TOLD)
        self._told = (0, 0)
        # When to ask it next.
        self.next = 0.0

    def tell(self, meter: Meter | None, now: float) -> Pace | None:
        """The windows that are new, of the model of that number."""
        number, measured = meter or (0, None)
        seconds = LONGEST_SECONDS if measured is None else WINDOWS_AT_A_TIME * measured.seconds
        self.next = now + max(self._shortest, min(LONGEST_SECONDS, seconds))
        if measured is None or self._told == (number, measured.count):
            return None
        pace = measured.since(self._told[1] if self._told[0] == number else 0, model=number)
        if not pace.own:
            return None
        self._told = number, pace.last
        return pace


class PaceDetector:
    """The hub's evaluation of the reports."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._has_hosts = len({each.host for each in members}) > 1
        self._rounds = Rounds(len(members))
        self._stragglers, self._wire = Stragglers(), SlowWire()
        self._links: dict[int, list[Sent]] = {}
        self._has_looked = False
        # Whether all ranks should measure their links now.
        self.asks_for_links = False

    def hear(self, member: int, pace: Pace, now: float, *, models: int = 1) -> list[str]:
        """What is to be said of it, where so many models are trained."""
        is_new = False
        # Inside a host the wire is its cores. And where ranks meet twice in a window, one may wait for the other before
        # the first model and the other for the one before the second: what both wait is not the wire's.
        knows_wire = self._has_hosts and models == 1
        for told in self._rounds.hear(member, pace):
            self._stragglers.hear(told)
            if knows_wire:
                self._wire.hear(told)
            is_new = True
        if not is_new:
            return []
        wire = self._wire.look(now) if knows_wire else None
        found = self._stragglers.look(now, excused=self._wire.rise if knows_wire else 0.0)
        said = [straggling(self._members, verdict) for verdict in found]
        if knows_wire:
            self._ask(became_slow=wire is not None and not wire.is_over)
        return said if wire is None else [*said, slow_wire(wire)]

    def _ask(self, *, became_slow: bool) -> None:
        begins = not self._has_looked and self._wire.is_much is not None
        self._has_looked = self._has_looked or begins
        if became_slow or (begins and self._wire.is_much):
            self.asks_for_links = True
            self._links = {}

    def hear_links(self, member: int, sent: list[Sent]) -> list[str]:
        """The messages to give once all ranks have answered."""
        self._links[member] = sent
        if self._links.keys() != self._rounds.members:
            return []
        links, self._links = self._links, {}
        hosts = {each.source: self._members[number].host for number, told in links.items() for each in told}
        # Both ends of what ranks send each other are told of. What else they send somewhere is not waited for.
        between = [each for told in links.values() for each in told if each.target in hosts]
        found = find_slow_link(between, hosts)
        return [] if found is None else [slow_link(found)]

    def forget(self, member: int) -> None:
        self._rounds.forget(member)
        self._links.pop(member, None)


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How a rank communicates: ``tell`` sends to the hub, or from the hub to all others; ``say`` is for people.

    Also: what measured its windows, and how many models there are.
    """

    tell: Callable[[Message], None]
    say: Callable[[str], None]
    meter: Callable[[], Meter | None]
    models: Callable[[], int]


class Pacing:
    """A rank's part in pacing, on the watch's thread.

    Knowing who is slow is useful, knowing who is lost is essential: an error in here ends only this part.
    """

    def __init__(self, members: Sequence[Member], me: int, ways: Ways) -> None:
        self._me, self._ways = me, ways
        self._teller, self._detector, self._links = PaceTeller(len(members)), PaceDetector(members), LinkMeter()
        self._has_failed = False

    @property
    def next(self) -> float:
        """When :meth:`tick` is to be called."""
        return math.inf if self._has_failed else self._teller.next

    def tick(self, now: float) -> None:
        """Tell what is new."""
        self._unless_failed(self._tick, now)

    def take(self, number: int, message: Message, now: float) -> None:
        """What a rank has told the hub, or the hub asks for."""
        self._unless_failed(self._take, number, message, now)

    def forget(self, member: int) -> None:
        """Of this one nothing more will come."""
        self._unless_failed(self._detector.forget, member)

    def _unless_failed(self, action: Callable[..., None], *arguments: Any) -> None:
        if self._has_failed:
            return
        try:
            action(*arguments)
        except Exception:
            self._has_failed = True
            LOGGER.exception(
                "slow ranks are not looked for any more, by an error of gradsync; lost ones still are. Please report it"
            )

    def _tick(self, now: float) -> None:
        meter = self._ways.meter()
        pace = self._teller.tell(meter, now)
        if pace is not None:
            self._pass_on({"pace": asdict(pace)}, now)
        sent = self._links.result(0 if meter is None else meter[1].count, now)
        if sent is not None:
            self._pass_on({"links": [astuple(each) for each in sent]}, now)

    def _pass_on(self, message: Message, now: float) -> None:
        if self._me == HUB:
            self._take(HUB, message, now)
        else:
            self._ways.tell(message)

    def _take(self, number: int, message: Message, now: float) -> None:
        if self._me != HUB:
            if number == HUB and "measure links" in message:
                self._measure(now)
            return
        for words in self._heard(number, message, now):
            self._ways.say(words)
        if self._detector.asks_for_links:
            self._detector.asks_for_links = False
            self._ways.tell({"measure links": True})
            self._measure(now)

    def _heard(self, number: int, message: Message, now: float) -> Iterator[str]:
        if "pace" in message:
            yield from self._detector.hear(number, read_pace(message["pace"]), now, models=self._ways.models())
        if "links" in message:
            yield from self._detector.hear_links(number, read_sent(message["links"]))

    def _measure(self, now: float) -> None:
        meter = self._ways.meter()
        self._links.begin(0 if meter is None else meter[1].count, now)
