"""Starts the ranks of a command on this node, fixed or elastic; passes signals on and returns their exit code.

The ranks are what ``torchrun --standalone`` makes of a module: the same variables, and a store to meet at that their
launcher holds. So torch.distributed takes them for torchrun's, and what runs under torchrun runs here unchanged.
torchrun's agent is left out for three reasons: after a signal it forgets the ranks' exit codes, so that a checkpoint
that failed would look like one that was written; it takes ``$`` in arguments for its own macros; and it listens for
ranks on all interfaces, where loopback is enough. The layer of processes below it, a ``Popen`` a rank, can neither
fork a function nor enter the network of a host, so :mod:`gradsync.tools.launch` starts all ranks of gradsync.
"""

import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from gradsync.base.environment import LOOPBACK, RESTART_COUNT, read_environment
from gradsync.base.errors import ConfigurationError
from gradsync.communicator.logs import join_names
from gradsync.health.elastic import LIGHTHOUSE, Elastic, Lighthouse
from gradsync.tools.cli.failure_message import WRONG_USE, ExitStatements, FailureReport, refusing
from gradsync.tools.lab.gpu import SharedGpu, SharedGpuPlan
from gradsync.tools.launch import SHELL_SIGNAL_BASE, Failure, RankPlace, RankProcesses, standalone

__all__ = [
    *("MPS_HELP", "ONE_GPU_HELP", "GpuChoice", "inside_a_launch", "run_elastic_ranks_of", "run_ranks_of"),
    "usable_cores",
]

# What a rank may take after a signal: to finish its step and to write a checkpoint.
GRACE_SECONDS = 60
# After a failure there is nothing to finish: the others only say what they saw of it.
FAILURE_SECONDS = 5
# If those that have failed have only lost another rank: how long that one has to say why, before it is asked to end.
CAUSE_SECONDS = 3
LOOK_SECONDS = 0.05
# Of one machine. Far more than anybody wants: each is a process that has imported torch.
MOST_RANKS = 10_000
# After which a message says what is waited for.
SLOW_SECONDS = 5
# Without a GPU and a number, unless there are fewer cores.
MOST_CPU_RANKS = 4
ONE_GPU_HELP = "Run several NCCL ranks on one GPU, in turns, to try out multi-GPU code."
MPS_HELP = "With --one-gpu: run them side by side, under a private MPS daemon."
SHOW_CURSOR = "\x1b[?25h"
# Elastic ranks: one that fails for a reason of its own would fail for ever.
MOST_REPLACED = 1000
# With an error of its own, so soon after its start, it has done nothing. Three in a row, and it is no accident.
HOPELESS_SECONDS, HOPELESS = 20.0, 3

# What `python -m` does, except that Ctrl-C while torch is imported is no reason for a traceback from every rank.
RANK_PROGRAM = """\
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


def inside_a_launch() -> bool:
    """Whether torchrun, mpirun or srun started this process: then it is a rank and launches nothing."""
    return read_environment().launcher != "none"


def usable_cores() -> int:
    """The cores this process may run on, which a container or a job may have narrowed."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class GpuChoice:
    """Which GPUs a user has asked for."""

    one_gpu: bool = False
    mps: bool = False
    cpu: bool = False

    def __post_init__(self) -> None:
        if self.mps and not self.one_gpu:
            raise ConfigurationError("--mps says how ranks share a GPU: give --one-gpu, too")
        if self.one_gpu and self.cpu:
            raise ConfigurationError("--one-gpu puts all ranks on a GPU, and --cpu none: choose one of them")

    @property
    def default_ranks(self) -> int:
        if self.one_gpu:
            return SharedGpuPlan().ranks
        gpus = 0 if self.cpu else torch.cuda.device_count()
        return gpus or min(usable_cores(), MOST_CPU_RANKS)

    def sharing(self, ranks: int) -> SharedGpuPlan | None:
        """How these ranks share a GPU; None if they do not."""
        if not self.one_gpu:
            return None
        if torch.cuda.device_count() == 0:
            raise ConfigurationError("--one-gpu needs a GPU, and torch sees none here")
        with refusing("--nproc"):
            return SharedGpuPlan(ranks=ranks, mps=self.mps)

    def too_many(self, ranks: int) -> str:
        """The message about more ranks than GPUs; empty if there are enough, or none is wanted."""
        gpus = 0 if self.cpu or self.one_gpu else torch.cuda.device_count()
        if not 0 < gpus < ranks:
            return ""
        there = "there is 1" if gpus == 1 else f"there are {gpus}"
        return f"{ranks} ranks need {ranks} GPUs, and {there}: say --one-gpu to share one"


def run_ranks_of(
    module: str,
    arguments: list[str],
    *,
    nproc: int,
    grace_seconds: int = GRACE_SECONDS,
    explained: Collection[int] = (),
    max_restarts: int = 0,
    sharing: SharedGpuPlan | None = None,
) -> int:
    """Run ``nproc`` ranks of ``python -m module arguments`` here, and return the exit code for this process.

    It is 0 if all ranks ended with 0, else that of the rank that failed first; 128 + n stands for signal n, as in a
    shell. SIGINT, SIGTERM and SIGHUP go to all ranks as such. They then have ``grace_seconds`` to end by themselves; a
    second signal kills them at once. Must be called in the main thread, the only one that hears of signals.

    Of ranks that leave exit records, the error of the first that failed is shown, and a line for each other one. Else a
    line names the rank that failed, unless its exit code is among ``explained``: then it has printed its own message.
    After a failure (not a signal to this process), all ranks are started again, ``max_restarts`` times at most, and see
    that in torchrun's variable. Not after invalid input, which would be refused again.

    ``sharing``: the ranks share a GPU in this way. Each then is alone on its node, as far as it can tell.
    """
    if not 1 <= nproc <= MOST_RANKS:
        raise ConfigurationError(f"--nproc must be at least 1 and at most {MOST_RANKS:,}, got {nproc}")
    if max_restarts < 0:
        raise ConfigurationError(f"--max-restarts must be at least 0, got {max_restarts}")
    if inside_a_launch():
        raise ConfigurationError(
            "this process is a rank already (torchrun, mpirun or srun started it), so it starts no others. Run the "
            "command without them, or leave the number of ranks to them"
        )
    if nproc > usable_cores():
        _say(f"warning: {nproc} ranks share {usable_cores()} usable cores and will wait for each other")
    command = [sys.executable, "-c", RANK_PROGRAM, module, *arguments]
    failure: Failure | None = None
    for count in range(max_restarts + 1):
        with (
            ExitStatements(nproc) as records,
            standalone(nproc, (count, max_restarts)) as places,
            nullcontext() if sharing is None else SharedGpu(sharing) as gpu,
            RankProcesses(grace_seconds) as ranks,
        ):
            places = places if gpu is None else gpu.share(places)
            places = [replace(each, more={**each.more, **records.variables(each.rank)}) for each in places]
            failure_report = _run(ranks, places, command, grace_seconds, records)
        if not failure_report.failed:
            return 0
        failure = failure_report.first
        _report(failure_report, places, explained)
        if failure_report.signals or failure.code == WRONG_USE or count == max_restarts:
            break
        _say(f"all ranks are started again (restart {count + 1} of {max_restarts})")
    assert failure is not None
    return failure.exit_code


def _run(
    ranks: RankProcesses, places: Sequence[RankPlace], command: list[str], grace: float, records: ExitStatements
) -> FailureReport:
    """The ranks from their start to the end of all: which have failed, and the signals that had come before."""
    with ranks.noting_signals():
        for place in places:
            ranks.start(place, partial(os.execv, sys.executable, command))
        records.publish(ranks.processes())
        ranks.wait()
        early = _await_cause(ranks, records, min(grace, CAUSE_SECONDS)) if ranks.failures() else []
        signals, stopped_at = [] if early else ranks.signals, time.time()
        _end(ranks, signals, grace)
        return FailureReport(
            early=early, failures=ranks.failures(), records=records.read(), signals=signals, stopped_at=stopped_at
        )


def _await_cause(ranks: RankProcesses, records: ExitStatements, seconds: float) -> list[Failure]:
    """The ranks that failed by themselves. If they have only lost another rank, that one has ``seconds`` to say why:
    its connections may be closed long before it ends, by a ``finally``."""
    deadline = time.monotonic() + seconds
    while (
        not FailureReport(early=[], failures=ranks.failures(), records=records.read()).has_cause
        and not ranks.signals
        and time.monotonic() < deadline
        and ranks.running_after(LOOK_SECONDS)
    ):
        pass
    return ranks.failures()


def _end(ranks: RankProcesses, signals: Sequence[signal.Signals], grace: float) -> None:
    """Have all ranks end by themselves, and kill those that do not."""
    ranks.send(signals[0] if signals else signal.SIGTERM)
    if not signals:
        ranks.running_after(min(grace, FAILURE_SECONDS))
    elif grace > SLOW_SECONDS and (late := ranks.running_after(SLOW_SECONDS)) and len(signals) == 1:
        names = join_names([str(place) for place in late])
        verb = "finishes its step" if len(late) == 1 else "finish their step"
        _say(f"{names} still {verb}, and write a checkpoint. A second Ctrl-C or SIGTERM kills without one")
        ranks.running_after(grace - SLOW_SECONDS)
    elif signals:
        ranks.running_after(grace)
    ranks.kill()


def _report(failure_report: FailureReport, places: Sequence[RankPlace], explained: Collection[int]) -> None:
    failure, passed_on = failure_report.first, failure_report.signals
    lines = failure_report.lines(places)
    # That a signal was obeyed needs no message.
    if failure_report.explanation is None and failure.code not in explained:
        lines = [*([] if any(map(failure.obeys, passed_on)) else [_failure_line(failure_report)]), *lines]
    if lines and sys.stderr.isatty():
        # Rank 0 may have been in the middle of a line, with the cursor hidden.
        print(SHOW_CURSOR, file=sys.stderr)
    for line in lines:
        _say(line)


def _failure_line(failure_report: FailureReport) -> str:
    failure, passed_on = failure_report.first, failure_report.signals
    killed = failure.code == -signal.SIGKILL
    if killed and len(passed_on) > 1:
        return f"the ranks were killed by the second {passed_on[1].name}, without time to finish"
    if killed and passed_on:
        return f"{failure.place} had not ended in time after {passed_on[0].name} and was killed"
    if failure.place.rank in failure_report.records:
        return f"{failure}, after its script had ended"
    if failure.code > 0 and failure_report.records:
        return f"{failure}, and left no error: it called os._exit(), or a library of its did"
    if failure.code > 0:
        return f"{failure}; its own message is above"
    hint = ". Out of memory? The kernel's log (dmesg) says so" if killed else ""
    return f"{failure}; the others were stopped{hint}"


# -- elastic ranks ----------------------------------------------------------------------------------------------------


def run_elastic_ranks_of(module: str, arguments: list[str], *, nproc: int, ranks: int, min_ranks: int) -> int:
    """Run ``nproc`` ranks of ``python -m module arguments`` here, of ``ranks`` on all nodes; returns the exit code.

    It is 0 when ranks have ended with 0. A rank that fails or is killed is started again while the others go on.
    SIGINT, SIGTERM and SIGHUP go to all of them, and end the run. When one rank has finished, the run is over: the
    others end by themselves, and one that is on its way in is not needed any more.

    This launcher holds torchft's lighthouse, unless ``TORCHFT_LIGHTHOUSE`` says where one is: then several nodes share
    it, and each replaces its own ranks.
    """
    if ranks < nproc:
        raise ConfigurationError(f"--elastic-ranks is {ranks}, but {nproc} ranks are started on this node alone")
    if min_ranks > ranks:
        raise ConfigurationError(f"--min-ranks is {min_ranks}, but there are to be only {ranks} ranks at the beginning")
    with _lighthouse(min_ranks) as address, standalone(nproc) as places, RankProcesses(GRACE_SECONDS) as processes:
        more = {LIGHTHOUSE: address, "WORLD_SIZE": str(ranks)}
        here = [replace(place, more={**place.more, **more}) for place in places]
        command = [sys.executable, "-c", RANK_PROGRAM, module, *arguments]
        return _Crew(processes=processes, command=command).run(here)


@contextmanager
def _lighthouse(min_ranks: int) -> Iterator[str]:
    given = os.environ.get(LIGHTHOUSE)
    if given:
        yield given
        return
    lighthouse = Lighthouse(LOOPBACK, min_ranks=min_ranks, join_seconds=Elastic().timeout)
    try:
        yield lighthouse.address
    finally:
        lighthouse.close()


@dataclass(kw_only=True)
class _Crew:
    """The ranks of this node."""

    processes: RankProcesses
    command: list[str]
    replaced: int = 0
    hopeless: int = 0

    def run(self, places: list[RankPlace]) -> int:
        began: dict[int, float] = {}
        with self.processes.noting_signals():
            for place in places:
                self._start(place, began)
            finished: float | None = None
            while self.processes.count and not self.processes.signals:
                for place, code in self.processes.take_ended(1.0):
                    if code == 0:
                        finished = finished or time.monotonic()
                    elif finished is None:
                        failure = Failure(place=place, code=code)
                        if not self._may_replace(failure, time.monotonic() - began[place.rank]):
                            self.processes.stop()
                            return failure.exit_code
                        again = {**place.more, RESTART_COUNT: str(self.replaced)}
                        self._start(replace(place, more=again), began)
                if finished is not None and time.monotonic() - finished > GRACE_SECONDS:
                    break
            return self._end(finished)

    def _start(self, place: RankPlace, began: dict[int, float]) -> None:
        began[place.rank] = time.monotonic()
        self.processes.start(place, partial(os.execv, sys.executable, self.command))

    def _may_replace(self, failure: Failure, lived: float) -> bool:
        if failure.code == WRONG_USE:
            return False
        self.hopeless = self.hopeless + 1 if failure.code > 0 and lived < HOPELESS_SECONDS else 0
        if self.hopeless >= HOPELESS:
            _say(f"{failure}; {self.hopeless} ranks in a row have failed soon after their start, so the run ends")
            return False
        if self.replaced >= MOST_REPLACED:
            _say(f"{failure}; {self.replaced} ranks have been replaced in this run, so it ends")
            return False
        self.replaced += 1
        _say(f"{failure}; the others go on, and it is started again")
        return True

    def _end(self, finished: float | None) -> int:
        signals = self.processes.signals
        self.processes.stop(signals[0] if signals else signal.SIGTERM)
        if finished is not None:
            return 0
        failure = self.processes.failure()
        if failure is not None:
            return failure.exit_code
        return SHELL_SIGNAL_BASE + signals[0] if signals else 0


def _say(line: str) -> None:
    print(f"gradsync: {line}", file=sys.stderr, flush=True)
