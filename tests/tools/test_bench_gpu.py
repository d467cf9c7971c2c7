"""Benchmarks over NCCL: which cells there are on which GPUs, what their records say, and the command. CPU ranks stand
in for NCCL ranks, except in the tests that are marked."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import gradsync
from gradsync.errors import ConfigurationError
from gradsync.lab import LabError, SharedGpu
from gradsync.tools.bench import runner
from gradsync.tools.bench.measure import CellRounds, Cuda, Device
from gradsync.tools.bench.record import Cell, RowFile
from gradsync.tools.bench.report import REPORT, BenchScreen
from gradsync.tools.bench.runner import GpuSharing, Placement, RunPlan, place_of, run
from gradsync.tools.bench.scenario import Scenario, gpu_cell
from gradsync.tools.bench.scenarios import SCENARIOS, find_scenarios
from gradsync.tools.lab import emulated
from gradsync.tools.lab.emulated import transformer
from tests.tools.bench_samples import Written

pytestmark = pytest.mark.timeout(120)

OVER_NCCL = ("accumulation", "overlap", "bucket-size", "skip-sync", "scaling", "round-robin", "wire", "peers")
ONE, TWO = (Placement(gpus=gpus, sharing=GpuSharing.MPS) for gpus in (1, 2))


def named(name: str) -> Scenario:
    return find_scenarios(name)[0]


# -- which cells ------------------------------------------------------------------------------------------------------


def test_the_scenarios_that_run_over_nccl() -> None:
    assert [each.name for each in ONE.scenarios(SCENARIOS, all_of_them=True)] == list(OVER_NCCL)
    with pytest.raises(ConfigurationError, match="convergence runs on CPU ranks only: leave --device cuda out"):
        ONE.scenarios(find_scenarios("convergence"), all_of_them=False)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", OVER_NCCL)
def test_cells_say_where_their_ranks_are(name: str, quick: bool) -> None:
    cells = ONE.cells(named(name), quick=quick)
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        assert (cell.device, cell.transport, cell.hosts, cell.rate) == ("cuda", "NCCL", None, None)
        alone = cell.ranks == 1
        assert cell.sharing == (GpuSharing.OWN if alone else GpuSharing.MPS)
        assert cell.name.endswith("one GPU per rank" if alone else "one GPU, MPS")
        assert json.loads(json.dumps(dict(cell.options))) == cell.options


def test_ranks_get_gpus_of_their_own_where_there_are_enough() -> None:
    several = replace(ONE, gpus=2, sharing=GpuSharing.SLICES)
    found = {cell.ranks: cell.sharing for cell in several.cells(named("scaling"), quick=True)}
    assert found == {1: GpuSharing.OWN, 2: GpuSharing.OWN, 4: GpuSharing.SLICES}


def test_a_quick_run_of_everything_takes_less_than_ten_minutes() -> None:
    plan = RunPlan(scenarios=[named(name) for name in OVER_NCCL], out=Path("never"), placement=ONE, quick=True)
    assert sum(plan.seconds(scenario) for scenario in plan.scenarios) < 600


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("2 hosts", r"no case '2 hosts' with --device cuda: hosts and links are those of CPU ranks\. It has: 'ResNet"),
        ("nonsense", r"no case 'nonsense' with --device cuda\. It has: 'ResNet"),
    ],
)
def test_hosts_of_the_lab_are_for_cpu_ranks(case: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        RunPlan(scenarios=[named("overlap")], out=Path("never"), placement=ONE, cases=[case])


# -- what is there ----------------------------------------------------------------------------------------------------


def test_cuda_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigurationError, match="--device cuda needs a GPU, and torch sees none here"):
        Placement.on("cuda")
    assert Placement.on("cpu").device == "cpu"


class NoMps:
    """A GPU that cannot be shared under MPS."""

    def __init__(self, plan: Any) -> None:
        assert plan.mps

    def __enter__(self) -> None:
        raise LabError("no daemon today")

    def __exit__(self, *exc_info: object) -> None: ...


@contextmanager
def opened(plan: Any) -> Iterator[None]:
    yield


@pytest.mark.parametrize(("gpu", "sharing"), [(NoMps, GpuSharing.SLICES), (opened, GpuSharing.MPS)])
def test_without_mps_ranks_take_turns_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, gpu: Callable[..., Any], sharing: GpuSharing
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(runner, "SharedGpu", gpu)
    found = Placement.on("cuda")
    assert (found.gpus, found.sharing) == (1, sharing)
    words = ["MPS is not used, so ranks that share a GPU take turns on it (time slices): no daemon today"]
    assert list(found.notes) == (words if sharing is GpuSharing.SLICES else [])


def test_ranks_share_a_gpu_as_their_cell_says() -> None:
    cell = gpu_cell("three", quick=True, each=0.1, ranks=3)
    with place_of(replace(cell, sharing=str(GpuSharing.SLICES))) as place:
        assert isinstance(place, SharedGpu)
        assert (place.plan.ranks, place.plan.mps) == (3, False)
    with place_of(replace(cell, sharing=str(GpuSharing.OWN))) as place:
        assert place is None


# -- times ------------------------------------------------------------------------------------------------------------


class Behind(Device):
    """A device that does its work only when it is waited for; counts how often."""

    def __init__(self) -> None:
        self.pending: list[str] = []
        self.done: list[str] = []

    def finish(self) -> None:
        self.done += self.pending
        self.pending = []


def test_a_block_ends_when_the_device_is_done_and_is_one_sample(tmp_path: Path) -> None:
    device = Behind()
    rounds = CellRounds(Cell(name="one", ranks=1, block=3), RowFile(tmp_path / "rows"), meter=lambda: 30, device=device)

    def step() -> Callable[[], dict[str, float]]:
        number = len(device.done) + len(device.pending)
        device.pending.append("step")
        return lambda: {"number": float(number if len(device.done) == 3 else -1)}

    sample = rounds._time(step)
    assert sample.parts == {"number": 1.0}
    assert device.done == ["step"] * 3
    assert rounds.mean(2.5) == 2.5


def test_layers_of_an_emulated_model_wait_and_hand_out_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(emulated, "cycles_per_second", lambda: 1e9)
    profile = transformer(parameters=20_000, layers=1, seconds=0.03)
    model = emulated.EmulatedGpuModel(profile, device="cpu")
    (model(torch.tensor(3.0)) / 2).backward()
    count = len(profile.layers)
    assert sum(slept[:count]) == pytest.approx(0.01e9, rel=0.01)
    assert sum(slept[count:]) == pytest.approx(0.02e9, rel=0.01)
    assert slept[count:] == pytest.approx([2 * cycles for cycles in reversed(slept[:count])], abs=2)
    assert sum(parameter.numel() for parameter in model.parameters()) == profile.parameters
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.unique().tolist() == [1.5] for gradient in gradients)
    assert len({gradient.data_ptr() for gradient in gradients if gradient is not None}) == len(gradients)


# -- the same cells on CPU ranks --------------------------------------------------------------------------------------

SMALLER: dict[str, Any] = {"seconds": 0.002, "layers": 1, "width": 16, "batch": 1, "length": 4}


def small(cell: Cell) -> Cell:
    """For two CPU ranks and a moment; what is asked of the ranks stays what it is."""
    options = {**cell.options, **{key: value for key, value in SMALLER.items() if key in cell.options}}
    if "parameters" in options:
        options["parameters"] = 0.0005 if "model" in options else 20_000
    if "sizes" in options:
        options["sizes"] = [4096, 65536] if "place" in options else [0.01, 0.02]
    return replace(cell, device="cpu", warmup=1, rounds=2, block=2, seconds=20, options=options)


class OnlySmall(Placement):
    """The first cell of a scenario over NCCL, and those whose ranks do something different, on CPU ranks."""

    def cells(self, scenario: Scenario, *, quick: bool) -> list[Cell]:
        cells = [cell for cell in super().cells(scenario, quick=quick) if cell.ranks <= 2]
        kinds = {(cell.emulated, "memory" in cell.options, cell.ranks): cell for cell in reversed(cells)}
        return [replace(small(cell), sharing="") for cell in reversed(kinds.values())]


@pytest.mark.program
@pytest.mark.parametrize("name", OVER_NCCL)
def test_cells_over_nccl_run_to_their_report(tmp_path: Path, name: str) -> None:
    placement = OnlySmall(gpus=1, sharing=GpuSharing.MPS)
    console = Console(file=io.StringIO(), width=160)
    plan = RunPlan(scenarios=[named(name)], out=tmp_path / "out", placement=placement, quick=True)
    outcome = run(plan, BenchScreen(console))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert outcome.failed == [], shown
    for record in outcome.folder.records(name):
        assert record.outcome == "done"
        assert record.samples
    assert outcome.sections[0].tables
    assert outcome.sections[0].drawings


# -- records and reports ----------------------------------------------------------------------------------------------


def test_records_and_the_report_say_how_the_gpu_was_shared(tmp_path: Path) -> None:
    note = "MPS is not used, so ranks take turns"
    placement = Placement(gpus=1, sharing=GpuSharing.SLICES, notes=[note])
    console = Console(file=io.StringIO(), width=160)
    plan = RunPlan(scenarios=[Written()], out=tmp_path / "out", placement=placement)
    outcome = run(plan, BenchScreen(console))
    lines = [json.loads(line) for line in (outcome.folder.path / "written.jsonl").read_text().splitlines()]
    cells = [line for line in lines if line["kind"] == "cell"]
    assert [(cell["device"], cell["sharing"], cell["block"]) for cell in cells] == [
        ("cuda", "one GPU per rank", 3),
        ("cuda", "ranks share one GPU by time slices", 3),
    ]
    places = ["NCCL: one GPU per rank, NVIDIA H200", "NCCL: 2 ranks share one GPU by time slices, NVIDIA H200"]
    assert outcome.sections[0].places == places
    page, shown = (outcome.folder.path / REPORT).read_text(), console.file.getvalue()  # type: ignore[attr-defined]
    assert all(place in page for place in places)
    assert "sockets over loopback" in page
    assert note in shown
    assert outcome.folder.config["device"] == "cuda"
    # What was measured one way is not gone on with in another.
    other = replace(plan, resumes=True, placement=replace(placement, sharing=GpuSharing.MPS))
    again = run(other, BenchScreen(Console(file=io.StringIO())))
    names = [record.cell.name for record in again.folder.records("written")]
    assert names == ["1 ranks, one GPU per rank", "2 ranks, one GPU, time slices", "2 ranks, one GPU, MPS"]


def test_a_run_without_a_report_keeps_its_lines_and_can_be_drawn_later(tmp_path: Path) -> None:
    plan = RunPlan(scenarios=[Written()], out=tmp_path / "out", placement=TWO, reports=False)
    outcome = run(plan, BenchScreen(Console(file=io.StringIO())))
    assert (outcome.sections, outcome.failed) == ([], [])
    assert not (outcome.folder.path / REPORT).exists()
    assert len(outcome.folder.records("written")) == 2


def test_a_run_whose_time_is_over_begins_no_cell(tmp_path: Path) -> None:
    plan = RunPlan(scenarios=[Written()], out=tmp_path / "out", placement=TWO, minutes=1e-9, reports=False)
    console = Console(file=io.StringIO(), width=300)
    assert run(plan, BenchScreen(console)).folder.records("written") == []
    assert console.file.getvalue().count("is left for --resume") == 2  # type: ignore[attr-defined]
    later = run(replace(plan, minutes=None, resumes=True), BenchScreen(console))
    assert [record.outcome for record in later.folder.records("written")] == ["done", "done"]


# -- with a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_overlap_is_measured_over_nccl(tmp_path: Path) -> None:
    if torch.cuda.device_count() == 0:
        pytest.skip("needs a CUDA device")
    command = ["bench", "overlap", "--device", "cuda", "--quick", "--no-report", "--rounds", "2", "--out", "results"]
    result = subprocess.run(
        [sys.executable, "-m", "gradsync", *command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(gradsync.__file__).parents[1]), *sys.path])},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for line in (tmp_path / "results" / "overlap.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "sample":
            assert row["seconds"] > 0
            assert row["parts"]["forward"] > 0


@pytest.mark.gpu
def test_an_emulated_model_takes_its_time_on_the_gpu() -> None:
    if torch.cuda.device_count() == 0:
        pytest.skip("needs a CUDA device")
    device = Cuda()
    model = emulated.EmulatedGpuModel(transformer(parameters=1_000_000, layers=2, seconds=0.06))
    value = torch.tensor(3.0, device="cuda")
    model(value).backward()
    device.finish()
    marks = [device.mark()]
    loss = model(value)
    marks.append(device.mark())
    loss.backward()
    marks.append(device.mark())
    device.finish()
    # Others that use the device meanwhile only make it longer.
    assert device.seconds(*marks[:2]) > 0.75 * 0.02
    assert device.seconds(*marks[1:]) > 0.75 * 0.04
    assert all(parameter.grad is not None and bool((parameter.grad == 6.0).all()) for parameter in model.parameters())
