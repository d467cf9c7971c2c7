"""The ranks of the scenarios ``convergence`` and ``peers``, and the page that shows results."""

import dataclasses
import importlib.util
import mmap
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.errors import ConfigurationError
from gradsync.lab import fork_ranks
from gradsync.tools.bench.measure import CellRounds, PeakMemory, used_bytes
from gradsync.tools.bench.peers import FSDP2Replicate, Gradsync, blocks_of
from gradsync.tools.bench.record import Cell, CellRecord, ResultFolder
from gradsync.tools.bench.scenario import Scenario
from gradsync.tools.bench.scenarios.convergence import PERIODS, RATES, Convergence, variant_name
from gradsync.tools.bench.scenarios.peers import Peers
from gradsync.tools.bench.workload import RealWorkload, optimizer_step
from gradsync.tools.lab.emulated import EmulatedModel, transformer
from tests.tools.bench_samples import stored, trained

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]


# -- real ranks -------------------------------------------------------------------------------------------------------


def run_cell(folder: ResultFolder, scenario: Scenario, cell: Cell) -> CellRecord:
    """As the runner does, without its pictures."""
    with folder.rows(scenario.name) as rows:
        rows.cell(cell)

        def rank() -> None:
            warnings.simplefilter("ignore")
            dist.init_process_group("gloo")
            scenario.measure(CellRounds(cell, rows, meter=lambda: 0))
            # Nobody closes its connections while another rank still reads from them.
            dist.barrier()

        fork_ranks(None, rank, ranks=cell.ranks, timeout=60)
    return folder.records(scenario.name)[-1]


def test_every_period_sees_the_same_data_and_learns(tmp_path: Path) -> None:
    (first, _) = Convergence().cells(quick=True)
    cell = dataclasses.replace(first, rounds=2, options={"seeds": 1})
    record = run_cell(ResultFolder.create(tmp_path / "results"), Convergence(), cell)
    losses = {
        (batch, period): [taken.parts["loss"] for taken in record.samples[variant_name(batch, period, 0)].values()]
        for batch in RATES
        for period in PERIODS
    }
    for period in PERIODS:
        # A learning rate so small that eight iterations differ little from one of their sum.
        assert losses[8, period][0] == pytest.approx(losses[8, 1][0], rel=0.01)
        assert losses[8, period][-1] < losses[8, period][0]
    assert losses[8, 8] != losses[8, 1]


@pytest.mark.breadth
def test_memory_of_a_peer_is_told(tmp_path: Path) -> None:
    cells = [cell for cell in Peers().cells(quick=True) if cell.options.get("memory") in ("no wrapper", "DDP stock")]
    small = [dataclasses.replace(cell, options={**cell.options, "layers": 2}, rounds=1) for cell in cells]
    folder = ResultFolder.create(tmp_path / "results")
    records = [run_cell(folder, Peers(), cell) for cell in small]
    peaks = [record.samples[record.cell.options["memory"]][0].parts["peak bytes"] for record in records]
    # How much it is depends on what the machine had in memory before: the benchmark says, a test only asks for it.
    assert len(peaks) == 2
    assert all(peak > 0 for peak in peaks)
    assert all(record.facts["gradient bytes"] > 0 for record in records)


def test_a_peak_that_is_gone_is_remembered() -> None:
    size = 64 * 2**20
    with PeakMemory() as memory:
        before = used_bytes()
        # Not a tensor: torch's allocator may keep what is freed.
        with mmap.mmap(-1, size) as block:
            block.write(b"1" * size)
            assert used_bytes() - before > 0.9 * size
        assert memory.take() > 0.9 * size
        assert memory.take() < 0.5 * size
    assert memory.peak - memory.before < 0.5 * size


def replicate_ranks() -> None:
    dist.init_process_group("gloo")
    model = EmulatedModel(transformer(parameters=20_000, layers=2, seconds=0.002))
    assert len(blocks_of(model)) == 4
    wrapped = FSDP2Replicate().wrap(model, lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    wrapped.backward(wrapped.model(torch.tensor(float(dist.get_rank() + 1))))
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        expected = model.gradient_of(name, 1.5)
        assert torch.allclose(gradient.to_local(), torch.tensor(expected)), name
    workload = RealWorkload(layers=1, width=16, batch=2, length=4)
    assert workload.nbytes == 4 * workload.parameters
    ours = workload.wrap(Gradsync())
    ours.backward(workload.forward(ours.model))
    optimizer_step(ours)
    dist.destroy_process_group()


def test_replicate_synchronizes_every_group() -> None:
    fork_ranks(None, replicate_ranks, ranks=2, timeout=60)


# -- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_page", ROOT / "docs/pictures/benchmarks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def a_run(path: Path, **config: Any) -> ResultFolder:
    command = f"gradsync bench --out {path}"
    return stored(path, {"convergence": [trained(harm=0.05)]}, command=command, **config)


def test_the_page_is_filled_from_a_run(tmp_path: Path, script: ModuleType) -> None:
    page, pictures = tmp_path / "docs/benchmarks.md", tmp_path / "docs/pictures/bench"
    pictures.mkdir(parents=True)
    (pictures / "of-an-older-run.png").write_bytes(b"")
    page.write_text((ROOT / "docs/benchmarks.md").read_text())
    folder = a_run(tmp_path / "results")
    script.fill(folder, page, pictures)
    text = page.read_text()
    links = re.findall(r"\]\((pictures/bench/[^)]+)\)", text)
    assert len(links) == 2
    assert {f"pictures/bench/{path.name}" for path in pictures.iterdir()} == set(links)
    assert Convergence().reading(folder.records("convergence")) in text
    assert "| batch 256, every 8 |" in text
    assert str(tmp_path) not in text


def test_a_run_over_nccl_has_a_place_of_its_own(tmp_path: Path, script: ModuleType) -> None:
    page = tmp_path / "docs/benchmarks.md"
    page.parent.mkdir()
    page.write_text("# Page\n<!-- results begin -->\nGloo\n<!-- results end -->\n")
    folder = a_run(tmp_path / "results", device="cuda")
    with pytest.raises(ConfigurationError, match="needs the lines <!-- nccl results begin --> and"):
        script.fill(folder, page, tmp_path / "docs/pictures/bench-nccl")
    with page.open("a") as file:
        file.write("<!-- nccl results begin -->\n<!-- nccl results end -->\n")
    script.fill(folder, page, tmp_path / "docs/pictures/bench-nccl")
    text = page.read_text()
    assert "<!-- results begin -->\nGloo\n<!-- results end -->" in text
    assert "`gradsync bench convergence --device cuda --quick`" in text
    assert "pictures/bench-nccl/" in text


def test_a_page_without_markers_is_left_alone(tmp_path: Path, script: ModuleType) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n")
    with pytest.raises(ConfigurationError, match="needs the lines"):
        script.fill(a_run(tmp_path / "results"), page, tmp_path / "pictures")
    assert page.read_text() == "# A page\n"
    assert not (tmp_path / "pictures").exists()
