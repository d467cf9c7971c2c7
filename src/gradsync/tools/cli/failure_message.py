"""The root cause of a failed run: ranks leave exit records, and the launcher shows the one that failed first.

What fails on one rank fails on all others a moment later, and every process would print what it saw, all at once. So a
rank writes its error into a piece of anonymous memory that the launcher has handed it, and prints nothing. Ranks that
others have started (torchrun, mpirun, srun) have none, and print for themselves.

[Note: who was first] A rank writes before any other can notice that it fails: before it says goodbye, and before its
connections close. So ranks that fail because of it write later, however late the launcher sees either of them end. A
rank that was killed, or called ``os._exit()``, writes nothing. It is gone before others notice, so each of them finds
it gone when it writes, and notes that.
"""

import json
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from gradsync.base.errors import ConfigurationError, GradsyncError, PeerFailedError
from gradsync.base.files import from_json
from gradsync.health.watch.exit_causes import exit_call, exit_status
from gradsync.tools.launch import Failure, RankPlace

__all__ = [
    *("DEBUG", "FAILED", "INTERRUPTED", "OPTION", "WRONG_USE", "ExitStatement", "ExitStatements", "FailureReport"),
    *("exit_code_of", "exit_statement_of", "has_launcher", "one_line", "refusing", "report_exit"),
    "write_exit_statement",
]

DEBUG = "GRADSYNC_DEBUG"
FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130
# The number of the descriptor, for a rank. Not for users: the launcher sets it.
VARIABLE = "GRADSYNC_EXIT_MESSAGE"
MEMORY = "gradsync-exit-message"
MOST_CHARACTERS = 100_000
# What torch raises for a lost peer is an error of these classes, or a RuntimeError with one of these messages of Gloo.
LOST_PEER_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError"}
LOST_PEER_MESSAGES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport/")
# Of the flags in /proc/PID/stat: set before the kernel closes what the process has open.
PF_EXITING = 0x4
LINE_LENGTH = 260
# Messages with as many characters in common are the same error.
REPEATED = 60
# By which the launcher ends ranks.
ENDING = (-signal.SIGTERM, -signal.SIGKILL)


# An option as it is typed: not inside of a word, and not what somebody gave as a value, such as '--foo' or -inf.
OPTION = re.compile(r"(?<![\w'\"-])--[a-z][a-z-]*\b")


@contextmanager
def refusing(option: str) -> Iterator[None]:
    """Put ``option`` in front of a :class:`~gradsync.base.errors.ConfigurationError` that names no option."""
    try:
        yield
    except ConfigurationError as error:
        if OPTION.search(str(error)):
            raise
        raise ConfigurationError(f"{option}: {error}") from error


def exit_code_of(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return exit_status(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return WRONG_USE if isinstance(error, ConfigurationError) else FAILED


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True, kw_only=True)
class ExitStatement:
    """Why a rank ends: ``at`` what time of day, with which exit ``code``, and whether only because of another rank.

    ``gone`` are the ranks whose processes had ended by then. ``is_printed``: the rank prints its error itself.
    """

    at: float
    kind: str
    message: str
    trace: str = ""
    code: int = FAILED
    is_consequence: bool = False
    is_printed: bool = False
    gone: tuple[int, ...] = ()

    @classmethod
    def read(cls, data: bytes) -> "ExitStatement | None":
        try:
            return from_json(cls, json.loads(data))
        except ValueError:
            # It was killed while it wrote, or has written nothing.
            return None

    @property
    def is_exit(self) -> bool:
        """Whether the rank itself called ``sys.exit()``."""
        return self.kind == SystemExit.__name__


# -- in a rank --------------------------------------------------------------------------------------------------------


def has_launcher() -> bool:
    """Whether a launcher reads the exit record of this process."""
    return _descriptor() is not None


def _descriptor() -> int | None:
    number = os.environ.get(VARIABLE, "")
    # A process that this one has started has the variable, and perhaps something else under that number.
    try:
        is_ours = number.isdecimal() and os.readlink(f"/proc/self/fd/{number}").startswith(f"/memfd:{MEMORY}")
    except OSError:
        is_ours = False
    return int(number) if is_ours else None


def report_exit(error: BaseException, *, at: float, then: Callable[[BaseException], object] | None = None) -> None:
    """Leave a record of ``error``, raised ``at`` that time of day, call ``then``, and end this process.

    Returns without a launcher to read it, or after Ctrl-C: then the error takes its usual way.
    """
    is_plain = isinstance(error, GradsyncError) and os.environ.get(DEBUG, "") in ("", "0")
    # What gradsync says is written to be understood without one.
    record = exit_statement_of(error, at=at, trace="" if is_plain else _trace_of(error))
    has_launcher = not isinstance(error, KeyboardInterrupt) and write_exit_statement(record)
    if then is not None:
        then(error)
    if has_launcher:
        os._exit(exit_code_of(error))


def exit_statement_of(
    error: BaseException | None, *, at: float, trace: str = "", is_printed: bool = False
) -> ExitStatement:
    """The record of ``error``; None: the script has come to its end."""
    if error is None:
        return ExitStatement(at=at, kind="", message="came to the end of its script", code=0)
    is_exit = isinstance(error, SystemExit)
    return ExitStatement(
        at=at,
        kind=SystemExit.__name__ if is_exit else type(error).__name__,
        message=f"called {exit_call(error)}" if isinstance(error, SystemExit) else one_line(error),
        trace="" if is_exit else trace[-MOST_CHARACTERS:],
        code=exit_code_of(error),
        is_consequence=any(map(_is_lost_peer, _causes_of(error))),
        is_printed=is_printed,
    )


def write_exit_statement(record: ExitStatement) -> bool:
    """Leave it with the launcher, once; returns whether there is one that reads it."""
    descriptor = _descriptor()
    if descriptor is None:
        return False
    content, processes = _content(descriptor), {}
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        processes = {int(rank): int(process) for rank, process in json.loads(content)["processes"].items()}
    if content and os.getpid() not in processes.values():
        # A child that this rank has forked, or the rank has spoken.
        return False
    gone = tuple(rank for rank, process in processes.items() if _is_gone(process))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    data = json.dumps(vars(replace(record, gone=gone))).encode()
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))
    return True


def _causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those in whose handling it was raised: ``except CommunicatorLostError: sys.exit(1)``."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_lost_peer(error: BaseException) -> bool:
    if isinstance(error, PeerFailedError) or type(error).__name__ in LOST_PEER_ERRORS:
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(text in str(error) for text in LOST_PEER_MESSAGES)


def _is_gone(process: int) -> bool:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return True
    return fields[0] in ("Z", "X") or bool(int(fields[6]) & PF_EXITING)


def _trace_of(error: BaseException) -> str:
    """The traceback, without the frames by which the command line has got to its work."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("gradsync.tools.cli."):
        trace = trace.tb_next
    # Never nothing: it may have been raised right there.
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


# -- in the launcher --------------------------------------------------------------------------------------------------


class ExitStatements:
    """The memory in which ranks leave exit records. Until then it holds the process ids, from the launcher."""

    def __init__(self, ranks: int) -> None:
        self._memories: list[int] = []
        try:
            for _ in range(ranks):
                self._memories.append(os.memfd_create(MEMORY, 0))
        except OSError as error:
            self.__exit__()
            raise ConfigurationError(
                f"--nproc {ranks} is more than this process may start: {error}. Start fewer ranks, or raise the limit "
                "(ulimit -n)"
            ) from error

    def __enter__(self) -> "ExitStatements":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for memory in self._memories:
            os.close(memory)

    def variables(self, rank: int) -> dict[str, str]:
        """What the rank needs to know."""
        return {VARIABLE: str(self._memories[rank])}

    def publish(self, processes: Mapping[int, int]) -> None:
        """Let all ranks know the process ids, by rank."""
        data = json.dumps({"processes": processes}).encode()
        for memory in self._memories:
            # A rank that has failed already needs them no more.
            if not _content(memory):
                os.pwrite(memory, data, 0)

    def read(self) -> dict[int, ExitStatement]:
        """The exit records that ranks have left, by rank."""
        records = {rank: ExitStatement.read(_content(memory)) for rank, memory in enumerate(self._memories)}
        return {rank: record for rank, record in records.items() if record is not None}


def _content(memory: int) -> bytes:
    return os.pread(memory, os.fstat(memory).st_size, 0)


# -- the root cause, once all ranks have ended ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """Why a run failed. ``early`` are the ranks that had failed before the others were asked to end, at
    ``stopped_at`` (time of day); ``failures`` are all of them. ``signals`` have come before any had: then ranks do no
    more than obey."""

    early: Sequence[Failure]
    failures: Sequence[Failure]
    records: Mapping[int, ExitStatement]
    signals: Sequence[signal.Signals] = ()
    stopped_at: float = math.inf

    @property
    def failed(self) -> list[Failure]:
        """The ranks that failed, each with the exit code that it had decided on. One that was on its way out when the
        launcher ended it, or when its interpreter crashed at the end, keeps that code."""
        return [failure for failure in map(self._as_decided, self.failures) if failure.code]

    def _as_decided(self, failure: Failure) -> Failure:
        record = self.records.get(failure.place.rank)
        if record is None or failure.code >= 0:
            return failure
        was_stopped = failure.code in ENDING and not self._is_early(failure) and not self.signals
        return replace(failure, code=record.code) if record.code or was_stopped else failure

    @property
    def has_cause(self) -> bool:
        """Whether a rank has failed that did not only lose another one."""
        records = [self.records.get(failure.place.rank) for failure in self.failures]
        causes = [record for record in self.records.values() if record.code and not record.is_consequence]
        return bool(causes) or None in records

    @property
    def first(self) -> Failure:
        """The rank that failed first, of those that did not fail because of another one, nor because they were told to
        end. See [Note: who was first]."""
        failed = self.failed
        first = min(failed, key=self._order)
        record = self.records.get(first.place.rank)
        silent = [each for each in failed if each.place.rank not in self.records and self._is_early(each)]
        before = [each for each in silent if record is not None and each.place.rank in record.gone]
        return first if self._is_refusal(first) else min(before, key=self._order, default=first)

    def _order(self, failure: Failure) -> tuple[int, float, int]:
        rank = failure.place.rank
        record = self.records.get(rank)
        if any(map(failure.obeys, self.signals)):
            return (3, rank, 0)
        if self._is_refusal(failure):
            # All have agreed on it, and know the reason.
            return (0, rank, 0)
        if record is not None and record.code and record.at < self.stopped_at:
            return (1 if record.is_consequence else 0, record.at, 0)
        # Of those that were seen to end at once: a lost peer makes others abort or exit, and kills nobody.
        kind = 2 if failure.code == -signal.SIGABRT else int(failure.code > 0)
        return (0, failure.at, kind) if self._is_early(failure) else (2, rank, 0)

    def _is_early(self, failure: Failure) -> bool:
        return any(each.place.rank == failure.place.rank for each in self.early)

    def _is_refusal(self, failure: Failure) -> bool:
        record = self.records.get(failure.place.rank)
        return failure.code == WRONG_USE and (record is None or not record.is_exit)

    @property
    def explanation(self) -> ExitStatement | None:
        """The exit record of the first rank, if it left one of a failure."""
        record = self.records.get(self.first.place.rank)
        return record if record is not None and record.code else None

    def lines(self, places: Sequence[RankPlace]) -> list[str]:
        """The message of the first rank, if it left a record, and a line per other rank, if any left one."""
        first, own = self.first, self.explanation
        if any(map(first.obeys, self.signals)):
            return []
        left = [] if own is None else [place for place in places if self._left_before(place.rank, own)]
        ends = {rank: f"it {record.message}" for rank, record in self.records.items()}
        lines = [
            f"{place} ended first, with exit code 0: {ends.get(place.rank, 'without a word of it')}" for place in left
        ]
        if own is not None:
            lines.append(_describe_later(first.place, own) if left else _describe_first(first, own))
        # A refusal is the same everywhere.
        if self.records and not self._is_refusal(first):
            described = {first.place.rank, *(place.rank for place in left)}
            lines += [self._describe(place, own) for place in places if place.rank not in described]
        return lines

    def _left_before(self, rank: int, own: ExitStatement) -> bool:
        """Whether a rank had ended with 0 when the first one failed, which only lost another rank."""
        record = self.records.get(rank)
        if not own.is_consequence or any(failure.place.rank == rank for failure in self.failed):
            return False
        had_ended = rank in own.gone or (record is not None and record.at < own.at)
        # Errors of torch do not name the rank.
        return had_ended and (bool(own.trace) or f"rank {rank} " in own.message)

    def _describe(self, place: RankPlace, first: ExitStatement | None) -> str:
        record = self.records.get(place.rank)
        if record is not None and record.code:
            if first is not None and (record.kind, record.message) == (first.kind, first.message):
                return f"{place} failed in the same way, {max(0.0, record.at - first.at):.1f} s later"
            return _describe_later(place, _without_repetition(replace(record, trace=""), first))
        failure = next((each for each in self.failed if each.place.rank == place.rank), None)
        if failure is None:
            return f"{place} had ended, without an error"
        if self._is_early(failure):
            return str(failure)
        return f"{place} was ended with the others"


def _without_repetition(record: ExitStatement, first: ExitStatement | None) -> ExitStatement:
    """A rank that lost another repeats its error, which has just been shown. Short ones may stand twice."""
    beginning = first.message[:REPEATED] if first is not None else ""
    known, found, _ = record.message.partition(beginning) if len(beginning) == REPEATED else (record.message, "", "")
    return replace(record, message=f"{known.rstrip(': ')}, as above") if known and found else record


def _describe_first(failure: Failure, record: ExitStatement) -> str:
    if record.is_exit:
        return f"{failure.place} failed first: it {record.message}"
    if record.is_printed:
        return f"{failure.place} failed first, with {record.kind}; its own message is above"
    if record.trace:
        return f"{failure.place} failed first:\n{record.trace.rstrip()}"
    return (
        record.message if record.is_consequence or failure.code == WRONG_USE else f"{failure.place}: {record.message}"
    )


def _describe_later(place: RankPlace, record: ExitStatement) -> str:
    if record.trace and not record.is_printed:
        return f"{place} then failed:\n{record.trace.rstrip()}"
    message = record.message if len(record.message) <= LINE_LENGTH else f"{record.message[:LINE_LENGTH]}…"
    return f"{place} then {message}" if record.is_exit else f"{place} then raised {record.kind}: {message}"
