"""Starts the ranks of a program, one process each, waits for them and ends them.

A rank is forked from this process and dies with it, also if it is killed. It is the leader of a process group of its
own, so that what it started can be ended with it.
"""

import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from gradsync.lab.errors import LabError
from gradsync.lab.kernel import die_with_parent, enter_host

__all__ = ["Failure", "Place", "RankProcesses", "signals_raise"]

# Those that fail because of a first failure may be seen before it.
SETTLE_SECONDS = 0.1
GRACE_SECONDS = 5.0
SHELL_SIGNAL_BASE = 128
STOPPING = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs. Without a namespace: on this machine as it is."""

    rank: int
    host: str
    namespace: str | None
    variables: dict[str, str] = field(repr=False)
    # Of all hosts, by name.
    addresses: dict[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that did not end with 0; a negative code is the signal that ended it."""

    place: Place
    code: int

    @property
    def exit_code(self) -> int:
        """As a shell tells it: 128 + n stands for signal n."""
        return SHELL_SIGNAL_BASE - self.code if self.code < 0 else self.code

    def __str__(self) -> str:
        if self.code >= 0:
            return f"{self.place} failed with exit code {self.code}"
        with suppress(ValueError):
            return f"{self.place} was ended by signal {-self.code} ({signal.Signals(-self.code).name})"
        return f"{self.place} was ended by signal {-self.code}"


@dataclass(kw_only=True)
class _Process:
    place: Place
    pid: int
    pidfd: int
    code: int | None = None


class RankProcesses:
    """The processes of one program. Leaving the context ends those that still run, and all that they started."""

    def __init__(self) -> None:
        self._processes: list[_Process] = []

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def start(self, place: Place, action: Callable[[], object]) -> None:
        """``action()`` in a new process at ``place``. It ends with 0 when ``action`` returns."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        parent = os.getpid()
        # A handler that raises here would unroll the parent's own stack in the child, or lose the child's number.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *STOPPING})
        try:
            with warnings.catch_warnings():
                # Python warns of forks beside other threads. A rank uses none of the parent's.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _be_rank(place, parent, action)
            self._processes.append(_Process(place=place, pid=pid, pidfd=os.pidfd_open(pid)))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def wait(self, timeout: float) -> Failure | None:
        """Until all have ended with 0, or one has failed. That one is returned."""
        deadline = time.monotonic() + timeout
        while running := self._running():
            if not self._await_ends(deadline - time.monotonic()):
                names = ", ".join(str(process.place) for process in running)
                raise LabError(f"after {timeout:g} s there still ran {names}. They were ended; allow more time?")
            if any(process.code for process in self._processes):
                settled = time.monotonic() + SETTLE_SECONDS
                while self._running() and self._await_ends(settled - time.monotonic()):
                    pass
                break
        failures = [Failure(place=process.place, code=process.code) for process in self._processes if process.code]
        # A rank that a signal ended leaves the others with broken connections, and they fail within the same moment.
        return min(failures, key=lambda failure: failure.code > 0, default=None)

    def _running(self) -> list[_Process]:
        return [process for process in self._processes if process.code is None]

    def _await_ends(self, seconds: float) -> bool:
        """Note the codes of those that end; whether one did within ``seconds``."""
        poller = select.poll()
        by_descriptor = {process.pidfd: process for process in self._running()}
        for descriptor in by_descriptor:
            poller.register(descriptor, select.POLLIN)
        ended = poller.poll(max(0.0, seconds) * 1000)
        for descriptor, _ in ended:
            # Not reaped yet: its number stays taken until its process group is ended.
            result = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT)
            assert result is not None
            killed = result.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            by_descriptor[descriptor].code = -result.si_status if killed else result.si_status
        return bool(ended)

    def _end(self) -> None:
        for process in self._running():
            _signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while self._running() and self._await_ends(deadline - time.monotonic()):
            pass
        for process in self._processes:
            _signal_group(process.pid, signal.SIGKILL)
        for process in self._processes:
            os.waitpid(process.pid, 0)
            os.close(process.pidfd)
        self._processes.clear()


def _signal_group(pid: int, number: signal.Signals) -> None:
    # The first: a rank that has not got as far as making its group.
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def _be_rank(place: Place, parent: int, action: Callable[[], object]) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)
        os.setsid()
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *STOPPING})
        if place.namespace is not None:
            enter_host(place.namespace, place.host, place.addresses)
        os.environ.update(place.variables)
        action()
        code = 0
    except SystemExit as error:
        code = _code_of(error)
    except BaseException:
        print(f"gradsync: {place} failed:\n{traceback.format_exc()}", file=sys.stderr, end="")
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


def _code_of(error: SystemExit) -> int:
    """What Python itself makes of ``sys.exit(…)``."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


@contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process by SystemExit meanwhile, so that what it made is removed."""
    before: dict[signal.Signals, Any] = {}
    try:
        for number in STOPPING:
            # Only the main thread may, and a handler that somebody has set knows better.
            with suppress(ValueError):
                if signal.getsignal(number) is signal.SIG_DFL:
                    before[number] = signal.signal(number, _raise_once)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_once(number: int, frame: FrameType | None) -> None:
    # A second one would tear the removal that this one begins.
    for other in STOPPING:
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(SHELL_SIGNAL_BASE + number)
