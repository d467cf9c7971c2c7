"""One root cause: ranks tell the launcher why they end, and it shows the traceback of the one that failed first.

What fails on one rank fails on all others a moment later, and every process would print what it saw, all at once. So a
rank leaves its error in a piece of memory that the launcher has handed it, and says nothing itself. It has no name in
any file system, and is gone with the processes. Ranks that others have started (torchrun, mpirun, srun) have none, and
print for themselves.

[Note: who was first] A rank writes before anybody else can notice that it fails: before it says goodbye, and before its
connections close. So whoever fails because of it writes later, however late the launcher sees either of them end. A
rank that was killed, or called ``os._exit()``, writes nothing. It is gone before others notice, so each of these finds
it gone when it writes, and says so.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from gradsync.base.errors import ConfigurationError, GradsyncError, PeerFailedError
from gradsync.health.watch.exit_causes import exit_call, exit_status

__all__ = [
    "DEBUG",
    "FAILED",
    "INTERRUPTED",
    "WRONG_USE",
    "LastWords",
    "Statements",
    "exit_code_of",
    "is_heard",
    "last_words_of",
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
# What torch raises for a lost peer is an error of these classes, or a RuntimeError in these words of Gloo.
LOST_PEER_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError"}
LOST_PEER_WORDS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport/")
# Of the flags in /proc/PID/stat: set before the kernel closes what the process has open.
PF_EXITING = 0x4


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
class LastWords:
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
    def read(cls, data: bytes) -> "LastWords | None":
        try:
            fields: dict[str, Any] = json.loads(data)
            return cls(
                at=float(fields["at"]),
                kind=str(fields["kind"]),
                message=str(fields["message"]),
                trace=str(fields["trace"]),
                code=int(fields["code"]),
                is_consequence=bool(fields["is_consequence"]),
                is_printed=bool(fields["is_printed"]),
                gone=tuple(int(rank) for rank in fields["gone"]),
            )
        except (ValueError, KeyError, TypeError):
            # It was killed while it wrote, or has written nothing.
            return None

    @property
    def is_exit(self) -> bool:
        """Whether the rank itself called ``sys.exit()``."""
        return self.kind == SystemExit.__name__


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


def leave_last_words(error: BaseException, *, at: float, then: Callable[[BaseException], object] | None = None) -> None:
    """Tell the launcher of ``error``, which was raised ``at`` that time of day, call ``then``, and end this process.

    Returns if nobody listens, or if somebody has pressed Ctrl-C: then the error takes its usual way.
    """
    is_plain = isinstance(error, GradsyncError) and os.environ.get(DEBUG, "") in ("", "0")
    # What gradsync says is written to be understood without one.
    words = last_words_of(error, at=at, trace="" if is_plain else _trace_of(error))
    is_heard = not isinstance(error, KeyboardInterrupt) and write_last_words(words)
    if then is not None:
        then(error)
    if is_heard:
        os._exit(exit_code_of(error))


def last_words_of(error: BaseException | None, *, at: float, trace: str = "", is_printed: bool = False) -> LastWords:
    """What is to be said of ``error``; None: the script has come to its end."""
    if error is None:
        return LastWords(at=at, kind="", message="came to the end of its script", code=0)
    is_exit = isinstance(error, SystemExit)
    return LastWords(
        at=at,
        kind=SystemExit.__name__ if is_exit else type(error).__name__,
        message=f"called {exit_call(error)}" if isinstance(error, SystemExit) else one_line(error),
        trace="" if is_exit else trace[-MOST_LETTERS:],
        code=exit_code_of(error),
        is_consequence=any(map(_tells_of_a_lost_peer, _causes_of(error))),
        is_printed=is_printed,
    )


def write_last_words(words: LastWords) -> bool:
    """Leave them with the launcher, once; returns whether there is one, which listens to this process."""
    descriptor = _descriptor()
    if descriptor is None:
        return False
    content = _content(descriptor)
    processes = _processes(content)
    if content and os.getpid() not in processes.values():
        # A child that this rank has forked, or the rank has spoken.
        return False
    gone = tuple(rank for rank, process in processes.items() if _is_gone(process))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    data = json.dumps(vars(replace(words, gone=gone))).encode()
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))
    return True


def _causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those in whose handling it was raised: ``except WireLostError: sys.exit(1)``."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _tells_of_a_lost_peer(error: BaseException) -> bool:
    if isinstance(error, PeerFailedError) or type(error).__name__ in LOST_PEER_ERRORS:
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(words in str(error) for words in LOST_PEER_WORDS)


def _is_gone(process: int) -> bool:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return True
    return fields[0] in ("Z", "X") or bool(int(fields[6]) & PF_EXITING)


def _trace_of(error: BaseException) -> str:
    """The traceback, without the frames by which the command line has got to its work."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[2].startswith("cli."):
        trace = trace.tb_next
    # Never nothing: it may have been raised right there.
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


# -- in the launcher --------------------------------------------------------------------------------------------------


class Statements:
    """The memory in which ranks leave their last words. Until then the launcher's words are there: the processes."""

    def __init__(self, ranks: int) -> None:
        self._memories: list[int] = []
        try:
            for _ in range(ranks):
                self._memories.append(os.memfd_create(MEMORY, 0))
        except OSError:
            self.__exit__()
            raise

    def __enter__(self) -> "Statements":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for memory in self._memories:
            os.close(memory)

    def variables(self, rank: int) -> dict[str, str]:
        """What the rank needs to know."""
        return {VARIABLE: str(self._memories[rank])}

    def tell(self, processes: Mapping[int, int]) -> None:
        """Tell all ranks the numbers of their processes, by rank."""
        data = json.dumps({"processes": processes}).encode()
        for memory in self._memories:
            # A rank that has failed already needs them no more.
            if not _content(memory):
                os.pwrite(memory, data, 0)

    def words(self) -> dict[int, LastWords]:
        """By rank."""
        told = {rank: LastWords.read(_content(memory)) for rank, memory in enumerate(self._memories)}
        return {rank: words for rank, words in told.items() if words is not None}


def _content(memory: int) -> bytes:
    return os.pread(memory, os.fstat(memory).st_size, 0)


def _processes(data: bytes) -> dict[int, int]:
    try:
        return {int(rank): int(process) for rank, process in json.loads(data)["processes"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
