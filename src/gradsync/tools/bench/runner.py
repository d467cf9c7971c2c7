"""Runs scenarios: creates the hosts, runs each cell, keeps every line its ranks write, builds the report.

Whatever happens, the folder holds what was measured until then: ranks append their lines to the raw file themselves, a
cell that fails does not affect the others, and after Ctrl-C the report is built from the lines that exist. Beside them
it keeps where they come from: the machine, the versions, the commit; no host name, no path.
"""

import dataclasses
import importlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import torch

from gradsync.base.errors import ConfigurationError, GradsyncError
from gradsync.observe.charts.canvas import require
from gradsync.tools.bench.measure import ORDER_SEED
from gradsync.tools.bench.record import DONE, INTERRUPTED, RESAMPLING_SEED, Cell, CellRecord, ResultFolder, RowFile
from gradsync.tools.bench.report import BenchScreen, Section, build_report
from gradsync.tools.bench.scenario import Scenario
from gradsync.tools.lab.gpu import SharedGpu, SharedGpuPlan
from gradsync.tools.lab.lab import Lab, LabPlan, Rate
from gradsync.tools.lab.system import check_fit

__all__ = ["BenchOutcome", "GpuSharing", "Placement", "RunPlan", "commit", "describe_machine", "run", "versions"]

PACKAGES = ("torch", "accelerate", "lightning-fabric", "numpy", "matplotlib")
SOURCE = Path(__file__).resolve().parent
# With it torch counts GPUs without starting CUDA in this process, whose forks could not start it any more.
COUNT_ONLY = "PYTORCH_NVML_BASED_CUDA_CHECK"
# Named, so that what a killed run has left is found and removed by the next.
LAB_NAME = "bench"
# Of NCCL, where ranks share a GPU: more leave less of it to compute.
CHANNELS = 4


class GpuSharing(StrEnum):
    """How the ranks of a cell have their GPUs, as the report says it."""

    OWN = "one GPU per rank"
    MPS = "ranks share one GPU under MPS"
    SLICES = "ranks share one GPU by time slices"


# In the names of cells, tables and panels.
SHORT = {GpuSharing.OWN: "one GPU per rank", GpuSharing.MPS: "one GPU, MPS", GpuSharing.SLICES: "one GPU, time slices"}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which cells there are here: without ``gpus`` those of CPU ranks over Gloo, on hosts of the lab where a cell wants
    some; with them those over NCCL, one rank per GPU where there are enough, else all on one, by ``sharing``.

    ``notes`` are said before the first cell.
    """

    gpus: int = 0
    sharing: GpuSharing = GpuSharing.OWN
    notes: Sequence[str] = ()

    @classmethod
    def on(cls, device: str) -> "Placement":
        """The placement on the device of that name."""
        if device not in ("cpu", "cuda"):
            raise ConfigurationError(f"--device is cpu or cuda, got {device!r}")
        if device == "cpu":
            return cls()
        os.environ.setdefault(COUNT_ONLY, "1")
        gpus = torch.cuda.device_count()
        if gpus == 0:
            raise ConfigurationError("--device cuda needs a GPU, and torch sees none here. Leave it out for CPU ranks")
        try:
            with SharedGpu(SharedGpuPlan(mps=True)):
                return cls(gpus=gpus, sharing=GpuSharing.MPS)
        except GradsyncError as error:
            note = f"MPS is not used, so ranks that share a GPU take turns on it (time slices): {error}"
            return cls(gpus=gpus, sharing=GpuSharing.SLICES, notes=[note])

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    def cells(self, scenario: Scenario, *, quick: bool) -> list[Cell]:
        if not self.gpus:
            return scenario.cells(quick=quick)
        return [self._placed(cell) for cell in scenario.gpu_cells(quick=quick)]

    def scenarios(self, asked: Sequence[Scenario], *, all_of_them: bool) -> Sequence[Scenario]:
        """The scenarios that have cells here; one that was asked for by its name must."""
        found = [each for each in asked if not self.gpus or each.gpu_cells(quick=True)]
        if not all_of_them and len(found) < len(asked):
            raise ConfigurationError(f"{asked[0].name} runs on CPU ranks only: leave --device cuda out")
        return found

    def without(self, case: str) -> str:
        """Why a case may be missing here."""
        hosts = ": hosts and links are those of CPU ranks" if "host" in case or "bit/s" in case else ""
        return f" with --device cuda{hosts}" if self.gpus else ""

    def _placed(self, cell: Cell) -> Cell:
        sharing = GpuSharing.OWN if cell.ranks <= self.gpus else self.sharing
        return dataclasses.replace(cell, name=f"{cell.name}, {SHORT[sharing]}", sharing=str(sharing))


def place_of(cell: Cell) -> "AbstractContextManager[Lab | SharedGpu | None]":
    """The place where the ranks of a cell run while it is open: hosts, a shared GPU, or None for this machine alone."""
    if cell.hosts is not None:
        rate = None if cell.rate is None else Rate.parse(cell.rate)
        return Lab(LabPlan(name=LAB_NAME, hosts=cell.hosts, rate=rate, delay=cell.delay))
    if cell.sharing in (GpuSharing.MPS, GpuSharing.SLICES):
        return SharedGpu(SharedGpuPlan(ranks=cell.ranks, mps=cell.sharing == GpuSharing.MPS, channels=CHANNELS))
    return nullcontext()


def missing_lab() -> str:
    """Why hosts cannot be made here; empty if they can."""
    try:
        check_fit()
    except GradsyncError as error:
        return str(error)
    return ""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What to run. ``no_lab`` is the reason for which cells with hosts are skipped, if there is one."""

    scenarios: Sequence[Scenario]
    out: Path
    placement: Placement = field(default_factory=Placement)
    quick: bool = False
    rounds: int | None = None
    # Of cells and of variants, by name; all where there are none. How long cells may take that mind it, together, and
    # how many trials run at once, of those whose times do not depend on it.
    cases: Sequence[str] = ()
    peers: Sequence[str] = ()
    minutes: float | None = None
    jobs: int = 1
    # ``out`` holds results, and what is among them is not measured again.
    resumes: bool = False
    # Pictures and a page at the end.
    reports: bool = True
    command: str = ""
    no_lab: str = field(default_factory=missing_lab)

    def __post_init__(self) -> None:
        if self.rounds is not None and self.rounds < 1:
            raise ConfigurationError(f"--rounds (or --seeds) must be at least 1, got {self.rounds}")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigurationError(f"--minutes must be above 0, got {self.minutes:g}")
        if self.jobs < 1:
            raise ConfigurationError(f"--jobs must be at least 1, got {self.jobs}")
        for scenario in self.scenarios:
            self.cells(scenario)

    def cells(self, scenario: Scenario) -> list[Cell]:
        cells = self.placement.cells(scenario, quick=self.quick)
        known = {cell.name for cell in cells}
        wanted = _whole_names(self.cases, known)
        unknown = [name for name in wanted if name not in known]
        if unknown:
            names = ", ".join(repr(cell.name) for cell in cells)
            why = self.placement.without(unknown[0])
            raise ConfigurationError(f"--cases: {scenario.name} has no case {unknown[0]!r}{why}. It has: {names}")
        if wanted:
            cells = [cell for cell in cells if cell.name in wanted]
        if scenario.in_trials:
            cells = [dataclasses.replace(cell, options={**cell.options, **self._wishes(len(cells))}) for cell in cells]
        if self.rounds is None:
            return cells
        each = {cell.name: cell.seconds / (cell.rounds + cell.warmup) * (self.rounds + cell.warmup) for cell in cells}
        return [dataclasses.replace(cell, rounds=self.rounds, seconds=each[cell.name]) for cell in cells]

    def _wishes(self, cells: int) -> dict[str, object]:
        seconds = None if self.minutes is None else self.minutes * 60 / cells
        wishes = {"peers": list(self.peers) or None, "jobs": self.jobs if self.jobs > 1 else None, "seconds": seconds}
        return {name: value for name, value in wishes.items() if value is not None}

    def runs(self, cell: Cell) -> bool:
        return cell.hosts is None or not self.no_lab

    def seconds(self, scenario: Scenario) -> float:
        """About how many seconds the plan takes."""
        return sum(cell.seconds for cell in self.cells(scenario) if self.runs(cell))


@dataclass(frozen=True, kw_only=True)
class BenchOutcome:
    """What came of a run. Without a report it has no ``sections``."""

    folder: ResultFolder
    sections: Sequence[Section]
    interrupted: bool
    failed: Sequence[str]


def run(plan: RunPlan, screen: BenchScreen) -> BenchOutcome:
    """Run all cells of all scenarios, one after the other, then build the report."""
    if plan.reports:
        # Nobody wants to hear after an hour that it cannot be shown.
        require("jinja2", "matplotlib")
    folder = _resumed(plan) if plan.resumes else ResultFolder.create(plan.out)
    if not plan.resumes:
        folder.write_config(_config(plan))
    deadline = math.inf if plan.minutes is None else time.monotonic() + plan.minutes * 60
    for note in plan.placement.notes:
        screen.note(note)
    later = sum(plan.seconds(scenario) for scenario in plan.scenarios)
    interrupted = False
    try:
        for scenario in plan.scenarios:
            screen.scenario(scenario, plan.seconds(scenario))
            earlier = {record.cell.name: record for record in folder.records(scenario.name)}
            with folder.rows(scenario.name) as rows:
                for cell in plan.cells(scenario):
                    known, runs = earlier.get(cell.name), plan.runs(cell)
                    later -= cell.seconds if runs else 0.0
                    if _is_measured(scenario, known):
                        screen.note(f"{cell.name} is measured already")
                    elif time.monotonic() > deadline:
                        screen.note(f"{cell.name} is left for --resume {plan.out}: the time of --minutes is over")
                    elif runs:
                        (rows.cell if known is None or not scenario.in_trials else rows.resume)(cell)
                        _run_cell(scenario, cell, rows, screen, later)
                    else:
                        # What an earlier run has measured of it stays what it is.
                        if known is None:
                            rows.cell(cell)
                            rows.write("skipped", reason=plan.no_lab)
                        screen.note(f"{cell.name} is skipped: {plan.no_lab}")
    except KeyboardInterrupt:
        interrupted = True
        screen.note("interrupted; the report shows what was measured until now")
    sections = build_report(folder, plan.scenarios) if plan.reports else []
    undrawn = {section.name for section in sections if section.failed}
    outcomes = {each.name: [record.outcome for record in folder.records(each.name)] for each in plan.scenarios}
    failed = [name for name, ends in outcomes.items() if name in undrawn or "failed" in ends]
    return BenchOutcome(folder=folder, sections=sections, interrupted=interrupted, failed=failed)


def _resumed(plan: RunPlan) -> ResultFolder:
    """The folder of an earlier run, which notes that another one adds to it."""
    folder = ResultFolder.open(plan.out)
    config = folder.config
    strangers = [each.name for each in plan.scenarios if each.name not in config.get("scenarios", [])]
    if strangers:
        known = ", ".join(config.get("scenarios", []))
        raise ConfigurationError(
            f"{plan.out} has results of {known}, and none of {strangers[0]}: choose another folder"
        )
    for scenario in plan.scenarios:
        earlier = {record.cell.name: record for record in folder.records(scenario.name)}
        for cell in plan.cells(scenario):
            _require_same(scenario, cell, earlier.get(cell.name), plan.out)
    again = {key: value for key, value in _config(plan).items() if key in ("command", "started", "commit")}
    folder.write_config({**config, "resumed": [*config.get("resumed", []), again]})
    return folder


def _require_same(scenario: Scenario, cell: Cell, known: CellRecord | None, out: Path) -> None:
    """What is measured already must be what is asked for: a report is of one kind of cells."""
    if known is None or not _is_measured(scenario, known):
        return
    # As it was written.
    asked, done = json.loads(json.dumps(dataclasses.asdict(cell))), dataclasses.asdict(known.cell)
    differs = [name for name, value in asked.items() if done[name] != value and name != "seconds"]
    if differs:
        name = differs[0]
        raise ConfigurationError(
            f"{out} has results of {cell.name!r} with other settings ({name} {done[name]!r}, asked for "
            f"{asked[name]!r}): go on with the settings it was begun with, or choose another folder"
        )


def _is_measured(scenario: Scenario, known: CellRecord | None) -> bool:
    """Cells are whole or not, unless a scenario adds to what is known."""
    return known is not None and known.outcome == DONE and not scenario.in_trials


def _config(plan: RunPlan) -> dict[str, object]:
    return {
        "scenarios": [scenario.name for scenario in plan.scenarios],
        "quick": plan.quick,
        "rounds": plan.rounds,
        "device": plan.placement.device,
        "command": plan.command,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": commit(),
        "seeds": {"order of variants": ORDER_SEED, "resampling": RESAMPLING_SEED},
        "machine": describe_machine(),
        "versions": versions(),
    }


def _run_cell(scenario: Scenario, cell: Cell, rows: RowFile, screen: BenchScreen, later: float) -> None:
    progress = screen.cell(scenario, cell, later)
    # The first optimizer of a process imports it, which takes seconds: once here, and not once a rank.
    importlib.import_module("torch._dynamo")
    try:
        with place_of(cell) as place:
            scenario.drive(cell, place, rows, progress.advance)
    except KeyboardInterrupt:
        rows.write(INTERRUPTED)
        raise
    except GradsyncError as error:
        rows.write("failed", reason=str(error))
        screen.note(f"{cell.name} failed: {error}")
    else:
        rows.write(DONE)
    finally:
        progress.finish()


def _whole_names(parts: Sequence[str], names: Collection[str]) -> list[str]:
    """What was written with commas between names. Names may have commas, too: parts that make one belong together."""
    found, rest = [], list(parts)
    while rest:
        count = next((count for count in range(len(rest), 0, -1) if ", ".join(rest[:count]) in names), 1)
        found.append(", ".join(rest[:count]))
        del rest[:count]
    return found


# -- where results come from -------------------------------------------------------------------------------------------


def describe_machine() -> dict[str, str | int | float]:
    """Cores, CPU, memory and kernel."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": f"{_cpu()} ({platform.machine()})",
        "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
    }


def _cpu() -> str:
    """The name of the CPU from lscpu, which knows the parts of ARM, too: their kernels tell numbers only."""
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(
            ["lscpu"], env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=True, timeout=10
        ).stdout
        lines = dict(line.split(":", 1) for line in found.splitlines() if ":" in line)
        return lines.get("Model name", "CPU").strip()
    return "CPU"


def versions() -> dict[str, str]:
    """The versions of Python and of every package whose speed is compared; what is not there says so."""
    found = {"python": platform.python_version()}
    for package in ("gradsync", *PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str:
    """The commit of the source that runs, with ``+`` if it was changed since; ``unknown`` for an installed package."""
    try:
        # An installed package may lie inside someone else's repository.
        _git("ls-files", "--error-unmatch", __file__)
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    answer = subprocess.run(
        ["git", "-C", str(SOURCE), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return answer.stdout.strip()
