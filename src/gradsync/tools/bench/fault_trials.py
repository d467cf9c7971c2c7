"""One trial: a launcher starts the ranks' program, a fault hits one rank, and notes record what happens to it.

All processes of a trial carry a mark in their environment, which identifies those that outlive it, and use a folder of
their own for temporary files.

The setups compared differ in who synchronizes and who starts the ranks. *Stock* is a script that follows the tutorials.
*Tuned* is what torch offers against the same faults: a new store for every restart of the ranks, without which ranks
that torchrun restarts read the addresses of the dead ones from it; a monitored barrier before every backward, which
names the ranks that do not arrive; and a check of the gradients' norm before every step, which raises if it is not
finite. (``TORCH_DISTRIBUTED_DEBUG=DETAIL`` would name ranks, too, but torch 2.13's wrapper crashes under it, here at
least.) *Elastic* are setups whose ranks continue without a lost one: torchft's own wrapper, and
``Accelerator(elastic=…)``.
"""

import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

from gradsync.health.elastic import LIGHTHOUSE, Elastic, Lighthouse
from gradsync.tools.bench.fault_outcomes import ElasticJudge, FaultOutcome, Judge, Limits, has_noticed
from gradsync.tools.bench.fault_program import (
    CUT_LINK,
    ELASTIC,
    EVENTS,
    HOST,
    PAUSE_SECONDS,
    PROGRAM,
    RANKS,
    REPLICA,
    TORCHFT,
    Fault,
    TrialSettings,
)
from gradsync.tools.bench.peers import DDP, OURS, TUNED, Accelerate
from gradsync.tools.lab.host import places_on
from gradsync.tools.lab.lab import Lab
from gradsync.tools.launch import RankProcesses, become

__all__ = ["AGAINST_FAULTS", "RESTARTS", "SETUPS", "Trial", "outcomes", "run_replicas"]

MARK = "FAULTS_TRIAL_MARK"
SHARED_MEMORY = Path("/dev/shm")
POLL_SECONDS = 0.02
# What is gone by then was only on its way.
VANISH_SECONDS = 3.0
# Of torchft's ranks, once one has come to the end.
GRACE_SECONDS, REPLICA_POLL_SECONDS = 5.0, 0.1

RESTARTS = 3
AGAINST_FAULTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One of the setups compared. ``launcher`` are the arguments of Python that start its ranks, before the settings;
    ``variables`` what these find in the environment; ``judge`` says what going on is. ``needs`` is a module."""

    name: str
    launcher: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    judge: type[Judge] = Judge
    needs: str = ""

    def absent(self, case: str) -> str | None:
        """Why it cannot take part, or None."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return "not installed"
        return "not measured between hosts" if case == CUT_LINK and self.judge is ElasticJudge else None


def _calling(module: str, call: str) -> tuple[str, str]:
    """Python's arguments for the call of a function."""
    return "-c", f"import sys; from gradsync.tools.{module} import {call.partition('(')[0]}; sys.exit({call})"


_TORCHRUN = (
    *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"),
    *(f"--max-restarts={RESTARTS}", "-m", PROGRAM),
)
# The launchers of `gradsync train`, and of `gradsync train --elastic`.
_OURS = _calling("cli.launching", f"run_ranks_of({PROGRAM!r}, sys.argv[1:], nproc={RANKS}, max_restarts={RESTARTS})")
_OURS_ELASTIC = _calling(
    "cli.launching",
    f"run_elastic_ranks_of({PROGRAM!r}, sys.argv[1:], nproc={RANKS}, ranks={RANKS}, min_ranks=1)",
)
_REPLICAS = _calling("bench.fault_trials", "run_replicas(sys.argv[1])")
SETUPS = {
    each.name: each
    for each in (
        Setup(name=OURS, launcher=_OURS),
        Setup(name=DDP().name, launcher=_TORCHRUN),
        Setup(name=TUNED, launcher=_TORCHRUN, variables=AGAINST_FAULTS),
        Setup(name=Accelerate().name, launcher=_TORCHRUN, needs=Accelerate().needs),
        # gradsync's lighthouse is that of torchft.
        Setup(name=ELASTIC, launcher=_OURS_ELASTIC, judge=ElasticJudge, needs=TORCHFT),
        Setup(name=TORCHFT, launcher=_REPLICAS, judge=ElasticJudge, needs=TORCHFT),
    )
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One fault for one of the setups. With a ``lab`` its ranks run on the hosts of it."""

    peer: str
    case: str
    seed: int
    limits: Limits = field(default_factory=Limits)
    lab: Lab | None = None

    @property
    def fault(self) -> Fault:
        return Fault.draw(self.case, self.seed, RANKS)

    def run(self, is_wanted: Callable[[], bool] = lambda: True) -> FaultOutcome | None:
        """Run the trial; None if ranks did not get as far as the fault. It is given up when no longer wanted."""
        try:
            return self._run(is_wanted)
        finally:
            if self.case == CUT_LINK and self.lab is not None:
                self.lab.heal(self.fault.victim)

    def _run(self, is_wanted: Callable[[], bool]) -> FaultOutcome | None:
        fault, setup = self.fault, SETUPS[self.peer]
        mark = f"{os.getpid()}-{secrets.token_hex(4)}"
        with tempfile.TemporaryDirectory(prefix="gradsync-faults-") as name:
            folder, temporary = Path(name), Path(name, "tmp")
            temporary.mkdir()
            settings = TrialSettings(peer=self.peer, folder=name, timeout=self.limits.timeout, fault=fault).as_json()
            variables = {MARK: mark, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", **setup.variables}
            with (folder / "output").open("wb") as output:
                start = self._fork if self.case == CUT_LINK else self._launch
                with start(settings, variables, output) as is_running:
                    self._attend(folder, lambda: is_running() and is_wanted())
            own = {int(each["process"]) for each in _events(folder)}
            left = left_behind(mark, temporary, own)
            for process in _marked(mark):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            written = (folder / "output").read_text(errors="replace")
            outcome = setup.judge(fault, self.limits).judge(_events(folder), written)
        return None if outcome is None else replace(outcome, left=left)

    # -- processes ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _launch(self, settings: str, variables: dict[str, str], output: IO[bytes]) -> "Iterator[Callable[[], bool]]":
        command = [sys.executable, *SETUPS[self.peer].launcher, settings]
        environment = {**os.environ, **variables, "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            yield lambda: process.poll() is None
        finally:
            _end([process], 10.0)

    @contextmanager
    def _fork(self, settings: str, variables: dict[str, str], output: IO[bytes]) -> "Iterator[Callable[[], bool]]":
        """Fork the ranks on the hosts of a lab, without a launcher: one rank a host, and none is started again."""
        assert self.lab is not None
        command = [sys.executable, "-m", PROGRAM, settings]

        def run() -> None:
            os.environ.update(variables)
            become(sys.executable, command, output, output)

        with RankProcesses(grace=2.0) as ranks:
            for place in places_on(self.lab.hosts, 1):
                ranks.start(place, run)
            yield lambda: bool(ranks.running_after(0.0))

    # -- what happens meanwhile ---------------------------------------------------------------------------------------

    def _attend(self, folder: Path, goes_on: Callable[[], bool]) -> None:
        """Wait until the program has ended, or nothing is to be expected of it any more."""
        deadline, fault = time.monotonic() + self.limits.start, None
        while goes_on() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            if fault is None:
                fault = next((each for each in _events(folder) if each["what"] == "fault"), None)
                if fault is not None:
                    deadline = float(fault["at"]) + self.limits.notice + self.limits.going_on
                    self._take_part(fault)
            elif self.case == CUT_LINK and has_noticed(_events(folder), self.fault, float(fault["at"])):
                # Nobody starts these ranks again.
                return

    def _take_part(self, fault: dict[str, Any]) -> None:
        """Do to a rank what it cannot do to itself."""
        if self.case == CUT_LINK and self.lab is not None:
            self.lab.cut(self.fault.victim)
        elif self.case == "pause":
            wake = partial(_wake, int(fault["process"]))
            timer = threading.Timer(max(0.0, float(fault["at"]) + PAUSE_SECONDS - time.monotonic()), wake)
            timer.daemon = True
            timer.start()


def _wake(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGCONT)


def _end(processes: "Sequence[subprocess.Popen[bytes]]", seconds: float) -> None:
    """End the processes as a user would: ask, then force them."""
    for each in processes:
        if each.poll() is None:
            each.terminate()
    deadline = time.monotonic() + seconds
    for each in processes:
        with suppress(subprocess.TimeoutExpired):
            each.wait(max(0.0, deadline - time.monotonic()))
        if each.poll() is None:
            each.kill()
            each.wait()


# -- what came of it --------------------------------------------------------------------------------------------------


def _events(folder: Path) -> list[dict[str, Any]]:
    found = []
    with suppress(FileNotFoundError):
        for line in (folder / EVENTS).read_text().splitlines():
            # The last one may be under way.
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


# -- what is left -----------------------------------------------------------------------------------------------------


def left_behind(mark: str, temporary: Path, processes: Collection[int]) -> tuple[str, ...]:
    """Processes with the mark, temporary files, and shared memory of these ``processes``, after a moment."""
    deadline = time.monotonic() + VANISH_SECONDS
    while True:
        found = [f"process {process}" for process in _marked(mark)]
        # What torch compiles, or might, it keeps on purpose.
        found += [f"file {path.name}" for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
        found += [f"shared memory {name}" for name in _shared_memory(processes)]
        if not found or time.monotonic() > deadline:
            return tuple(found)
        time.sleep(0.1)


def _marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _shared_memory(processes: Collection[int]) -> list[str]:
    """What torch has left. It names its memory by the process; gradsync's has no name that could stay."""
    names = [path.name for path in SHARED_MEMORY.iterdir()] if SHARED_MEMORY.is_dir() else []
    owned = {name: name.split("_")[1:2] for name in names if name.startswith("torch_")}
    return sorted(name for name, owner in owned.items() if owner and owner[0] in {str(each) for each in processes})


# -- several trials ----------------------------------------------------------------------------------------------------


def outcomes(planned: Sequence[Trial], jobs: int, deadline: float) -> Iterator[tuple[Trial, FaultOutcome | None]]:
    """The outcomes as they come. Only trials of the first seed begin after the deadline, to have something to show."""
    stop = threading.Event()

    def run(each: Trial) -> tuple[Trial, FaultOutcome | None] | None:
        if stop.is_set() or (each.seed and time.monotonic() > deadline):
            return None
        return each, each.run(lambda: not stop.is_set())

    if jobs == 1:
        # The fork enters the host, and only the first thread may fork.
        yield from filter(None, map(run, planned))
        return
    with ThreadPoolExecutor(jobs, thread_name_prefix="trial") as pool:
        try:
            for future in as_completed([pool.submit(run, each) for each in planned]):
                found = future.result()
                if found is not None:
                    yield found
        finally:
            # A caller that stops reading does not wait for the remaining trials.
            stop.set()
            pool.shutdown(cancel_futures=True)


# -- torchft's ranks ---------------------------------------------------------------------------------------------------


def run_replicas(settings: str) -> int:
    """Start ranks the way torchft expects: a lighthouse, and every rank a replica group under its own torchrun.

    torchrun restarts its rank. When one rank has reached the end, all have, or are on their way in and no longer
    needed.
    """
    # As gradsync's elastic ranks have it: it takes ranks for lost sooner than that of torchft's example.
    lighthouse = Lighthouse(HOST, min_ranks=1, join_seconds=Elastic().timeout)
    replicas = [_start(rank, lighthouse.address, settings) for rank in range(RANKS)]
    signal.signal(signal.SIGTERM, _leave)
    try:
        _wait(replicas)
    finally:
        _end(replicas, GRACE_SECONDS)
        lighthouse.close()
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _start(rank: int, lighthouse: str, settings: str) -> "subprocess.Popen[bytes]":
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--local-addr={HOST}", "--nproc-per-node=1"]
    command = [sys.executable, *torchrun, f"--max-restarts={RESTARTS}", "-m", PROGRAM, settings]
    return subprocess.Popen(command, env={**os.environ, LIGHTHOUSE: lighthouse, REPLICA: str(rank)})


def _wait(replicas: "list[subprocess.Popen[bytes]]") -> None:
    """Wait until all have ended, or a little longer than the first that came to the end."""
    finished: float | None = None
    while any(each.poll() is None for each in replicas):
        time.sleep(REPLICA_POLL_SECONDS)
        if any(each.poll() == 0 for each in replicas):
            finished = finished or time.monotonic()
        if finished is not None and time.monotonic() - finished > GRACE_SECONDS:
            return
