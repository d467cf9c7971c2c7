"""One trial: a program of ranks is started by its launcher, one rank is hurt, and notes say what becomes of it.

All processes of a trial carry a mark in their environment, by which those are found that outlive it, and have a folder
of their own for what they think is temporary.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from gradsync.bench.faults.cases import CUT_LINK, PAUSE_SECONDS, Injury
from gradsync.bench.faults.contenders import CONTENDERS
from gradsync.bench.faults.program import EVENTS, Settings
from gradsync.bench.peers import OURS
from gradsync.lab import Lab
from gradsync.lab.host import places_on
from gradsync.launch import RankProcesses, become

__all__ = ["RANKS", "Limits", "Outcome", "Trial", "judge", "left_behind"]

RANKS, RESTARTS = 3, 3
WRONG_NUMBERS = ("NaN", "bit flip")
ALL_LIVE = (*WRONG_NUMBERS, CUT_LINK)
PROGRAM = "gradsync.bench.faults.program"
MARK = "FAULTS_TRIAL_MARK"
# The launcher of `gradsync train`.
OUR_LAUNCHER = (
    "import sys; from gradsync.cli.launching import run_ranks_of; "
    f"sys.exit(run_ranks_of({PROGRAM!r}, sys.argv[1:], nproc={RANKS}, max_restarts={RESTARTS}))"
)
SHARED_MEMORY = Path("/dev/shm")
POLL_SECONDS = 0.02
# What is gone by then was only on its way.
VANISH_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds: of a group's collective, until a fault counts as not noticed, until nobody goes on any more, and until
    ranks that do not even begin are given up."""

    timeout: float = 10.0
    notice: float = 20.0
    going_on: float = 60.0
    start: float = 120.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a fault. Seconds are counted from it; None: not within the limit. ``lost`` are steps whose work is
    gone; None: all since the fault, since the parameters are wrong. ``left`` is what was left behind, in words."""

    noticed: float | None
    named: bool
    lost: int | None
    went_on: float | None
    left: tuple[str, ...] = ()
    said: str = ""


@dataclass(kw_only=True)
class Trial:
    """One fault for one of those who are compared. With a ``lab`` its ranks run on the hosts of it."""

    peer: str
    injury: Injury
    limits: Limits = field(default_factory=Limits)
    lab: Lab | None = None

    def run(self) -> Outcome | None:
        """None if the ranks did not get as far as the fault."""
        mark = f"{os.getpid()}-{secrets.token_hex(4)}"
        shared = _shared_memory()
        with tempfile.TemporaryDirectory(prefix="gradsync-faults-") as name:
            folder, temporary = Path(name), Path(name, "tmp")
            temporary.mkdir()
            settings = Settings(peer=self.peer, folder=name, timeout=self.limits.timeout, injury=self.injury).as_json()
            variables = {MARK: mark, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
            variables |= CONTENDERS[self.peer].variables
            with (folder / "output").open("wb") as output:
                start = partial(self._launch, settings, variables, output)
                if self.injury.case == CUT_LINK:
                    start = partial(self._fork, settings, variables, output)
                with start() as is_running:
                    self._attend(folder, is_running)
            left = left_behind(mark, temporary, shared)
            for process in _marked(mark):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            said = (folder / "output").read_text(errors="replace")
            outcome = judge(_events(folder), said, self.injury, self.limits)
        return None if outcome is None else Outcome(**{**vars(outcome), "left": left})

    # -- processes ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _launch(self, settings: str, variables: dict[str, str], output: IO[bytes]) -> "Iterator[Callable[[], bool]]":
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={RANKS}",
            f"--max-restarts={RESTARTS}",
        ]
        ours = ["-c", OUR_LAUNCHER]
        command = [sys.executable, *(ours if self.peer == OURS else [*torchrun, "-m", PROGRAM]), settings]
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
        while is_running() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            if fault is None:
                fault = next((each for each in _events(folder) if each["what"] == "fault"), None)
                if fault is not None:
                    deadline = float(fault["at"]) + self.limits.notice + self.limits.going_on
                    self._take_part(fault)
            elif self.injury.case == CUT_LINK and _has_noticed(_events(folder), self.injury, float(fault["at"])):
                # Nobody starts these ranks again.
                return

    def _take_part(self, fault: dict[str, Any]) -> None:
        """What a rank cannot do to itself."""
        if self.injury.case == CUT_LINK and self.lab is not None:
            self.lab.cut(self.injury.victim)
        elif self.injury.case == "pause":
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


def _has_noticed(events: Sequence[dict[str, Any]], injury: Injury, at: float) -> bool:
    return any(_tells(each, injury) and each["at"] > at for each in events)


def _tells(event: dict[str, Any], injury: Injury) -> bool:
    """Whether somebody has said something: another rank, or also the one with wrong numbers, which lives and speaks for
    all if it is rank 0."""
    speaks = event["rank"] != injury.victim or injury.case in WRONG_NUMBERS
    return event["what"] in ("warned", "raised") and speaks


def judge(events: Sequence[dict[str, Any]], said: str, injury: Injury, limits: Limits) -> Outcome | None:
    """What notes and output say. None if there was no fault."""
    fault = next((each for each in events if each["what"] == "fault"), None)
    if fault is None:
        return None
    at = float(fault["at"])
    after = [each for each in events if each["at"] > at]
    told = [each for each in after if _tells(each, injury)]
    # A launcher that starts all ranks again has noticed, if nobody else has.
    restarted = [each for each in after if each["what"] == "began" and each["life"] > 0]
    # The ranks may be ended before they say a word; the launcher is quicker then, by less than it takes to start.
    first = min((float(each["at"]) for each in told), default=None)
    noticed = None if first is None else first - at
    # Where all ranks live they all fail together, and a launcher lists them all, in any order.
    words = "\n".join([*(str(each["text"]) for each in told), "" if injury.case in ALL_LIVE else said])
    if noticed is None and restarted:
        noticed = min(float(each["at"]) for each in restarted) - at
    if noticed is not None and noticed > limits.notice:
        noticed = None
    return Outcome(
        noticed=noticed,
        named=noticed is not None and _names(words, injury, int(fault["process"])),
        lost=_lost(after, events, injury),
        went_on=_went_on(after, at, limits),
        said=words[-20000:],
    )


def _names(words: str, injury: Injury, process: int) -> bool:
    """Whether the rank that was hurt is told: we say ``rank 1``; torch's excepthook, its monitored barrier and torchrun
    have ways of their own."""
    victim = injury.victim
    ways = [rf"\brank(?:\s+|\s*: ){victim}\b", rf"\bpid: {process}\b", rf"\bRanks (?:\d+, )*{victim}\b"]
    if injury.case == "exception":
        # Torch puts it before every traceback. One that was cut off has a traceback, too, as all others have.
        ways.append(rf"\[rank{victim}\]")
    return any(re.search(way, words) for way in ways)


def _went_on(after: Sequence[dict[str, Any]], at: float, limits: Limits) -> float | None:
    """When all ranks had finished a step that began after the fault, with parameters that are right."""
    last = max((each["life"] for each in after if each["what"] == "step"), default=None)
    # A step that was under way may end as if nothing had happened.
    done: dict[int, list[float]] = {}
    for each in after:
        if each["what"] == "step" and each["life"] == last:
            done.setdefault(each["rank"], []).append(float(each["at"]))
    needed = 1 if last else 3
    if last is None or len(done) < RANKS or any(len(times) < needed for times in done.values()):
        return None
    seconds = max(times[needed - 1] for times in done.values()) - at
    return seconds if _is_right(after, last) and seconds <= limits.notice + limits.going_on else None


def _is_right(after: Sequence[dict[str, Any]], life: int) -> bool:
    ends = [each for each in after if each["what"] == "ended" and each["life"] == life]
    return len(ends) == RANKS and all(each["finite"] for each in ends) and len({each["digest"] for each in ends}) == 1


def _lost(after: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]], injury: Injury) -> int | None:
    lives = [each for each in after if each["what"] == "began" and each["life"] > 0]
    if lives:
        return max(0, injury.step - min(int(each["step"]) for each in lives))
    if not _is_right(after, 0):
        return None
    return len({each["step"] for each in after if each["what"] == "step" and each["skipped"]})


# -- what is left -----------------------------------------------------------------------------------------------------


def left_behind(mark: str, temporary: Path, shared: set[str]) -> tuple[str, ...]:
    """Processes with the mark, temporary files, and names in shared memory, that are still there after a moment."""
    deadline = time.monotonic() + VANISH_SECONDS
    while True:
        found = [f"process {process}" for process in _marked(mark)]
        # What torch compiles, or might, it keeps on purpose.
        found += [f"file {path.name}" for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
        found += [f"shared memory {name}" for name in sorted(_shared_memory() - shared)]
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


def _shared_memory() -> set[str]:
    """What torch, multiprocessing or gradsync may leave; others on this machine have their own names there."""
    names = [path.name for path in SHARED_MEMORY.iterdir()] if SHARED_MEMORY.is_dir() else []
    return {name for name in names if name.startswith(("torch_", "gradsync"))}
