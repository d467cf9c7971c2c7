"""Failure detector: turns what each rank reported, and when, into a verdict on it. Pure logic; time is an argument.

===========  ========================================================================  ==============================
gone         its connection closed without an exit message: killed, ``os._exit``       an error on ranks waiting for it
left         it sent an exit message: its script has ended, or raised                  an error on ranks waiting for it
silent       nothing received: stopped, cut off, or it holds the interpreter           a warning
behind       alive; others wait for it in a collective that it has not reached         a warning
at odds      it waits in a different collective than the others                        a warning
===========  ========================================================================  ==============================

The last three are never errors here: the communicator's own timeout ends them, and the watch only names the rank. A
rank that compiles for three minutes is slow, not dead.

A rank that raises, outside of backward, reports it at once. Its script may catch the error and continue, as after an
out-of-memory error, so ranks that wait for it only get a warning. The report is dropped when the rank continues.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from gradsync.health.watch.status import UNKNOWN, RankStatus, Wait

__all__ = [
    "SLOW_SECONDS",
    "Detector",
    "ExitRecord",
    "RaisedError",
    "Suspect",
    "at_odds",
    "holds_up",
    "longest",
    "roots",
]


def holds_up(status: RankStatus, communicator: int, place: int) -> bool:
    """Whether a rank with that status has yet to reach what another one waits for."""
    return not 0 <= communicator < len(status.started) or status.started[communicator] < place


def longest(status: RankStatus) -> Wait | None:
    """The wait that a rank has been in the longest."""
    return max(status.waits, key=lambda wait: wait.seconds, default=None)


def roots(statuses: Mapping[int, RankStatus], patience: float = 0.0) -> dict[int, dict[int, Wait]]:
    """The ranks that hold others up: for each rank that waits for one, in which collective.

    ``patience`` is how many seconds a wait must last to count. A rank that waits itself is held up by somebody else,
    and named only if there is nobody to name but such: each of them is in something that the others are not.
    """
    waiting = {
        rank: wait
        for rank, status in statuses.items()
        if (wait := longest(status)) is not None and wait.seconds >= patience
    }
    found: dict[int, dict[int, Wait]] = {}
    for waiter, wait in waiting.items():
        for rank, status in statuses.items():
            if rank != waiter and holds_up(status, wait.communicator, wait.place):
                found.setdefault(rank, {})[waiter] = wait
    free = {rank: waiters for rank, waiters in found.items() if not statuses[rank].waits}
    return free or found


def at_odds(statuses: Mapping[int, RankStatus], patience: float = 0.0) -> dict[int, tuple[int, Wait, Wait]]:
    """Ranks that wait in a different collective than the lowest rank at the same place: which, its own, and theirs."""
    first: dict[tuple[int, int], tuple[int, Wait]] = {}
    found = {}
    for rank in sorted(statuses):
        for wait in statuses[rank].waits:
            other, its = first.setdefault((wait.communicator, wait.place), (rank, wait))
            if _kind(its) != _kind(wait) and min(its.seconds, wait.seconds) >= patience:
                found[rank] = (other, wait, its)
    return found


def _kind(wait: Wait) -> str:
    """The kind of collective that is waited for, without its number: communicators over one group count separately."""
    return wait.what.partition("(")[2] or wait.what


# When a rank is warned about, for the first time; later each time after twice as long.
SLOW_SECONDS = 5.0
# A rank that waits less than that may as well be computing: its silence, or that of others, harms nobody yet.
WAITING_SECONDS = 1.0

Kind = Literal["silent", "behind", "at odds"]


@dataclass(frozen=True, kw_only=True)
class ExitRecord:
    """How a rank exited, in ``words``; ``at`` is the time of day.

    Its last status is the one in its exit message, if it sent one; else the last one received, ``age`` seconds before.
    """

    member: int
    left: bool
    words: str
    at: float
    status: RankStatus
    age: float = 0.0

    def strands(self, communicator: int, place: int) -> bool:
        """Whether a wait at this place never ends because of the exit. How far a killed rank had come is unknown."""
        return not self.left or holds_up(self.status, communicator, place)


@dataclass(frozen=True, kw_only=True)
class RaisedError:
    """An exception that a rank raised, in ``words``, and its status then; ``at`` is the time of day.

    ``is_reported``: in a warning.
    """

    words: str
    at: float
    status: RankStatus
    is_reported: bool = False

    def is_past(self, status: RankStatus) -> bool:
        """Whether the rank has gone on since, by where it stands now."""
        return any(now > then for now, then in zip(status.started, self.status.started, strict=False))


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A rank that has held ``waiters`` up for that many ``seconds``, in ``what``.

    ``raised`` is an error that it has reported since it last continued.
    """

    member: int
    kind: Kind
    seconds: float
    waiters: tuple[int, ...]
    what: str
    status: RankStatus
    raised: str = ""


class Detector:
    """Rank ``me``'s view of its ``peers``, which report to it: on the hub all other ranks, elsewhere only the hub.

    Only the hub ``sees_all``, and can tell which rank is behind which.
    """

    def __init__(self, me: int, peers: Collection[int], now: float, *, sees_all: bool = True) -> None:
        self.me = me
        self._sees_all = sees_all
        self.exits: dict[int, ExitRecord] = {}
        self.noticed: dict[int, float] = {}
        self.errors: dict[int, RaisedError] = {}
        self._last = dict.fromkeys(peers, now)
        self._statuses: dict[int, tuple[RankStatus, float]] = {}
        self._next_warning: dict[int, float] = {}

    def update(self, member: int, status: RankStatus, now: float) -> None:
        if member != self.me:
            self._last[member] = now
        self._statuses[member] = status, now
        if member in self.errors and self.errors[member].is_past(status):
            del self.errors[member]

    def wake(self, now: float) -> None:
        """Restart the clocks of silence after this process itself was stopped: it has heard nobody meanwhile."""
        self._last = dict.fromkeys(self._last, now)

    def end(self, exit_record: ExitRecord, now: float) -> bool:
        """Record that a rank has ended; returns whether that is news."""
        if exit_record.member in self.exits:
            return False
        self.exits[exit_record.member] = exit_record
        self.noticed[exit_record.member] = now
        self._last.pop(exit_record.member, None)
        self.errors.pop(exit_record.member, None)
        return True

    def add_error(self, member: int, error: RaisedError) -> None:
        """Record that a rank has raised, and may continue or not."""
        if member not in self.exits:
            self.errors[member] = error

    @property
    def has_unreported_errors(self) -> bool:
        return any(not error.is_reported for error in self.errors.values())

    def errors_to_report(self, now: float) -> list[tuple[int, RaisedError, Wait]]:
        """The errors of ranks that somebody waits for, each with such a wait, and each only once."""
        found = []
        for member, error in self.errors.items():
            waits = [
                wait
                for rank, status in self._now(now).items()
                for wait in status.waits
                if rank != member and holds_up(error.status, wait.communicator, wait.place)
            ]
            if waits and not error.is_reported:
                self.errors[member] = replace(error, is_reported=True)
                found.append((member, error, waits[0]))
        return found

    def forget(self, member: int) -> None:
        """Forget a rank that has no watch any more and will report nothing; that says nothing about its training."""
        self._last.pop(member, None)
        self._statuses.pop(member, None)

    def status_of(self, member: int, now: float) -> tuple[RankStatus, float]:
        """The last status received from a rank, and how many seconds ago."""
        status, at = self._statuses.get(member, (UNKNOWN, now))
        return status, now - at

    def silence_of(self, member: int, now: float) -> float:
        """For how many seconds a rank has reported nothing."""
        return now - self._last.get(member, now)

    def suspects(self, now: float) -> list[Suspect]:
        """The ranks that hold others up, or may."""
        statuses = self._now(now)
        longest_waits = {rank: wait for rank, each in statuses.items() if (wait := longest(each)) is not None}
        waiting = [rank for rank, wait in longest_waits.items() if wait.seconds >= WAITING_SECONDS]
        if not waiting:
            return []
        found = {each.member: each for each in self._silent(longest_waits, waiting, now)}
        # Of one that is silent it is not known whether it waits.
        if not found and self._sees_all:
            for each in (*self._behind(statuses), *self._at_odds(statuses)):
                found.setdefault(each.member, each)
        raised = {member: error.words for member, error in self.errors.items()}
        return [replace(each, raised=raised.get(member, "")) for member, each in sorted(found.items())]

    def due(self, now: float) -> list[Suspect]:
        """The suspects to warn about now: after 5 s, 10 s, 20 s and so on. A suspicion that passes leaves no trace."""
        suspects = self.suspects(now)
        suspected = {each.member for each in suspects}
        self._next_warning = {rank: at for rank, at in self._next_warning.items() if rank in suspected}
        due = []
        for each in suspects:
            limit = self._next_warning.get(each.member, SLOW_SECONDS)
            if each.seconds >= limit:
                due.append(each)
                while limit <= each.seconds:
                    limit *= 2
                self._next_warning[each.member] = limit
        return due

    def _now(self, now: float) -> dict[int, RankStatus]:
        """The status of each live rank, with the time since it was reported."""
        return {
            rank: _add_seconds(status, now - at)
            for rank, (status, at) in self._statuses.items()
            if rank not in self.exits
        }

    def _silent(self, longest_waits: dict[int, Wait], waiting: list[int], now: float) -> Iterator[Suspect]:
        for rank, last in self._last.items():
            waiters = tuple(each for each in waiting if each != rank)
            if now - last >= SLOW_SECONDS and waiters:
                what, status = longest_waits[waiters[0]].what, self.status_of(rank, now)[0]
                yield Suspect(member=rank, kind="silent", seconds=now - last, waiters=waiters, what=what, status=status)

    def _behind(self, statuses: dict[int, RankStatus]) -> Iterator[Suspect]:
        for rank, waits in roots(statuses, SLOW_SECONDS).items():
            wait, waiters = max(waits.values(), key=lambda each: each.seconds), tuple(sorted(waits))
            seconds, what, status = wait.seconds, wait.what, statuses[rank]
            yield Suspect(member=rank, kind="behind", seconds=seconds, waiters=waiters, what=what, status=status)

    def _at_odds(self, statuses: dict[int, RankStatus]) -> Iterator[Suspect]:
        for rank, (other, its, theirs) in at_odds(statuses, SLOW_SECONDS).items():
            seconds, what, status = min(its.seconds, theirs.seconds), theirs.what, statuses[rank]
            yield Suspect(member=rank, kind="at odds", seconds=seconds, waiters=(other,), what=what, status=status)


def _add_seconds(status: RankStatus, seconds: float) -> RankStatus:
    waits = tuple(replace(wait, seconds=wait.seconds + seconds) for wait in status.waits)
    return replace(status, waits=waits, seconds=status.seconds + seconds)
