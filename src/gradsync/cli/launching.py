"""Starts the ranks of a command on this node, passes signals on to them and returns their exit code.

torchrun's own layer of processes does the work (``torch.distributed.elastic.multiprocessing``), with the environment
that ``torchrun --standalone`` makes. Its agent above that is left out for three reasons: after a signal it forgets the
ranks' exit codes, so that a checkpoint that failed would look like one that was written; it takes ``$`` in arguments
for its own macros; and it listens for ranks on all interfaces, where loopback is enough.
"""

import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    SignalException,
    SubprocessContext,
    start_processes,
)

from gradsync.accelerator.environment import LOOPBACK, read_environment
from gradsync.errors import ConfigurationError

__all__ = ["inside_a_launch", "run_ranks_of", "usable_cores"]

# What a rank may take after a signal: to finish its step and to write a checkpoint.
GRACE_SECONDS = 60
POLL_SECONDS = 0.05
# After a first failure: those that fail because of it may be seen before it.
SETTLE_SECONDS = 0.1
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHELL_SIGNAL_BASE = 128

# What `python -m` does, and before that, since nobody else can: a rank must not outlive its launcher, not even one that
# was killed (1 is PR_SET_PDEATHSIG), and Ctrl-C while torch is imported is no reason for a traceback from every rank.
RANK_PROGRAM = """\
import ctypes, os, runpy, signal, sys
launcher, module, *arguments = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(launcher):
    sys.exit("gradsync: the launcher of this rank is gone")
sys.argv = [module, *arguments]
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


def inside_a_launch(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, mpirun or srun started this process: then it is a rank and launches nothing."""
    return read_environment(variables).launcher != "none"


def usable_cores() -> int:
    """The cores this process may run on, which a container or a job may have narrowed."""
    return len(os.sched_getaffinity(0))


def run_ranks_of(
    module: str,
    arguments: list[str],
    *,
    nproc: int,
    grace_seconds: int = GRACE_SECONDS,
    explained: Collection[int] = (),
) -> int:
    """Run ``nproc`` ranks of ``python -m module arguments`` here, and return the exit code for this process.

    It is 0 if all ranks ended with 0, else that of the rank that failed first; 128 + n stands for signal n, as in a
    shell. SIGINT, SIGTERM and SIGHUP go to all ranks as such. They then have ``grace_seconds`` to end by themselves; a
    second signal kills them at once. Must be called in the main thread, the only one that hears of signals.

    A line names the rank that failed, unless its exit code is among ``explained``: then it has said all there is.
    """
    if nproc < 1:
        raise ConfigurationError(f"nproc must be at least 1, got {nproc}")
    if inside_a_launch():
        raise ConfigurationError(
            "this process is a rank already (torchrun, mpirun or srun started it), so it starts no others. Run the "
            "command without them, or leave the number of ranks to them"
        )
    if nproc > usable_cores():
        _say(f"warning: {nproc} ranks share {usable_cores()} usable cores and will wait for each other")
    store = _loopback_store()
    try:
        with _quiet_torch(), _handlers_restored():
            return _Ranks(module, arguments, nproc, store.port, explained).run(grace_seconds)
    except SignalException as error:
        # Before all ranks had started. Those that had die with this process.
        return SHELL_SIGNAL_BASE + error.sigval


class _Ranks:
    """The processes of one launch."""

    def __init__(self, module: str, arguments: list[str], nproc: int, port: int, explained: Collection[int]) -> None:
        self._explained = explained
        self._signals: list[signal.Signals] = []
        ranks = range(nproc)
        run_id = uuid.uuid4().hex
        context = start_processes(
            name="gradsync",
            entrypoint=sys.executable,
            args=dict.fromkeys(ranks, ("-c", RANK_PROGRAM, str(os.getpid()), module, *arguments)),
            envs={rank: _rank_variables(rank, nproc, port, run_id) for rank in ranks},
            logs_specs=_StraightToTheTerminal(),
        )
        assert isinstance(context, SubprocessContext)
        self._context = context
        # From here on a signal is noted instead of raised, so that none can tear what follows.
        for number in PASSED_ON:
            signal.signal(number, self._note)

    def run(self, grace_seconds: int) -> int:
        while not self._signals:
            codes = self._exit_codes()
            if all(code == 0 for code in codes.values()):
                return 0
            if any(codes.values()):
                time.sleep(SETTLE_SECONDS)
                failures = {rank: code for rank, code in self._exit_codes().items() if code}
                self._context.close(signal.SIGTERM, timeout=grace_seconds)
                return self._explain(failures)
            time.sleep(POLL_SECONDS)
        self._context.close(self._signals[0], timeout=grace_seconds)
        # Without an exit code not even SIGKILL has ended it, as happens to processes that wait for a dead device.
        codes = {rank: -signal.SIGKILL if code is None else code for rank, code in self._exit_codes().items()}
        return self._explain({rank: code for rank, code in codes.items() if code}, self._signals[0])

    def _exit_codes(self) -> dict[int, int | None]:
        """By rank, None while it runs; a negative one is the signal that ended it."""
        return {rank: handler.proc.poll() for rank, handler in self._context.subprocess_handlers.items()}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(signal.Signals(number))
        being_stopped = len(self._signals) > 1 or any(self._exit_codes().values())
        if being_stopped:
            for process in self._context.pids().values():
                with suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)

    def _explain(self, failures: dict[int, int], passed_on: signal.Signals | None = None) -> int:
        """The exit code, and a line that names the rank it is from, unless it only says that a signal was obeyed."""
        obeyed = () if passed_on is None else (-passed_on, SHELL_SIGNAL_BASE + passed_on)
        # A rank that a signal ended leaves the others with broken connections, and they fail within the same moment.
        by_blame = sorted(failures.items(), key=lambda item: (item[1] in obeyed, item[1] > 0))
        if not by_blame:
            return 0
        rank, code = by_blame[0]
        if code == -signal.SIGKILL and len(self._signals) > 1:
            _say(f"the ranks were killed by the second {self._signals[1].name}, without time to finish")
        elif code == -signal.SIGKILL and passed_on is not None:
            _say(f"rank {rank} had not ended in time after {passed_on.name} and was killed")
        elif code < 0 and code not in obeyed:
            hint = ". Out of memory? The kernel's log (dmesg) says so" if code == -signal.SIGKILL else ""
            _say(f"rank {rank} was ended by signal {-code} ({_signal_name(-code)}); the others were stopped{hint}")
        elif code not in obeyed and code not in self._explained:
            _say(f"rank {rank} failed with exit code {code}; its own message is above")
        return SHELL_SIGNAL_BASE - code if code < 0 else code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "unnamed"


def _rank_variables(rank: int, nproc: int, port: int, run_id: str) -> dict[str, str]:
    """What torchrun --standalone sets."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "ROLE_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "ROLE_WORLD_SIZE": nproc,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_NAME": "default",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        # The launcher holds the meeting place, which so outlives every rank.
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        # Ranks share the cores: with as many threads as cores in each they fight over them.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    return {name: str(value) for name, value in variables.items()}


def _loopback_store() -> Any:
    """Where the ranks meet, open to this machine only."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class _StraightToTheTerminal(LogsSpecs):
    """No files, no prefixes: the ranks write where this process writes."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        terminal, nowhere = dict.fromkeys(envs, ""), dict.fromkeys(envs, os.devnull)
        return LogsDest(stdouts=terminal, stderrs=dict(terminal), error_files=nowhere)

    @property
    def root_log_dir(self) -> str:
        return os.devnull


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """torch logs every signal it sends; one line from here says what matters."""
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _handlers_restored() -> Iterator[None]:
    # SIGQUIT too: torch takes it as well.
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in (*PASSED_ON, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    print(f"gradsync: {line}", file=sys.stderr, flush=True)
