"""Benchmarks: laws of the statistics, what a folder keeps, and real ranks that run a scenario to its report."""

import io
import json
import os
import random
import re
import signal
import statistics as stdlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from gradsync.errors import ConfigurationError
from gradsync.observe.charts.canvas import canvas
from gradsync.tools.bench.measure import CellRounds, Steady
from gradsync.tools.bench.peers import DDP, OVERLAPPED, PEERS, SHARDED, ZERO, Gradsync
from gradsync.tools.bench.record import (
    EVERY,
    LIMITS,
    Cell,
    CellRecord,
    RowFile,
    ratio,
    read_records,
    ring_bytes,
    summarize,
)
from gradsync.tools.bench.report import REPORT, BenchScreen, CellProgress, build_report
from gradsync.tools.bench.runner import BenchOutcome, RunPlan, commit, describe_machine, run, versions
from gradsync.tools.bench.scenario import Picture, Scenario, Table, colour_of, timing_table
from gradsync.tools.bench.scenarios import SCENARIOS, find_scenarios
from gradsync.tools.bench.workload import Pattern, window_step
from gradsync.tools.cli import main
from tests.tools.bench_samples import VARIANTS, record_of, stored

pytestmark = pytest.mark.timeout(120)

seconds = st.floats(1e-6, 1e3)
samples = st.lists(seconds, min_size=1, max_size=40)


# -- statistics -------------------------------------------------------------------------------------------------------


@given(samples, st.floats(1e-3, 1e3))
def test_the_ratio_of_a_multiple_is_its_factor(values: list[float], factor: float) -> None:
    times = dict(enumerate(values))
    same = ratio(times, times)
    assert (same.low, same.median, same.high) == (1, 1, 1)
    scaled = ratio({number: value * factor for number, value in times.items()}, times)
    assert [scaled.low, scaled.median, scaled.high] == pytest.approx([factor] * 3)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=40))
def test_the_interval_of_a_ratio_holds_its_median_and_is_repeatable(pairs: list[tuple[float, float]]) -> None:
    ours = {number: pair[0] for number, pair in enumerate(pairs)}
    theirs = {number: pair[1] for number, pair in enumerate(pairs)}
    result = ratio(ours, theirs)
    ratios = [mine / other for mine, other in pairs]
    assert min(ratios) <= result.low <= result.median <= result.high <= max(ratios)
    assert result.median == stdlib.median(ratios)
    assert result == ratio(ours, theirs)


def test_a_ratio_compares_rounds_not_medians() -> None:
    """A machine that becomes slower and slower, and a variant that takes twice as long in every round."""
    theirs = {number: 1.0 + number for number in range(30)}
    ours = {number: 2 * value for number, value in theirs.items() if number >= 10}
    assert ratio(ours, theirs).median == 2


def test_the_interval_shrinks_with_more_rounds() -> None:
    draw = random.Random(1)
    noisy = {number: draw.uniform(0.8, 1.2) for number in range(400)}
    few = ratio(dict(list(noisy.items())[:10]), dict.fromkeys(range(10), 1.0))
    many = ratio(noisy, dict.fromkeys(range(400), 1.0))
    assert many.high - many.low < few.high - few.low


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one round in which both"):
        ratio({0: 1.0}, {1: 1.0})


def test_the_least_that_averaging_takes() -> None:
    assert ring_bytes(100, 1) == 0
    assert ring_bytes(100, 2) == 100
    assert ring_bytes(100, 4) == 150
    assert Cell(name="slow", rate="400kbit").transfer_seconds(100_000) == 2
    assert Cell(name="slow", rate="400kbit").transfer_seconds(100_000, senders=1) == 0
    assert Cell(name="unlimited").transfer_seconds(100) == 0
    assert summarize([3.0, 1.0, 2.0]).median == 2


# -- what a folder keeps ----------------------------------------------------------------------------------------------


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    cell = Cell(name="two hosts", hosts=2, rate="400mbit", ranks=4, options={"layers": 3})
    bounds = {"compute": "alone", "wire": {"b": 0.5, EVERY: 0.05}}
    made = record_of(cell, {"alone": [0.1, 0.1], "a": [0.2, 0.3], "b": [0.4, 0.9]}, limits=bounds)
    folder = stored(tmp_path / "results", {"made": [made]})
    (record,) = folder.records("made")
    assert record.cell == cell
    assert cell.ranks_per_host == 2
    assert record.outcome == "done"
    assert record.seconds("a") == {0: 0.2, 1: 0.3}
    assert record.ratio("b", "a").median == 2.5
    assert record.part("a", "backward") == pytest.approx(0.025)
    assert record.part("a", "unheard of") == 0
    assert [record.limit(name) for name in ("alone", "a", "b")] == [0.1, 0.1, 0.5]
    assert record.facts[LIMITS] == bounds
    assert folder.records("never run") == []


def test_a_line_that_was_cut_off_costs_only_itself(tmp_path: Path) -> None:
    folder = stored(tmp_path / "results", {"made": [record_of(Cell(name="cell"), {"a": [0.2, 0.3]})]})
    path = folder.path / "made.jsonl"
    whole = path.read_text()
    path.write_text(whole[: whole.rindex('"done"')])
    (record,) = read_records(path)
    assert record.outcome == "interrupted"
    assert record.rounds == 2
    path.write_text(whole.replace('"round": 0', '"round": ', 1))
    with pytest.raises(ConfigurationError, match=r"line 2 of .*made.jsonl is no JSON"):
        read_records(path)


def test_where_results_come_from() -> None:
    machine = describe_machine()
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert machine["cpu"]
    assert versions()["torch"] == torch.__version__
    assert commit() == "unknown" or re.fullmatch(r"[0-9a-f]{12}\+?", commit())
    assert os.uname().nodename not in json.dumps(machine)


# -- reports ----------------------------------------------------------------------------------------------------------

OWN = tuple(find_scenarios(name)[0] for name in ("accumulation", "overlap", "skip-sync"))


@pytest.mark.program
def test_a_report_is_drawn_from_stored_lines(tmp_path: Path) -> None:
    limits = {"compute": "no wrapper", "wire": {EVERY: 0.05}}
    times = {scenario: {name: [0.1, 0.2] for name in names} for scenario, names in VARIANTS.items()}
    records = {
        scenario.name: [record_of(cell, times[scenario.name], limits=limits) for cell in scenario.cells(quick=True)]
        for scenario in OWN
    }
    folder = stored(tmp_path / "results", records)
    sections = build_report(folder, OWN)
    page = (folder.path / REPORT).read_text()
    for section, scenario in zip(sections, OWN, strict=True):
        assert section.notes == []
        assert section.reading
        assert section.tables
        assert scenario.question in page.replace("&#39;", "'")
        for drawing in section.drawings:
            assert (folder.figures / f"{drawing.slug}.png").stat().st_size > 1000
            assert (folder.figures / f"{drawing.slug}.svg").exists()
            assert drawing.svg in page
        assert json.loads((folder.path / f"{scenario.name}.json").read_text())["reading"] == section.reading
    # Nothing is fetched: whatever address there is names a format.
    assert re.findall(r'(?:src|href)="(?!#)', page) == []
    assert str(tmp_path) not in page


def test_a_scenario_that_cannot_be_drawn_leaves_the_others_alone(tmp_path: Path) -> None:
    cell, names = Cell(name="cell"), VARIANTS["skip-sync"]
    records = {"tiny": [record_of(cell, {"a": 0.1})], "skip-sync": [record_of(cell, dict.fromkeys(names, 0.1))]}
    folder = stored(tmp_path / "results", records)
    broken, whole = build_report(folder, [Tiny(draws=False), OWN[2]])
    assert broken.failed
    assert "no pictures today" in broken.notes[0]
    assert whole.drawings
    assert not whole.failed


def test_time_left_is_told_in_whole_seconds() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    for later in (4.4, 59.6, 200.0):
        CellProgress(console, "cell", later).advance(1, 1)
    shown = re.findall(r"· ([^·]*) left", console.file.getvalue())  # type: ignore[attr-defined]
    assert shown == ["4 s", "1 min 00 s", "3 min 20 s"]


def test_a_table_shows_who_is_missing(tmp_path: Path) -> None:
    record = record_of(Cell(name="cell"), {"DDP": 0.1})
    record.absent["Accelerate"] = "not installed"
    table = timing_table(record, baseline="DDP")
    assert table.rows[1:] == [["Accelerate", "not installed", "–", "–", "–"]]
    nobody = timing_table(CellRecord(cell=Cell(name="cell"), absent=record.absent), baseline="DDP")
    assert nobody.rows == [["Accelerate", "not installed"]]
    assert colour_of("gradsync · every 2") == colour_of("gradsync") != colour_of("DDP tuned")


# -- real ranks -------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Tiny(Scenario):
    """A scenario of the least size; ``work`` is what its ranks do."""

    work: Callable[[CellRounds], None] | None = None
    hosts: int | None = None
    draws: bool = True
    name: str = "tiny"
    title: str = "Tiny"
    source: str = "a test"
    question: str = "Does it run?"

    def cells(self, *, quick: bool) -> list[Cell]:
        return [Cell(name="the only cell", hosts=self.hosts, warmup=1, rounds=2, seconds=5, emulated=False)]

    def measure(self, rounds: CellRounds) -> None:
        assert self.work is not None
        self.work(rounds)

    def tables(self, records: Sequence[CellRecord]) -> list[Table]:
        return [timing_table(record, baseline="gradsync") for record in records]

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        if not self.draws:
            raise ValueError("no pictures today")
        figure, _ = canvas("A title")
        return [Picture(slug="empty", title="A title", figure=figure, reading="Nothing to see.")]

    def reading(self, records: Sequence[CellRecord]) -> str:
        return f"{len(records)} cells."


def run_tiny(out: Path, *scenarios: Tiny, no_lab: str = "") -> BenchOutcome:
    return run(RunPlan(scenarios=scenarios, out=out, no_lab=no_lab), BenchScreen())


ALL_PEERS = {
    **PEERS,
    SHARDED: Gradsync(name=SHARDED, gathers="next-forward"),
    OVERLAPPED: Gradsync(name=OVERLAPPED, late_means=True),
    ZERO: DDP(name=ZERO, tuned=True, shares_state=True),
}


def all_peers(rounds: CellRounds) -> None:
    """Every peer trains the same model, with windows of two, and must end with the same weights."""
    inputs = torch.full((4, 8), float(rounds.rank + 1))
    steps, models = {}, {}
    for name, peer in ALL_PEERS.items():
        reason = peer.absent()
        if reason is not None:
            rounds.absent(name, reason)
            continue
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        wrapped = peer.wrap(model, partial(torch.optim.SGD, lr=0.1), window=2)
        pattern = Pattern.NO_SYNC if wrapped.accumulate is None else Pattern.ACCUMULATE
        steps[name] = window_step(wrapped, lambda module: module(inputs).square().mean(), count=2, pattern=pattern)
        models[name] = wrapped
    rounds.run(steps)
    for wrapped in models.values():
        wrapped.flush()
    weights = {name: weights_of(wrapped.model) for name, wrapped in models.items()}
    for name, other in weights.items():
        close = torch.allclose(other, weights["gradsync"], rtol=1e-6, atol=1e-7)
        assert close == (name != "no wrapper"), f"{name} has trained another model"


def weights_of(model: nn.Module) -> torch.Tensor:
    tensors: list[Any] = [parameter.detach() for parameter in model.parameters()]
    return torch.cat([getattr(each, "_local_tensor", each).flatten() for each in tensors])


@pytest.mark.program
def test_a_scenario_from_its_ranks_to_its_report(tmp_path: Path) -> None:
    outcome = run_tiny(tmp_path / "results", Tiny(work=all_peers))
    assert outcome.failed == []
    assert not outcome.interrupted
    (record,) = outcome.folder.records("tiny")
    assert record.outcome == "done"
    assert {*record.samples, *record.absent} == set(ALL_PEERS)
    for variant, taken in record.samples.items():
        assert sorted(taken) == [0, 1]
        assert all(sample.seconds > 0 for sample in taken.values()), variant
    # The counters are the machine's, on which others may send, too; but these bytes are among them.
    assert record.sent("DDP stock") >= 4 * (8 * 8 + 8 + 8 + 1)
    config = outcome.folder.config
    assert {"machine", "versions", "seeds", "commit", "command"} <= set(config)
    page = (outcome.folder.path / REPORT).read_text()
    assert "Nothing to see." in page
    assert config["machine"]["cpu"] in page


def failing(rounds: CellRounds) -> None:
    rounds.run({"gradsync": lambda: None})
    if rounds.rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def test_a_scenario_that_fails_keeps_its_lines_and_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = Tiny(work=failing, name="bad")
    good = Tiny(work=lambda rounds: rounds.run({"gradsync": lambda: {"forward": 0.5}}), name="good")
    outcome = run_tiny(tmp_path / "results", bad, good)
    assert outcome.failed == ["bad"]
    (record,) = outcome.folder.records("bad")
    assert (record.outcome, record.rounds) == ("failed", 2)
    assert "rank" in record.reason
    (other,) = outcome.folder.records("good")
    assert (other.outcome, other.part("gradsync", "forward")) == ("done", 0.5)
    assert "rank 1 has had enough" in capfd.readouterr().err
    assert "the only cell failed" in (outcome.folder.path / REPORT).read_text()


def interrupting(rounds: CellRounds) -> None:
    rounds.run({"gradsync": lambda: None})
    if rounds.rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)


def test_an_interrupted_run_keeps_what_it_has_and_reports_it(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    # Whoever was started in the background of a shell ignores Ctrl-C.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, previous))
    never = Tiny(work=failing, name="never")
    outcome = run_tiny(tmp_path / "results", Tiny(work=interrupting), never)
    assert outcome.interrupted
    (record,) = outcome.folder.records("tiny")
    assert (record.outcome, record.rounds) == ("interrupted", 2)
    page = (outcome.folder.path / REPORT).read_text()
    assert "the only cell was interrupted after 2 of 2 rounds" in page
    assert "Not run." in page


def test_without_a_lab_its_cells_are_skipped_and_say_why(tmp_path: Path) -> None:
    outcome = run_tiny(tmp_path / "results", Tiny(hosts=2, work=failing), no_lab="a lab needs root")
    assert outcome.failed == []
    (record,) = outcome.folder.records("tiny")
    assert (record.outcome, record.reason) == ("skipped", "a lab needs root")
    assert "the only cell was skipped: a lab needs root" in (outcome.folder.path / REPORT).read_text()


# -- the command ------------------------------------------------------------------------------------------------------


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gradsync", "bench", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main.main()
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code


def test_every_scenario_is_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(monkeypatch, "--list") == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == [scenario.name for scenario in SCENARIOS]
    assert find_scenarios("all") == SCENARIOS


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["no-such"], "there is no scenario 'no-such'. There are: accumulation"),
        (["overlap", "--rounds", "0"], "--rounds (or --seeds) must be at least 1, got 0"),
        (["overlap", "--out", "FILE/results"], "results cannot be written to"),
        (["overlap", "--out", "FULL"], "a folder that is new or empty"),
        (["overlap", "FULL"], "For a folder say --out"),
        (["report"], "expected the folder of results after 'report'"),
        (["report", "FULL"], "expected the folder of a benchmark"),
        (["overlap", "--list"], "--list stands alone"),
        (["faults", "--device", "cuda"], "faults runs on CPU ranks only: leave --device cuda out"),
        (["overlap", "--device", "gpu"], "--device is cpu or cuda, got 'gpu'"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "mine").touch()
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert run_command(monkeypatch, *arguments) == 2
    shown = capsys.readouterr()
    assert expected in shown.err
    assert len(shown.err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["FILE", "FULL", "mine"]


def test_a_folder_is_drawn_again_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = record_of(Cell(name="a cell"), dict.fromkeys(VARIANTS["skip-sync"], 0.1))
    folder = stored(tmp_path / "results", {"skip-sync": [record]})
    assert run_command(monkeypatch, "report", str(folder.path)) == 0
    assert "a cell" in capsys.readouterr().out
    assert (folder.path / REPORT).is_file()


def test_bytes_that_a_step_leaves_on_the_wire_are_its_own(tmp_path: Path) -> None:
    """Half of a step's bytes go while the next one runs, or when all is waited for."""
    sent, left = 0, 0

    def step() -> None:
        nonlocal sent, left
        sent, left = sent + left + 50, 50

    def flush() -> None:
        nonlocal sent, left
        sent, left = sent + left, 0

    rounds = CellRounds(Cell(name="one", ranks=1), RowFile(tmp_path / "rows"), meter=lambda: sent)
    assert rounds._time(Steady(step=step, flush=flush, times=10)).sent == 100
