"""Ranks as processes: starts them with torchrun's environment, waits for them, ends them; errors name the rank.

A rank is forked from this process and dies with it, even if this process is killed; it may then :func:`become` another
program. It leads its own process group, so that everything it started can be ended with it.
"""

import ctypes
import math
import os
import signal
import socket
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from types import FrameType
from typing import IO, Any, NoReturn

import torch.distributed as dist

from gradsync.base.environment import LOOPBACK, RESTART_COUNT
from gradsync.health.watch.exit_causes import exit_status

__all__ = [
    *("PASSED_ON", "SHELL_SIGNAL_BASE", "Failure", "RankPlace", "RankProcesses", "become", "die_with_parent"),
    *("signals_raise", "standalone"),
]

# Those that fail because of a first failure may be seen before it, long before on a busy machine.
SETTLE_SECONDS = 0.3
GRACE_SECONDS = 5.0
# What a rank has started may need a moment to be gone after it was killed; not all systems tidy up after it.
ORPHAN_SECONDS = 1.0
# How soon a signal that was only noted is seen.
TICK_SECONDS = 0.05
STOPPING = (signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGINT, *STOPPING)
SHELL_SIGNAL_BASE = 128
# Of a launcher above this process: the ranks meet at a place of their own.
NOT_INHERITED = "TORCHELASTIC_"
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """The place of a rank: ``local`` is its number on its host and how many run there, ``node`` the same of the host.

    ``more`` are variables beside torchrun's. ``enter`` is called in the new process, to move it to its host; without it
    the rank runs on this machine as it is.
    """

    local: tuple[int, int]
    node: tuple[int, int] = (0, 1)
    master: tuple[str, int]
    host: str = ""
    more: Mapping[str, str] = field(default_factory=dict, repr=False)
    enter: Callable[[], None] | None = field(default=None, repr=False)

    @property
    def rank(self) -> int:
        return self.node[0] * self.local[1] + self.local[0]

    @property
    def variables(self) -> dict[str, str]:
        """What torchrun sets, and ``more``."""
        size = self.node[1] * self.local[1]
        variables = {
            "RANK": self.rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": self.local[0],
            "LOCAL_WORLD_SIZE": self.local[1],
            "GROUP_RANK": self.node[0],
            "GROUP_WORLD_SIZE": self.node[1],
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": size,
            "MASTER_ADDR": self.master[0],
            "MASTER_PORT": self.master[1],
            # Ranks share the cores: with as many threads as cores in each they fight over them.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        return {name: str(value) for name, value in variables.items()} | dict(self.more)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that did not end with 0; a negative code is the signal that ended it. ``at`` is when that was seen, as
    the time of day."""

    place: RankPlace
    code: int
    at: float = 0.0

    @property
    def exit_code(self) -> int:
        """The exit code as a shell has it: 128 + n stands for signal n."""
        return SHELL_SIGNAL_BASE - self.code if self.code < 0 else self.code

    def obeys(self, number: signal.Signals) -> bool:
        """Whether the failure only means that the signal was obeyed."""
        return self.exit_code == SHELL_SIGNAL_BASE + number

    def __str__(self) -> str:
        if self.code >= 0:
            return f"{self.place} failed with exit code {self.code}"
        name = ""
        with suppress(ValueError):  # a real-time signal
            name = f" ({signal.Signals(-self.code).name})"
        return f"{self.place} was ended by signal {-self.code}{name}"


@contextmanager
def standalone(ranks: int, restarts: tuple[int, int] = (0, 0)) -> Iterator[list[RankPlace]]:
    """The places of that many ranks on this machine, as ``torchrun --standalone`` makes them.

    They rendezvous at a store that is open to this machine only. This process holds it, so it outlives every rank.
    ``restarts``: how often they were started before, and how often they may be.
    """
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    more = {
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        RESTART_COUNT: str(restarts[0]),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    yield [RankPlace(local=(rank, ranks), master=(LOOPBACK, port), more=more) for rank in range(ranks)]
    del store  # held until here


@dataclass(kw_only=True)
class _Process:
    place: RankPlace
    pid: int
    pidfd: int
    code: int | None = None
    ended_at: float = 0.0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its group; to itself while it has not got as far as making one."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class RankProcesses:
    """The processes of one program. Leaving the context ends those still running, and everything they started.

    ``grace``: seconds that a rank may take to exit by itself once it has been asked to.
    """

    def __init__(self, grace: float = GRACE_SECONDS) -> None:
        self._grace, self._tick = grace, math.inf
        self._processes: list[_Process] = []
        self.signals: list[signal.Signals] = []

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        deadline = time.monotonic() + ORPHAN_SECONDS
        for process in self._processes:
            os.waitpid(process.pid, 0)
            os.close(process.pidfd)
            with suppress(ProcessLookupError):
                while time.monotonic() < deadline:
                    os.killpg(process.pid, 0)
                    time.sleep(0.001)
        self._processes.clear()

    def start(self, place: RankPlace, action: Callable[[], object]) -> None:
        """Run ``action()`` in a new process at ``place``. It ends with 0 when ``action`` returns."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        parent = os.getpid()
        # A handler that raises here would unroll the parent's own stack in the child, or lose the child's number.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
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

    def wait(self, timeout: float = math.inf) -> Failure | None:
        """Wait until all have exited with 0, one has failed, or a signal was noted. Returns the one that failed."""
        deadline = time.monotonic() + timeout
        while self._running() and not self.signals:
            self._await_ends(min(deadline - time.monotonic(), self._tick))
            if any(process.code for process in self._processes):
                self._await_all(SETTLE_SECONDS)
                break
            if time.monotonic() >= deadline and (running := self._running()):
                names = ", ".join(str(process.place) for process in running)
                raise TimeoutError(f"after {timeout:g} s there still ran {names}")
        return self.failure()

    def take_ended(self, timeout: float) -> list[tuple[RankPlace, int]]:
        """Wait at most ``timeout`` seconds for ranks to end; those that have, with their codes, are forgotten with all
        they have started. For a caller that goes on without them, or starts others in their places."""
        self._await_ends(min(timeout, self._tick))
        ended = [process for process in self._processes if process.code is not None]
        self._processes = [process for process in self._processes if process.code is None]
        for process in ended:
            process.signal(signal.SIGKILL)
            os.waitpid(process.pid, 0)
            os.close(process.pidfd)
        return [(process.place, process.code or 0) for process in ended]

    @property
    def count(self) -> int:
        """Ranks not yet seen to exit."""
        return len(self._running())

    def processes(self) -> dict[int, int]:
        """The number of each process, by rank."""
        return {process.place.rank: process.pid for process in self._processes}

    def send(self, number: signal.Signals, *, pause: float = 0.0) -> None:
        """Send a signal to all ranks still running, each with a ``pause`` to obey it before the next.

        A stopped rank is woken: it could not obey, and the others would wait for it until the end of the grace period.
        """
        for process in self._running():
            process.signal(number)
            if number in PASSED_ON:
                process.signal(signal.SIGCONT)
            time.sleep(pause)

    def failure(self) -> Failure | None:
        """The rank to blame of those that have failed; one that obeys a signal only if there is no other."""
        # A rank that a signal ended leaves the others with broken connections, and they fail within the same moment.
        return min(
            self.failures(),
            key=lambda each: (any(map(each.obeys, self.signals)), each.code > 0, each.at),
            default=None,
        )

    def failures(self) -> list[Failure]:
        """The failures of all ranks that have failed until now."""
        return [Failure(place=each.place, code=each.code, at=each.ended_at) for each in self._processes if each.code]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask all running ranks to exit, and kill what is left after the grace period, and children of exited ranks."""
        self.send(number)
        self.running_after(self._grace)
        self.kill()

    def running_after(self, seconds: float) -> list[RankPlace]:
        """The ranks that have not ended by themselves within ``seconds``."""
        self._await_all(seconds)
        return [process.place for process in self._running()]

    def kill(self) -> None:
        """Kill all running ranks, and what exited ones have started."""
        for process in self._processes:
            process.signal(signal.SIGKILL)
        self._await_all(math.inf)

    @contextmanager
    def noting_signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP are kept in ``signals`` meanwhile, and end :meth:`wait`, instead of being raised.

        One that comes while ranks are being stopped kills them at once. For the main thread, the only one that gets
        signals.
        """

        def note(number: int, frame: FrameType | None) -> None:
            self.signals.append(signal.Signals(number))
            if len(self.signals) > 1 or self.failure() is not None:
                for process in self._processes:
                    process.signal(signal.SIGKILL)

        before: dict[signal.Signals, Any] = {number: signal.signal(number, note) for number in PASSED_ON}
        self._tick = TICK_SECONDS
        try:
            yield
        finally:
            self._tick = math.inf
            for number, handler in before.items():
                signal.signal(number, handler)

    def _running(self) -> list[_Process]:
        return [process for process in self._processes if process.code is None]

    def _await_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running() and self._await_ends(deadline - time.monotonic()):
            pass

    def _await_ends(self, seconds: float) -> bool:
        """Note the codes of those that end; whether one did within ``seconds``."""
        running = self._running()
        ended = connection.wait([process.pidfd for process in running], None if seconds == math.inf else seconds)
        seen_at = time.time()
        for process in (process for process in running if process.pidfd in ended):
            # Not reaped yet: its number stays taken until its process group is ended.
            result = os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOWAIT)
            assert result is not None
            killed = result.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            process.code, process.ended_at = -result.si_status if killed else result.si_status, seen_at
        return bool(ended)


def _be_rank(place: RankPlace, parent: int, action: Callable[[], object]) -> NoReturn:
    code = 1
    try:
        # However the parent ends, also before this line.
        die_with_parent()
        if os.getppid() != parent:
            os._exit(SHELL_SIGNAL_BASE + signal.SIGKILL)
        os.setsid()
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL)
        if callable(signal.getsignal(signal.SIGINT)):
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        if place.enter is not None:
            place.enter()
        for name in [name for name in os.environ if name.startswith(NOT_INHERITED)]:
            del os.environ[name]
        os.environ.update(place.variables)
        action()
        code = 0
        _say_goodbye()
    except SystemExit as error:
        code = exit_status(error)
        _say_goodbye(error)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt as error:
        code = SHELL_SIGNAL_BASE + signal.SIGINT
        _say_goodbye(error)
    except BaseException as error:
        _say_goodbye(error)
        print(f"gradsync: {place} failed:\n{traceback.format_exc()}", file=sys.stderr, end="")
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


def _say_goodbye(error: BaseException | None = None) -> None:
    """Say goodbye to the ranks that watch this one, which else would take its end for that of a killed process."""
    # A process that has imported no watch has none; the launcher itself must not import it.
    watch = sys.modules.get("gradsync.health.watch")
    if watch is not None:
        with suppress(Exception):
            watch.say_goodbye(error)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process ``number`` when the thread that started it ends. Linux only."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(number))


def become(path: str, command: list[str], stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> NoReturn:
    """Turn this process, a rank, into a program without input, whose output goes here unless files are given."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, file in ((1, stdout), (2, stderr)):
        if file is not None:
            os.dup2(file.fileno(), number)
    # Python ignores it, other programs do not expect that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execv(path, command)


@contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process by SystemExit meanwhile, so that what it made is removed."""
    before: dict[signal.Signals, Any] = {}
    try:
        for number in STOPPING:
            # Only the main thread may, and a handler that was set before takes precedence.
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
