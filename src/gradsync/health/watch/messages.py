"""Messages about a rank: which one it is, since when, where it was, and what to do."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradsync.communicator.checks import missing_step
from gradsync.communicator.logs import join_names
from gradsync.health.watch.detector import ExitRecord, RaisedError, Suspect
from gradsync.health.watch.exit_causes import ENDED, EXITED, exit_words, recorded_exit
from gradsync.health.watch.links import SlowLink
from gradsync.health.watch.status import MOST_LETTERS, RankStatus, Wait
from gradsync.health.watch.stragglers import Slowdown, Straggler

__all__ = [
    "RAISED",
    "Member",
    "error_text",
    "exit_message",
    "exit_text",
    "position_text",
    "raised_error",
    "slow_communication",
    "slow_link",
    "sort_key",
    "straggler_text",
    "suspect_text",
]

MOST_NAMED = 4
RAISED = "raised"
# Consequences of another rank's end, not causes.
CONSEQUENCES = ("CommunicatorLostError", "PeerFailedError")


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank of the group: its number in the world, its host, and its process id there."""

    rank: int
    host: str
    process: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process} on {self.host})"


def position_text(status: RankStatus) -> str:
    """A clause for a rank's status: ``in window 8, synchronizing: 2 of 5 buckets started, …``."""
    if not status.phase:
        return "somewhere before its first window"
    words = f"in window {status.windows + 1}, {status.phase}"
    if status.progress:
        words += f" ({status.progress})"
    if status.waits:
        words += f", waiting in {status.waits[-1].what}"
    return words


def exit_text(members: Sequence[Member], exit_record: ExitRecord) -> str:
    """The message for a rank that is gone, or has left."""
    member, at = members[exit_record.member], time.strftime("%H:%M:%S", time.localtime(exit_record.at))
    place = position_text(exit_record.status)
    if exit_record.left and exit_record.words.startswith((RAISED, EXITED)):
        reason = (
            ". Its own output tells where"
            if exit_record.words.startswith(RAISED)
            else ", while others still need it. Its own output may tell why"
        )
        return f"{member} {exit_record.words} [at {at}, {place}]{reason}"
    if exit_record.left:
        return (
            f"{member} {exit_record.words} at {at}, {place}, while others still need it. It left "
            "the loop before them: see that all ranks run as many batches, or use accumulate() or join()"
        )
    return (
        f"{member} {exit_record.words} at {at}; {exit_record.age:.1f} s before it was {place}. "
        "Its own output may tell why, or the kernel's log (dmesg), if it ran out of memory. Start all ranks again, "
        "from the last checkpoint"
    )


def sort_key(exit_record: ExitRecord) -> tuple[int, float]:
    """The order of exits by cause: causes before consequences.

    A rank that was killed, one that raised an error of its own or called ``sys.exit(1)``, one that only lost others,
    one that left.
    """
    if not exit_record.left:
        return (0, exit_record.at)
    if not exit_record.words.startswith((RAISED, EXITED)):
        return (3, exit_record.at)
    return (2 if any(each in exit_record.words for each in CONSEQUENCES) else 1, exit_record.at)


def suspect_text(members: Sequence[Member], suspect: Suspect, *, is_here: bool) -> str:
    """The message for a rank that holds others up. ``is_here``: its process is on this machine."""
    member = members[suspect.member]
    waiters = [f"rank {members[each].rank}" for each in suspect.waiters]
    if len(waiters) > MOST_NAMED:
        waiters = [*waiters[: MOST_NAMED - 1], f"{len(waiters) - MOST_NAMED + 1} more"]
    verb = "waits" if len(suspect.waiters) == 1 else "wait"
    waiting = f"{join_names(waiters)} {verb} in {suspect.what}" if waiters else "nobody waits for it yet"
    stand, seconds = position_text(suspect.status), f"{suspect.seconds:.0f} s"
    hint = _missing_step(member, waiters, suspect)
    if suspect.raised:
        stand += f". It {suspect.raised}, and has not gone on since"
    if suspect.kind == "silent":
        state = _state(member.process) if is_here else ""
        cause = state or "It is stopped, its link is cut, or it holds the interpreter's lock"
        return f"{member} has not been heard of for {seconds}; {waiting}. {cause}. When last heard of, it was {stand}"
    if suspect.kind == "at odds":
        return (
            f"{member} has waited for {seconds} in another collective than the others: {waiting}, and it is {stand}. "
            + (hint or "All ranks must run the same collectives in the same order")
        )
    stack = f". Its stack: {' < '.join(reversed(suspect.status.stack))}" if suspect.status.stack else ""
    return f"{member} keeps others waiting for {seconds}: {waiting}, and it is {stand}{stack}" + (hint and f". {hint}")


def _missing_step(member: Member, waiters: list[str], suspect: Suspect) -> str:
    own = suspect.status.waits[-1].what if suspect.status.waits else ""
    # Only of one and the same collective, by its number: a rank in another one may just be late.
    if not waiters or own.partition(" (")[0] != suspect.what.partition(" (")[0]:
        return ""
    return missing_step({join_names(waiters): suspect.what, f"rank {member.rank}": own})


def straggler_text(members: Sequence[Member], straggler: Straggler) -> str:
    """The message for a rank that all others wait for, in every window."""
    own, others = f"{straggler.own * 1e3:.4g}", f"{straggler.others * 1e3:.4g}"
    member = members[straggler.member]
    if straggler.is_over:
        return f"{member} computes no longer than the others any more ({own} ms a window)"
    whom = "the other rank" if len(members) == 2 else "the median of the others"
    who = "which waits" if len(members) == 2 else "who all wait"
    return (
        f"{member} computes {straggler.slower:.0%} longer than {whom} ({own} against {others} ms a window, data and "
        f"update included), {who} for it. It waits {straggler.communication * 1e3:.3g} ms for communication itself"
    )


def raised_error(members: Sequence[Member], member: int, error: RaisedError, wait: Wait) -> str:
    """The message for a rank that has raised and may continue, while others wait for it."""
    at = time.strftime("%H:%M:%S", time.localtime(error.at))
    place = position_text(error.status)
    return f"{members[member]} {error.words} [at {at}, {place}], and others wait for it in {wait.what}"


def slow_communication(slowdown: Slowdown) -> str:
    """The message for slow communication, if no rank is to blame."""
    now, before = f"{slowdown.now * 1e3:.3g}", f"{slowdown.before * 1e3:.3g}"
    if slowdown.is_over:
        return f"communication is no slower than before any more ({now} ms a window)"
    return (
        f"communication has become slow: it takes {now} ms a window, where it took {before} before. All ranks wait for "
        "it, and none is to blame"
    )


def slow_link(found: SlowLink) -> str:
    """The message for the link that all wait for."""
    link = f"from {found.source} to {found.target}" if found.target else f"of {found.source}"
    rate, others = (f"{each * 8 / 1e6:.4g}" for each in (found.rate, found.others))
    return f"communication is as slow as the link {link}: it carries {rate} Mbit/s where others carry {others} and more"


def _state(process: int) -> str:
    """What the kernel says about an unresponsive process of this machine."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""
    return {
        "T": "Its process is stopped (SIGSTOP, or Ctrl-Z); kill -CONT lets it go on",
        "t": "Its process is held by a debugger",
        "D": "Its process waits for a disk or a device",
    }.get(state, "")


def exit_message(error: BaseException | None = None) -> str:
    """Why this process ends, for ranks that may still wait for it: by ``error``, or by one that nobody has caught."""
    error = error or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is not None:
        return error_text(error)
    return f"{ENDED}, after {call}," if (call := recorded_exit()) else ENDED


def error_text(error: BaseException, place: str = "") -> str:
    """The message that a rank has raised ``error``, and in which part of its loop.

    It has one line: the rank itself shows the rest.
    """
    if isinstance(error, SystemExit):
        return exit_words(error)[:MOST_LETTERS]
    message = " ".join(f"{RAISED} {type(error).__name__}: {error}".split()).rstrip(": ")[:MOST_LETTERS]
    return f"{message} in {place}" if place else message
