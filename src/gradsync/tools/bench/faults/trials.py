"""One trial: a launcher starts the ranks' program, a fault hits one rank, and notes record what happens to it.

All processes of a trial carry a mark in their environment, which identifies those that outlive it, and use a folder of
their own for temporary files.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from gradsync.tools.bench.faults.cases import CUT_LINK, PAUSE_SECONDS, Fault
from gradsync.tools.bench.faults.contenders import CONTENDERS, PROGRAM
from gradsync.tools.bench.faults.judging import Limits, Outcome, has_noticed
from gradsync.tools.bench.faults.program import EVENTS, Settings
from gradsync.tools.lab import Lab
from gradsync.tools.lab.host import places_on
from gradsync.tools.launch import RankProcesses, become

__all__ = ["Trial", "left_behind"]

MARK = "FAULTS_TRIAL_MARK"
SHARED_MEMORY = Path("/dev/shm")
POLL_SECONDS = 0.02
# What is gone by then was only on its way.
VANISH_SECONDS = 3.0


@dataclass(kw_only=True)
class Trial:
    """One fault for one of those who are compared. With a ``lab`` its ranks run on the hosts of it. It is given up when
    it is not wanted any more."""

    peer: str
    fault: Fault
    limits: Limits = field(default_factory=Limits)
    lab: Lab | None = None
    is_wanted: Callable[[], bool] = lambda: True

    def run(self) -> Outcome | None:
        """None if the ranks did not get as far as the fault."""
        mark = f"{os.getpid()}-{secrets.token_hex(4)}"
        with tempfile.TemporaryDirectory(prefix="gradsync-faults-") as name:
            folder, temporary = Path(name), Path(name, "tmp")
            temporary.mkdir()
            settings = Settings(peer=self.peer, folder=name, timeout=self.limits.timeout, fault=self.fault).as_json()
            variables = {MARK: mark, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
            variables |= CONTENDERS[self.peer].variables
            with (folder / "output").open("wb") as output:
                start = partial(self._launch, settings, variables, output)
                if self.fault.case == CUT_LINK:
                    start = partial(self._fork, settings, variables, output)
                with start() as is_running:
                    self._attend(folder, is_running)
            own = {int(each["process"]) for each in _events(folder)}
            left = left_behind(mark, temporary, own)
            for process in _marked(mark):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            said = (folder / "output").read_text(errors="replace")
            outcome = CONTENDERS[self.peer].judge(self.fault, self.limits).judge(_events(folder), said)
        return None if outcome is None else replace(outcome, left=left)

    # -- processes ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _launch(self, settings: str, variables: dict[str, str], output: IO[bytes]) -> "Iterator[Callable[[], bool]]":
        command = [sys.executable, *CONTENDERS[self.peer].launcher, settings]
        environment = {**os.environ, **variables, "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            yield lambda: process.poll() is None
        finally:
            _end(process)

    @contextmanager
    def _fork(self, settings: str, variables: dict[str, str], output: IO[bytes]) -> "Iterator[Callable[[], bool]]":
        """On the hosts of a lab, without a launcher of anybody's: one rank a host, and none is started again."""
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

    def _attend(self, folder: Path, is_running: Callable[[], bool]) -> None:
        """Until the program has ended, or nothing is to be expected of it any more."""
        deadline, fault = time.monotonic() + self.limits.start, None
        while is_running() and time.monotonic() < deadline and self.is_wanted():
            time.sleep(POLL_SECONDS)
            if fault is None:
                fault = next((each for each in _events(folder) if each["what"] == "fault"), None)
                if fault is not None:
                    deadline = float(fault["at"]) + self.limits.notice + self.limits.going_on
                    self._take_part(fault)
            elif self.fault.case == CUT_LINK and has_noticed(_events(folder), self.fault, float(fault["at"])):
                # Nobody starts these ranks again.
                return

    def _take_part(self, fault: dict[str, Any]) -> None:
        """What a rank cannot do to itself."""
        if self.fault.case == CUT_LINK and self.lab is not None:
            self.lab.cut(self.fault.victim)
        elif self.fault.case == "pause":
            wake = partial(_wake, int(fault["process"]))
            timer = threading.Timer(max(0.0, float(fault["at"]) + PAUSE_SECONDS - time.monotonic()), wake)
            timer.daemon = True
            timer.start()


def _wake(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGCONT)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """As a user would: asked, then forced."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
    if process.poll() is None:
        process.kill()
        process.wait()


# -- what came of it --------------------------------------------------------------------------------------------------


def _events(folder: Path) -> list[dict[str, Any]]:
    with suppress(FileNotFoundError):
        lines = (folder / EVENTS).read_text().splitlines()
        # The last one may be under way.
        found = [_event(line) for line in lines]
        return [each for each in found if each is not None]
    return []


def _event(line: str) -> dict[str, Any] | None:
    try:
        event: dict[str, Any] = json.loads(line)
        return event
    except json.JSONDecodeError:
        return None


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
