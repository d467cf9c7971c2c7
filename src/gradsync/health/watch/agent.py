r"""One rank's part of the watch: a thread that reports this rank's status and receives the status of the others.

::

            rank 0, the hub                 every second: a heartbeat on each line, both ways
           /       |       \                a line closes: that rank is gone, and the hub informs all
       rank 1   rank 2   rank 3             the hub's line closes: rank 0 is gone, and each rank sees it

A communicator is lost only when a rank has waited on it for a while, for something that cannot arrive any more: a rank
that exits does no harm where it is not needed. The error then carries the message about the rank that exited.

On a device no handle waits on the host. When the group times out, torch's error names no rank and leaves the host
blocked in the device. So the watch ends that wait a moment earlier: the communicator is lost, and its kernels aborted.
"""

import contextlib
import logging
import math
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from gradsync.base.files import from_json_or
from gradsync.communicator import BaseCommunicator
from gradsync.communicator.transport_state import BEFORE
from gradsync.health.watch.detector import SLOW_SECONDS, Detector, ExitRecord, RaisedError, Suspect
from gradsync.health.watch.guards import Guards
from gradsync.health.watch.messages import Member, exit_text, raised_error, sort_key, suspect_text
from gradsync.health.watch.pace_reports import Pacing
from gradsync.health.watch.protocol import HUB, Line, pack
from gradsync.health.watch.status import MOST_LETTERS, UNKNOWN, RankStatus, Sampler

__all__ = ["Agent", "Plan"]

LOGGER = logging.getLogger("gradsync")

BEAT_SECONDS = 1.0
# With more ranks heartbeats are rarer, so that the hub has about as much to do per second, within limits.
MOST_BEATS = 256
LONGEST_BEAT_SECONDS = 2.0
# How often to check whether somebody waits for a rank that has ended.
LOOK_SECONDS = 0.1
# How long the message of a communicator's failure waits for what the watch learns of it.
PATIENCE_SECONDS = 0.5
# If this thread was not run for that long, the whole process was stopped.
STOPPED_SECONDS = 3.0
EXIT_SECONDS = 1.0
# How long before the timeout of the group a wait on a device is ended, at most, and as a part of it: torch, which looks
# each tenth of a second, must not come first.
EARLIER_SECONDS, EARLIER_SHARE = 1.0, 0.1
# What a process that was stopped itself has left, once it goes on, to end what it was in.
RESUMED_SECONDS = 0.5
MOST_SUSPECTS = 4
MOST_REQUESTS = 8

GONE = "has ended without a word, killed or by os._exit(),"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The ranks of a group, by group rank: which one this is, and which are on this machine."""

    members: tuple[Member, ...]
    me: int
    here: tuple[bool, ...]
    timeout: float
    shows_stacks: bool = False

    @property
    def beat_seconds(self) -> float:
        return min(LONGEST_BEAT_SECONDS, max(BEAT_SECONDS, len(self.members) / MOST_BEATS))

    @property
    def device_timeout(self) -> float:
        """After how many seconds a collective on a device is given up."""
        return self.timeout - min(EARLIER_SECONDS, EARLIER_SHARE * self.timeout)


class Agent:
    """One rank's end of the watch over ``group``. ``lines``: the hub's to all others, and the others' to the hub.

    ``write_dump`` is called when another rank asks for it, ``on_warning`` with every message about slow ranks and slow
    communication.
    """

    def __init__(
        self,
        plan: Plan,
        group: Any,
        lines: dict[int, Line],
        *,
        write_dump: Callable[[], None] = lambda: None,
        on_warning: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.plan = plan
        self._write_dump, self._on_warning = write_dump, on_warning
        guards = self._guards = Guards(group, plan.device_timeout)
        self.sampler = Sampler(lambda: guards.states, shows_stack_after=BEAT_SECONDS if plan.shows_stacks else None)
        self._group = weakref.ref(group)
        # Not all are: then their destruction goes unnoticed.
        self._is_registered = group in dist.distributed_c10d._world.pg_map
        self._lines = lines
        self._detector = Detector(plan.me, list(lines), time.monotonic(), sees_all=self._is_hub)
        # Whom the hub suspects.
        self._reported: list[Suspect] = []
        self._pacing = Pacing(plan.members, plan.me, self.sampler, send=self._send, warn=self._warn)
        # Held while the state changes; threads that wait for news wait on it.
        self._news = threading.Condition()
        self._selector = selectors.PollSelector()
        self._waker, self._woken = socket.socketpair()
        self._exit_message = ""
        self._is_closed = False
        # What other threads want this thread to do.
        self._requests: deque[Callable[[float], None]] = deque(maxlen=MOST_REQUESTS)
        # When something on a device has lasted too long.
        self._deadline = math.inf
        self._thread = threading.Thread(target=self._run, name="gradsync watch", daemon=True)

    # -- from other threads -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_wake)
        for number, line in self._lines.items():
            self._selector.register(line, selectors.EVENT_READ, partial(self._receive, number, line))
        self._thread.start()

    def guard(self, communicator: object) -> None:
        """Guard ``communicator``: no rank shall wait on it for a rank that has exited.

        All ranks guard the same communicators in the same order, because they are identified by number.
        """
        if not isinstance(communicator, BaseCommunicator):
            return
        if communicator.device.type != "cpu":
            # Those that run its collectives know what the device has finished.
            for part in getattr(communicator, "communicators", ()):
                self.guard(part)
        self._guards.add(communicator, self.failure_message, self.report_given_up)

    def failure_message(self, message: str) -> str:
        """The text of a failure: ``message``, and what is known of the ranks that may have caused it."""
        patience = PATIENCE_SECONDS if self._thread.is_alive() else 0.0
        with self._news:
            self._news.wait_for(lambda: bool(self._detector.exits or self._suspects()), patience)
            cause = self._cause()
            if any(not exit_record.left for exit_record in self._detector.exits.values()):
                # Another rank's message about the same end adds nothing.
                message = message.partition(BEFORE)[0]
        own = self.sampler.sample(time.monotonic()).windows + 1
        return f"{cause}. {self._name} is in window {own}: {message}" if cause else message

    def ask_for_dumps(self) -> None:
        """Make every rank write its status."""
        self._request(partial(self._take, self.plan.me, {"dump": True}))

    def report_error(self, message: str) -> None:
        """Report to the others now, and not at exit, that this rank has raised and may continue."""
        self._request(partial(self._send_error, message))

    def report_given_up(self, number: int, words: str) -> None:
        """Report to the others that this rank has given up the communicator of that number."""
        self._request(partial(self._take, self.plan.me, {"given_up": number, "words": words[:MOST_LETTERS]}))

    def describe(self) -> dict[str, Any]:
        """What the others have reported, for a dump."""
        now = time.monotonic()
        with self._news:
            known = {number: self._detector.status_of(number, now) for number in range(len(self.plan.members))}
            cause = self._cause()
        others = {
            str(self.plan.members[number].rank): {"heard_seconds_ago": round(age, 1), **asdict(status)}
            for number, (status, age) in known.items()
            if number != self.plan.me and status.phase
        }
        return {"known": cause, "others": others}

    def leave(self, message: str) -> None:
        """Send the others an exit ``message``, and stop the thread."""
        self._exit_message = message
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(EXIT_SECONDS)
        elif not self._is_closed:
            # It never began.
            self._close()

    def after_fork(self) -> None:
        """Close a forked child's copies of the sockets. The parent's stay as they are."""
        for each in (self._waker, self._woken):
            each.close()
        for line in self._lines.values():
            line.close()

    def _request(self, action: Callable[[float], None]) -> None:
        self._requests.append(action)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            # A watch that fails must not take the training down with it.
            LOGGER.exception("the watch over the other ranks has failed, and training goes on without it")
        finally:
            self._close()

    def _serve(self) -> None:
        next_beat = last = time.monotonic()
        while not self._exit_message:
            due = min(next_beat, self._pacing.next, self._deadline)
            looks = self._detector.exits or self._detector.has_unreported_errors
            limit = LOOK_SECONDS if looks else max(0.0, due - last)
            ready = self._selector.select(limit)
            now = time.monotonic()
            was_stopped, last = now - last > self.plan.beat_seconds + STOPPED_SECONDS, now
            for key, _ in ready:
                key.data(now)
            if was_stopped:
                self._detector.wake(now)
            if now >= min(next_beat, self._pacing.next):
                self._pacing.tick(now)
            if was_stopped:
                self._deadline = now + RESUMED_SECONDS
            elif now >= min(next_beat, self._deadline):
                self._end_overdue(now)
            if now >= next_beat:
                next_beat = now + self.plan.beat_seconds
                self._beat(now, quietly=was_stopped)
            if self._detector.has_unreported_errors:
                self._warn_of_errors(now)
            if self._detector.exits:
                self._lose_stranded(now)

    def _on_wake(self, now: float) -> None:
        with contextlib.suppress(OSError):
            self._woken.recv(64)
        while self._requests:
            self._requests.popleft()(now)

    def _send_error(self, error: str, now: float) -> None:
        # To the hub, which learns whether this rank goes on; the hub's own to all, who learn that of the hub.
        for line in self._lines.values():
            line.send({"error": error, "status": asdict(self.sampler.sample(now))})

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _receive(self, number: int, line: Line, now: float) -> None:
        for message in line.receive():
            self._take(number, message, now)
        if line.end:
            self._selector.unregister(line)
            line.close()
            self._lines.pop(number, None)
            # After a long silence it may be the network that came back and reset the line: that is no exit.
            was_alive = self.plan.here[number] or self._detector.silence_of(number, now) < SLOW_SECONDS
            if line.end == "closed" or (line.end == "reset" and was_alive):
                status, age = self._detector.status_of(number, now)
                self._record_exit(
                    ExitRecord(member=number, left=False, words=GONE, at=time.time(), status=status, age=age), now
                )

    def _take(self, number: int, message: dict[str, Any], now: float) -> None:
        if "beat" in message:
            status = from_json_or(RankStatus, message["beat"], UNKNOWN)
            with self._news:
                self._detector.update(number, status, now)
                if number == HUB:
                    suspects = from_json_or(tuple[Suspect, ...], message.get("suspects"), ())
                    self._reported = [each for each in suspects if self._knows(each.member, *each.waiters)]
        elif "exit" in message:
            status = from_json_or(RankStatus, message.get("status"), UNKNOWN)
            exit_record = ExitRecord(
                member=number, left=True, words=str(message["exit"]), at=time.time(), status=status
            )
            self._record_exit(exit_record, now)
        elif "off" in message:
            self._pacing.forget(number)
            with self._news:
                self._detector.forget(number)
            self._lines[number].end = "off"
        elif "ended" in message and number == HUB:
            ended_rank = from_json_or(ExitRecord, message["ended"], None)
            if ended_rank is not None and self._knows(ended_rank.member):
                self._record_exit(ended_rank, now)
        elif "error" in message:
            status = from_json_or(RankStatus, message.get("status"), UNKNOWN)
            error = RaisedError(words=str(message["error"])[:MOST_LETTERS], at=time.time(), status=status)
            with self._news:
                self._detector.add_error(number, error)
        elif "dump" in message:
            self._pass_on(number, message)
            # The rank that was asked has written already.
            if number != self.plan.me:
                self._write_dump()
        elif "given_up" in message:
            self._pass_on(number, message)
            if number != self.plan.me:
                words = str(message.get("words"))[:MOST_LETTERS]
                self._guards.given_up(from_json_or(int, message["given_up"], -1), words)
        else:
            self._pacing.take(number, message, now)

    def _pass_on(self, number: int, message: dict[str, Any]) -> None:
        """Send a message of rank ``number`` to all others: it goes to the hub, and from there to them."""
        for other, line in self._lines.items():
            if other != number and (self._is_hub or number == self.plan.me):
                line.send(message)

    def _knows(self, *ranks: int) -> bool:
        return all(0 <= rank < len(self.plan.members) for rank in ranks)

    def _record_exit(self, exit_record: ExitRecord, now: float) -> None:
        with self._news:
            is_new = self._detector.end(exit_record, now)
            self._news.notify_all()
        self._guards.refuse_new(exit_record, exit_text(self.plan.members, exit_record))
        if is_new and self._is_hub:
            for line in self._lines.values():
                line.send({"ended": asdict(exit_record)})

    # -- sending ------------------------------------------------------------------------------------------------------

    def _beat(self, now: float, *, quietly: bool) -> None:
        group = self._group()
        if group is None or (self._is_registered and group not in dist.distributed_c10d._world.pg_map):
            self._exit_message = "has destroyed its process group"
            return
        status = self.sampler.sample(now)
        message: dict[str, Any] = {"beat": asdict(status)}
        with self._news:
            self._detector.update(self.plan.me, status, now)
            due = [] if quietly else self._detector.due(now)
            if self._is_hub:
                suspects = self._detector.suspects(now)[:MOST_SUSPECTS]
                message["suspects"] = [asdict(each) for each in suspects]
        frame = pack(message)
        for line in self._lines.values():
            line.flush()
            line.send_frame(frame, unless_busy=True)
        if self._warns_of_lost_ranks:
            for each in due:
                LOGGER.warning(
                    "%s. It is an error only after %g s, the timeout of the group",
                    suspect_text(self.plan.members, each, is_here=self.plan.here[each.member]),
                    self.plan.timeout,
                )

    @property
    def _warns_of_lost_ranks(self) -> bool:
        """Whether this rank gives the warnings: when the hub is silent, the first of the others does."""
        return self._is_hub or self.plan.me == HUB + 1

    def _warn_of_errors(self, now: float) -> None:
        """Warn of ranks that have raised, as soon as somebody waits for them."""
        status = self.sampler.sample(now)
        with self._news:
            self._detector.update(self.plan.me, status, now)
            found = self._detector.errors_to_report(now)
        for member, error, wait in found if self._warns_of_lost_ranks else ():
            LOGGER.warning(
                "%s. It is an error when that process ends, or after %g s, the timeout of the group",
                raised_error(self.plan.members, member, error, wait),
                self.plan.timeout,
            )

    def _send(self, message: dict[str, Any]) -> None:
        frame = pack(message)
        for line in self._lines.values():
            line.send_frame(frame, unless_busy=True)

    def _warn(self, message: str) -> None:
        # A rank that waits for one that has exited is not slow.
        if not self._detector.exits:
            LOGGER.warning("%s", message)
            self._on_warning(message)

    def _lose_stranded(self, now: float) -> None:
        """End waits for a rank that has exited, unless they have ended by themselves."""
        exits = sorted(self._detector.exits.values(), key=sort_key)
        noticed = [(exit_record, self._detector.noticed[exit_record.member]) for exit_record in exits]
        for number, exit_record in self._guards.find_stranded(noticed, now):
            message, status = exit_text(self.plan.members, exit_record), self.sampler.sample(now)
            waits = [wait for wait in status.waits if wait.communicator == number]
            if waits:
                message += f". {self._name} waited for it in window {status.windows + 1}, in {waits[-1].what}"
            self._guards.lose(number, message.rstrip(". "))

    def _end_overdue(self, now: float) -> None:
        """End collectives that a device has been running for as long as the group allows."""
        for number, overdue in self._guards.overdue(now):
            with self._news:
                cause = self._cause()
            window = self.sampler.sample(now).windows + 1
            cause = cause or "no rank is known to be stopped or behind: a device hangs, or ranks run other collectives"
            self._guards.lose(
                number,
                f"{cause}. {self._name} waited {now - overdue.started_at:.0f} s in window {window}, in "
                f"{overdue.describe()}; the timeout of the group is {self.plan.timeout:g} s",
            )
        self._deadline = self._guards.deadline()

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return f"rank {self.plan.members[self.plan.me].rank}"

    @property
    def _is_hub(self) -> bool:
        return self.plan.me == HUB

    def _suspects(self) -> list[Suspect]:
        return [*self._detector.suspects(time.monotonic()), *self._reported]

    def _cause(self) -> str:
        """The message about the cause of a failure: the rank that ended first, else those that hold others up."""
        exits = sorted(self._detector.exits.values(), key=sort_key)
        if exits:
            return exit_text(self.plan.members, exits[0])
        suspects = {each.member: each for each in self._suspects() if each.member != self.plan.me}
        return ". ".join(
            suspect_text(self.plan.members, each, is_here=self.plan.here[each.member]) for each in suspects.values()
        )

    def _close(self) -> None:
        """Send the exit message to those that still listen, and close everything: the thread ends."""
        self._is_closed = True
        message: dict[str, Any] = {"off": True}
        if self._exit_message:
            message = {"exit": self._exit_message, "status": asdict(self.sampler.sample(time.monotonic()))}
        for line in self._lines.values():
            line.send(message)
            with contextlib.suppress(OSError):
                line.connection.shutdown(socket.SHUT_WR)
        for line in self._lines.values():
            # Closed with something unread, a connection is reset, and what was sent last may be lost with it.
            line.receive()
            line.close()
        self._selector.close()
        self._waker.close()
        self._woken.close()
