"""One root cause: ranks tell the launcher why they fail, and it shows the traceback of the one that failed first.

What fails on one rank fails on all others a moment later, and every process would print what it saw, all at once. So a
rank leaves its error in a piece of memory that the launcher has handed it, and says nothing itself. It has no name in
any file system, and is gone with the processes. Ranks that others have started (torchrun, mpirun, srun) have none, and
print for themselves.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from gradsync.errors import ConfigurationError, GradsyncError, PeerFailedError
from gradsync.launch import Failure, RankPlace

__all__ = [
    "DEBUG",
    "FAILED",
    "INTERRUPTED",
    "WRONG_USE",
    "Inquest",
    "LastWords",
    "Statements",
    "exit_code_of",
    "is_heard",
    "leave_last_words",
    "one_line",
    "write_last_words",
]

DEBUG = "GRADSYNC_DEBUG"
FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130
# The number of the descriptor, for a rank. Not for users: the launcher sets it.
VARIABLE = "GRADSYNC_LAST_WORDS"
MEMORY = "gradsync-last-words"
MOST_LETTERS = 100_000
LETTERS_A_LINE = 260


def exit_code_of(error: BaseException) -> int:
    return WRONG_USE if isinstance(error, ConfigurationError) else FAILED


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# -- in a rank --------------------------------------------------------------------------------------------------------


def is_heard() -> bool:
    """Whether a launcher keeps what this rank says of its end."""
    return _descriptor() is not None


def _descriptor() -> int | None:
    number = os.environ.get(VARIABLE, "")
    # A process that this one has started has the variable, and perhaps something else under that number.
    try:
        is_ours = number.isdecimal() and os.readlink(f"/proc/self/fd/{number}").startswith(f"/memfd:{MEMORY}")
    except OSError:
        is_ours = False
    return int(number) if is_ours else None


def leave_last_words(error: Exception, *, at: float) -> None:
    """Tell the launcher of ``error``, which was raised ``at`` that time of day, and end this process.

    Returns if nobody listens: then it is for this process to print it.
    """
    is_plain = isinstance(error, GradsyncError) and os.environ.get(DEBUG, "") in ("", "0")
    # What gradsync says is written to be understood without one.
    if write_last_words(error, at=at, trace="" if is_plain else _trace_of(error)):
        os._exit(exit_code_of(error))


def write_last_words(error: Exception, *, at: float, trace: str) -> bool:
    """Tell the launcher of ``error``, with the traceback that it is to show; returns whether there is one."""
    descriptor = _descriptor()
    if descriptor is None:
        return False
    words = LastWords(
        at=at,
        kind=type(error).__name__,
        message=one_line(error),
        trace=trace[-MOST_LETTERS:],
        is_consequence=isinstance(error, PeerFailedError),
    )
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.pwrite(descriptor, json.dumps(vars(words)).encode(), 0)
    return True


def _trace_of(error: Exception) -> str:
    """The traceback, without the frames by which the command line has got to its work."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[2].startswith("cli."):
        trace = trace.tb_next
    # Never nothing: it may have been raised right there.
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


# -- in the launcher --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """Why a rank failed: ``at`` what time of day, and whether only because of another rank."""

    at: float
    kind: str
    message: str
    trace: str
    is_consequence: bool

    @classmethod
    def read(cls, data: bytes) -> "LastWords | None":
        try:
            fields: dict[str, Any] = json.loads(data)
            return cls(
                at=float(fields["at"]),
                kind=str(fields["kind"]),
                message=str(fields["message"]),
                trace=str(fields["trace"]),
                is_consequence=bool(fields["is_consequence"]),
            )
        except (ValueError, KeyError, TypeError):
            # It was killed while it wrote, or has written nothing.
            return None


class Statements:
    """The memory in which ranks leave their last words, and what is to be said of them once all have ended."""

    def __init__(self, ranks: int) -> None:
        self._memories = [os.memfd_create(MEMORY, 0) for _ in range(ranks)]

    def __enter__(self) -> "Statements":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for memory in self._memories:
            os.close(memory)

    def variables(self, rank: int) -> dict[str, str]:
        """What the rank needs to know."""
        return {VARIABLE: str(self._memories[rank])}

    def words(self) -> dict[int, LastWords]:
        """By rank."""
        told = {rank: LastWords.read(_content(memory)) for rank, memory in enumerate(self._memories)}
        return {rank: words for rank, words in told.items() if words is not None}


def _content(memory: int) -> bytes:
    return os.pread(memory, os.fstat(memory).st_size, 0)


@dataclass(frozen=True, kw_only=True)
class Inquest:
    """Why a run failed. ``early`` are the ranks that had failed before the others were asked to end, ``failures`` all
    of them. ``signals`` have come before any had: then ranks do no more than obey."""

    early: Sequence[Failure]
    failures: Sequence[Failure]
    words: Mapping[int, LastWords]
    signals: Sequence[signal.Signals] = ()

    @property
    def first(self) -> Failure:
        """The rank that failed first, of those that did not fail because of another one, nor because they were told to
        end."""
        return min(self.failures, key=self._order)

    def _order(self, failure: Failure) -> tuple[int, float]:
        rank = failure.place.rank
        words = self.words.get(rank)
        if any(map(failure.obeys, self.signals)):
            return (3, rank)
        if failure.code == WRONG_USE:
            # All have agreed on it, and know the reason.
            return (0, rank)
        if words is not None:
            return (1 if words.is_consequence else 0, words.at)
        is_early = any(each.place.rank == rank for each in self.early)
        return (0, failure.at) if is_early else (2, rank)

    def lines(self, places: Sequence[RankPlace]) -> list[str]:
        """What is said of the first one, if it has left words, and a line for each other rank, if one of them has."""
        first = self.first.place.rank
        own = self.words.get(first)
        lines = [] if own is None else [_told_first(self.first, own)]
        # A refusal is the same everywhere.
        if self.words and self.first.code != WRONG_USE:
            lines += [self._told_of(place, own) for place in places if place.rank != first]
        return lines

    def _told_of(self, place: RankPlace, first: LastWords | None) -> str:
        words = self.words.get(place.rank)
        if words is not None:
            if first is not None and (words.kind, words.message) == (first.kind, first.message):
                return f"{place} failed in the same way, {max(0.0, words.at - first.at):.1f} s later"
            message = words.message if len(words.message) <= LETTERS_A_LINE else f"{words.message[:LETTERS_A_LINE]}…"
            return f"{place} then raised {words.kind}: {message}"
        failure = next((each for each in self.failures if each.place.rank == place.rank), None)
        if failure is None:
            return f"{place} had ended, without an error"
        if any(each.place.rank == place.rank for each in self.early):
            return str(failure)
        return f"{place} was ended with the others"


def _told_first(failure: Failure, words: LastWords) -> str:
    if words.trace:
        return f"{failure.place} failed first:\n{words.trace.rstrip()}"
    return words.message if words.is_consequence or failure.code == WRONG_USE else f"{failure.place}: {words.message}"
