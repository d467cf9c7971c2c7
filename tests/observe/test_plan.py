"""Plans: what is fitted to readings, what is known of machines and models, what a plan answers, and its command."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("typer", reason="the command line needs the extra gradsync[cli]")

from typer.testing import CliRunner

from gradsync.errors import ConfigurationError
from gradsync.observe.explain import explain_recordings
from gradsync.observe.plan.calibration import Calibration, Reading, fit_transport, recorded
from gradsync.observe.plan.library import known_machines, known_models, published
from gradsync.observe.plan.planner import Setting, best_setting, extrapolation, fit_own_seconds, predict, rate_for
from gradsync.observe.plan.profile import steady_straggler
from gradsync.observe.plan.report import make_report
from gradsync.observe.recording import BucketPart, Recording
from gradsync.plan import BucketProfile, Jitter, Link, StepProfile, Topology, Transport, simulate
from gradsync.tools.cli.main import app
from tests.recordings import Loop, World, write_all

SIZES = (4_096, 32_768, 131_072, 524_288, 1 << 20, 1 << 21, 1 << 22)


def readings_of(transport: Transport) -> list[Reading]:
    """What would be measured on a transport that is known, each collective after a pause."""
    link = transport.topology.between
    readings = []
    for size in SIZES:
        for operation in ("all_reduce", "all_gather"):
            cost = transport.cost(operation, size)
            seconds = cost.latency + max(0.0, cost.nbytes - link.burst) / cost.bandwidth
            readings.append(
                Reading(operation=operation, way=transport.way, nbytes=size, seconds=seconds, ranks=transport.ranks)
            )
    return readings


@given(st.floats(1e-5, 1e-3), st.floats(1e6, 1e8), st.sampled_from([0.0, 131_072.0, 262_144.0]))
def test_a_transport_is_found_again_in_its_readings(latency: float, bandwidth: float, burst: float) -> None:
    link = Link(latency=latency, bandwidth=bandwidth, burst=burst)
    true = Transport(topology=Topology(ranks=2, between=link), start=latency)
    found = fit_transport(readings_of(true))
    assert found.topology.between.bandwidth == pytest.approx(bandwidth, rel=0.02)
    assert found.topology.between.burst == pytest.approx(burst, rel=0.1, abs=0.011 * SIZES[-1])
    for ranks in (2, 8):
        small = [each.among(ranks).cost("all_reduce", 1024).latency for each in (true, found)]
        assert small[1] == pytest.approx(small[0], rel=0.25)


def test_operations_that_go_another_way_have_latencies_of_their_own() -> None:
    ring = Transport(topology=Topology(ranks=2, between=Link(latency=1e-4, bandwidth=1e8)), start=1e-4)
    exchange = [
        Reading(operation="reduce_scatter", way="exchange", nbytes=size, seconds=5e-3 + size / 2 / 1e8)
        for size in SIZES
    ]
    found = fit_transport([*readings_of(ring), *exchange])
    assert set(found.others) == {"reduce_scatter"}
    assert found.cost("reduce_scatter", 1024).latency == pytest.approx(5e-3, rel=0.05)
    assert found.cost("all_reduce", 1024).latency < 1e-3
    # Other links and other numbers of ranks are theirs, too.
    slower = found.over(Link(latency=1e-4, bandwidth=1e7)).among(4)
    assert slower.cost("reduce_scatter", 10**7).seconds > 0.7
    assert slower.cost("reduce_scatter", 1024).latency == pytest.approx(5e-3, rel=0.05)


@pytest.mark.parametrize("machine", sorted(known_machines()))
def test_what_is_known_of_machines_makes_a_plan(machine: str) -> None:
    for model in known_models():
        calibration = published(machine, model)
        assert {"machine", "model", "micro-batch"} <= calibration.facts.keys()
        ready = [bucket.ready for bucket in calibration.profile.buckets]
        assert ready == sorted(ready)
        assert ready[-1] <= calibration.profile.backward
    calibration = published(machine, "resnet50")
    few, many = (predict(calibration, Setting(ranks=ranks)) for ranks in (16, 10_000))
    assert calibration.profile.compute <= few.step <= many.step
    assert many.low < many.step < many.high
    assert many.high - many.low > few.high - few.low


def test_models_have_as_many_parameters_as_their_papers_say() -> None:
    millions = {
        name: published("h100-400g", name).profile.nbytes / (2 if name == "llama-8b" else 4) / 1e6
        for name in known_models()
    }
    expected = {"resnet50": 25.6, "bert-base": 109.5, "bert-large": 335.1, "gpt2": 124.4, "llama-8b": 8030}
    assert millions == pytest.approx(expected, rel=5e-3)


def test_ten_thousand_ranks_take_no_more_events_than_two(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradsync.observe.plan.event_loop import EventLoop

    counts: list[int] = []
    at = EventLoop.at

    def counting(self: EventLoop, *args: object) -> None:
        counts[-1] += 1
        at(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(EventLoop, "at", counting)
    calibration = published("v100-100g", "resnet50")
    for ranks in (16, 10_000):
        counts.append(0)
        predict(calibration, Setting(ranks=ranks))
    assert counts[0] == counts[1] > 0


def test_a_faster_link_is_asked_for_until_it_suffices() -> None:
    calibration = published("t4-10gbe", "bert-base")
    setting = Setting(ranks=16)
    needed = rate_for(calibration, setting, 0.05)
    assert needed is not None
    assert needed > calibration.link
    bound = calibration.profile.slowed(calibration.jitter.quantile(0.5, 16)).compute * 1.05
    assert predict(calibration, replace(setting, rate=needed)).step <= bound
    assert predict(calibration, replace(setting, rate=needed / 1.1)).step > bound
    # Latencies of a second are not made good by any link.
    slow = replace(calibration, transport=replace(calibration.transport, start=1.0))
    assert rate_for(slow, setting, 0.05) is None


def test_the_best_setting_is_at_least_as_fast_as_any_other() -> None:
    calibration = published("cpu-10gbe", "resnet50")
    first = Setting(ranks=8)
    sizes, overlaps = (1.0, 25.0), ("backward", "next-forward")
    best = best_setting(calibration, first, bucket_mb=sizes, reductions=("mean", "int8"), overlaps=overlaps)
    for size in sizes:
        for name in ("mean", "int8"):
            other = predict(calibration, replace(first, bucket_mb=size, reduction=name))
            assert best.a_micro_batch <= other.a_micro_batch * (1 + 1e-9)


def test_a_plan_says_how_far_it_extrapolates() -> None:
    calibration = replace(published("cpu-10gbe", "gpt2"), link=1.25e9)
    here = Setting(ranks=1, rate=1.25e9)
    assert extrapolation(calibration, here) == ""
    words = extrapolation(calibration, replace(here, ranks=100, rate=1.25e8, bucket_mb=1e-4))
    assert "100 times the 1 rank it" in words
    assert "10 times as slow" in words
    assert "smaller than the smallest" in words
    near, far = (predict(calibration, replace(here, ranks=ranks)) for ranks in (2, 2000))
    assert far.high / far.step > near.high / near.step


def test_another_link_is_used_as_well_as_the_one_that_was_measured() -> None:
    link = Link(latency=1e-4, bandwidth=0.9e9)
    calibration = Calibration(
        profile=StepProfile(forward=0.1, backward=0.2),
        transport=Transport(topology=Topology(ranks=2, between=link)),
        link=1e9,
    )
    assert calibration.over(2e9).transport.topology.between.bandwidth == pytest.approx(1.8e9)


def test_advice_is_what_gains_most_first_and_keeps_what_it_promises() -> None:
    calibration = published("t4-10gbe", "bert-base")
    report = make_report(calibration, [4, 16], Setting(ranks=1, bucket_mb=25.0), choose_size=False)
    gains = [each.gain for each in report.advice]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0.3
    now = report.predictions[-1]
    for each in report.advice:
        promised = predict(calibration, each.prediction.setting)
        assert promised.a_micro_batch == pytest.approx(now.a_micro_batch * (1 - each.gain))
        assert each.saved == pytest.approx(each.gain * now.step)


@pytest.mark.parametrize(("fixed", "host"), [(3e-3, 1e-4), (0.0, 2.5e-4)])
def test_what_ranks_do_of_their_own_is_found_in_whole_steps(fixed: float, host: float) -> None:
    link = Link(latency=1e-4, bandwidth=1e9)
    pieces = tuple(
        BucketProfile(index=i, nbytes=1 << 20, ready=0.2 * (i + 1) / 20, need=0.1 * (19 - i) / 20) for i in range(20)
    )
    profile = StepProfile(forward=0.1, backward=0.2, buckets=pieces)
    before = Calibration(profile=profile, transport=Transport(topology=Topology(ranks=2, between=link)))
    true = replace(before, fixed=fixed, host=host)
    settings = [Setting(ranks=2, bucket_mb=size) for size in (1.0, 5.0)]
    found = fit_own_seconds(before, [(setting, predict(true, setting).step) for setting in settings])
    for ranks in (2, 16):
        setting = Setting(ranks=ranks, bucket_mb=2.0)
        assert predict(found, setting).step == pytest.approx(predict(true, setting).step, rel=2e-3)


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    link = Link(latency=1e-4, bandwidth=1e9, burst=1e5)
    other = Transport(topology=Topology(ranks=2, between=replace(link, latency=2e-4)), way="exchange")
    made = Calibration(
        profile=StepProfile(
            forward=0.1, backward=0.2, buckets=(BucketProfile(index=0, nbytes=5, ready=0.1, need=0.0),)
        ),
        transport=Transport(topology=Topology(ranks=2, between=link), in_flight=2, others={"reduce_scatter": other}),
        jitter=Jitter(sigma=0.1),
        link=1.25e9,
        facts={"ranks": "2"},
        warnings=("one", "two"),
    )
    path = tmp_path / "plan.json"
    made.save(path)
    assert Calibration.load(path) == made
    # The key of earlier versions.
    path.write_text(path.read_text().replace('"transport"', '"wire"'))
    assert Calibration.load(path) == made


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no calibration that can be read"),
        ("[]", "no calibration of format 1"),
        ('{"format": 2}', "Measure again"),
        ('{"format": 1}', "profile is missing"),
    ],
)
def test_a_file_that_is_no_calibration_says_so(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        Calibration.load(path)


# -- recordings -------------------------------------------------------------------------------------------------------


def planted(folder: Path, world: World | None = None, *, layouts: Any = None, **header: object) -> list[Recording]:
    """What the ranks of a world write, by default of two that are alike."""
    known: dict[str, object] = {"link": (3e-4, 1e-9), "communicator": "Group", **header}
    recordings = [
        replace(each, header=replace(each.header, **known), layouts=layouts or each.layouts)
        for each in (world or World(ranks=[Loop(), Loop()])).record()
    ]
    write_all(folder, recordings)
    return recordings


def test_a_recorded_run_is_a_calibration(tmp_path: Path) -> None:
    layout = (BucketPart(nbytes=4000, parameters=("c",)), BucketPart(nbytes=4008, parameters=("b", "a")))
    loop = Loop(data=0.05, forward=0.1, backward=0.2, optimizer=0.01, other=0.0)
    world = World(ranks=[loop, loop], buckets=[each.nbytes for each in layout])
    planted(tmp_path / "recording", world, layouts=(layout,), parameters={"a": 1000, "b": 3000, "c": 4000})
    made = recorded(tmp_path)
    parts = [getattr(made.profile, name) for name in ("data", "forward", "backward", "optimizer")]
    assert parts == pytest.approx([0.05, 0.1, 0.2, 0.01])
    buckets = made.profile.buckets
    assert [bucket.nbytes for bucket in buckets] == [4000, 3000, 1000]
    assert [bucket.ready for bucket in buckets] == pytest.approx([0.1, 0.175, 0.2])
    assert [bucket.need for bucket in buckets] == pytest.approx([0.05, 0.0125, 0.0])
    assert made.transport.cost("all_reduce", 10**9).seconds == pytest.approx(1 + 3e-4)
    assert made.jitter == Jitter()
    assert predict(made, Setting(ranks=64, rate=1.25e8)).step > made.profile.compute


def test_ranks_that_shared_memory_can_be_planned_over_a_link(tmp_path: Path) -> None:
    planted(tmp_path, communicator="SharedMemoryCommunicator(rank 0 of 2)")
    made = recorded(tmp_path)
    assert predict(made, Setting(ranks=8)).step > 0
    apart = made.over(1.25e6)
    assert apart.transport.way == "ring"
    assert predict(apart, Setting(ranks=8)).step > predict(made, Setting(ranks=8)).step


@pytest.mark.parametrize("slow", [None, 0, 2])
def test_a_straggler_in_the_recording_is_warned_of_as_explain_names_it(tmp_path: Path, slow: int | None) -> None:
    ranks = [Loop(forward=0.03) if rank == slow else Loop() for rank in range(3)]
    recordings = planted(tmp_path, World(ranks=ranks))
    named = [each.rank for each in explain_recordings(recordings).stragglers]
    assert named == ([] if slow is None else [slow])
    warnings = recorded(tmp_path).warnings
    assert [f"rank {rank} was a straggler when this was measured" in warnings[0] for rank in named] == [True] * len(
        named
    )
    assert len(warnings) == len(named)
    result = RUNNER.invoke(app, ["plan", str(tmp_path), "--ranks", "2,8"])
    assert result.output.count("Warning: ") == len(named)
    data = json.loads(RUNNER.invoke(app, ["plan", str(tmp_path), "--ranks", "2", "--json"]).output)
    assert data["warnings"] == list(warnings)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"communicator": "SharedMemoryCommunicator(rank 0 of 2)"}, "memory that they share stands in for it"),
        ({"identity": "one host"}, "what joins ranks of one host stands in for it"),
        ({}, ""),
    ],
)
def test_a_link_that_nobody_has_measured_is_warned_of(tmp_path: Path, header: dict[str, object], words: str) -> None:
    planted(tmp_path, **header)
    warnings = recorded(tmp_path).warnings
    assert len(warnings) == bool(words)
    assert words in "".join(warnings)
    for link in ([], ["--link", "10gbit"]):
        result = RUNNER.invoke(app, ["plan", str(tmp_path), "--ranks", "2,8", *link])
        assert result.output.count("Warning: no network link was measured") == bool(words)


def test_ranks_on_two_hosts_have_a_link_between_them(tmp_path: Path) -> None:
    first, second = planted(tmp_path, identity="one")
    write_all(tmp_path, [first, replace(second, header=replace(second.header, identity="other"))])
    assert recorded(tmp_path).warnings == ()


@given(st.lists(st.floats(0.1, 1.0), min_size=10, max_size=30), st.integers(0, 2), st.floats(1.2, 5.0))
def test_a_rank_that_is_slow_for_good_is_told_from_chance(times: list[float], slow: int, factor: float) -> None:
    rows = [[seconds * (factor if rank == slow else 1.0) for seconds in times] for rank in range(3)]
    found = steady_straggler(rows)
    assert found is not None
    assert found == (slow, pytest.approx(factor))
    assert steady_straggler([times, times, times]) is None
    assert steady_straggler([row[:5] for row in rows]) is None
    # One that is slow now and then is not slow for good.
    rows[slow] = [seconds * (factor if place % 2 else 1.0) for place, seconds in enumerate(times)]
    assert steady_straggler(rows) is None


def test_advice_of_a_plan_is_in_the_unit_of_all_advice() -> None:
    result = RUNNER.invoke(app, [*KNOWN, "--ranks", "64", "--bucket-mb", "25", "--link", "10gbit"])
    lines = [line for line in result.output.splitlines() if line.startswith("Saves")]
    assert lines
    assert all(re.match(r"Saves [\d.,]+ ms a step \(\d+%\) at 64 ranks: ", line) for line in lines), lines


@pytest.mark.parametrize(
    ("invalidate", "words"),
    [
        (lambda folder: None, "no recording in"),
        (lambda folder: (planted(folder), (folder / "rank-00001.jsonl").unlink()), "no recording of rank 1"),
        (lambda folder: planted(folder, link=None), "does not say what an all-reduce costs"),
        (lambda folder: planted(folder, World(ranks=[Loop(), Loop()], steps=0)), "has no step"),
        (lambda folder: (folder / "rank-00000.jsonl").write_text("{"), "is no recording of a rank"),
    ],
)
def test_a_folder_that_cannot_be_planned_from_says_why(
    tmp_path: Path, invalidate: Callable[[Path], object], words: str
) -> None:
    invalidate(tmp_path)
    with pytest.raises(ConfigurationError, match=words):
        recorded(tmp_path)


# -- the command ------------------------------------------------------------------------------------------------------

RUNNER = CliRunner()
KNOWN = ["plan", "--profile", "v100-100g", "--model", "resnet50"]


def test_the_command_shows_steps_advice_and_the_link() -> None:
    result = RUNNER.invoke(app, [*KNOWN, "--ranks", "8,256", "--bucket-mb", "25", "--price", "3", "--link", "10gbit"])
    assert result.exit_code == 0, result.output
    for words in (
        "256",
        "25 MB",
        "1,000 steps",
        "the link of a host needs",
        "extrapolates",
        "Nothing here was measured",
    ):
        assert words in result.output


def test_ranks_of_one_host_need_no_link_and_windows_may_be_long() -> None:
    # Windows of a million micro-batches take no longer to simulate.
    result = RUNNER.invoke(app, [*KNOWN, "--ranks", "1", "--bucket-mb", "25", "--accumulate", "1000000"])
    assert result.exit_code == 0, result.output
    assert "Any link between hosts is fast enough to lose less than 5% at 1 rank." in result.output


def test_the_command_as_data() -> None:
    result = RUNNER.invoke(app, [*KNOWN, "--ranks", "10000", "--bucket-mb", "25", "--json", "--mode", "next-forward"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    (prediction,) = data["predictions"]
    assert prediction["ranks"] == 10_000
    assert math.isclose(
        sum(v for k, v in prediction["parts"].items() if k != "hidden"), prediction["step"], rel_tol=1e-6
    )


def test_a_recorded_run_is_planned_with_as_many_micro_batches_as_it_had(tmp_path: Path) -> None:
    planted(tmp_path, World(ranks=[Loop(), Loop()], micro_batches=4))
    arguments = ["plan", str(tmp_path), "--ranks", "2", "--bucket-mb", "25", "--json"]
    for more, expected in (([], 4), (["--accumulate", "2"], 2)):
        result = RUNNER.invoke(app, [*arguments, *more])
        assert result.exit_code == 0, result.output
        (prediction,) = json.loads(result.output)["predictions"]
        assert prediction["micro_batches"] == expected


def test_the_list_names_what_is_known() -> None:
    output = RUNNER.invoke(app, ["plan", "--list"]).output
    assert all(name in output for name in (*known_machines(), *known_models()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], "expected a calibration"),
        (["plan", "--profile", "abacus", "--model", "gpt2"], "one of t4-10gbe"),
        ([*KNOWN, "--ranks", "two"], "whole numbers"),
        ([*KNOWN, "--ranks", "0"], "between 1 and"),
        ([*KNOWN, "--mode", "sideways"], "--mode is one of"),
        ([*KNOWN, "--reduction", "int3"], "one of mean"),
        ([*KNOWN, "--loss", "0"], "above 0"),
        ([*KNOWN, "--bucket-mb", "0"], "a size above 0 MB, got 0"),
        ([*KNOWN, "--bucket-mb", "nan"], "a size above 0 MB, got nan"),
        ([*KNOWN, "--price", "-1"], "0 or more, got -1"),
        ([*KNOWN, "--batch", "0"], "at least one sample, got 0"),
        ([*KNOWN, "--mode", "next-forward", "--reduction", "int8"], "sends exact means"),
        ([*KNOWN, "--picture", "nowhere/plan.svg"], "a folder that does not exist"),
        (["plan", "--measure", "nowhere/plan.json"], "a folder that does not exist"),
        (["plan", "missing.json"], "no calibration that can be read"),
        (["plan", "missing.json", "--model", "gpt2"], "not both"),
        ([*KNOWN, "--ranks", "2", "--bucket-mb", "25", "--picture", "plan.gif"], ".svg or a .png"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_words(arguments: list[str], words: str) -> None:
    result = RUNNER.invoke(app, arguments)
    assert isinstance(result.exception, ConfigurationError)
    assert words in str(result.exception)


@pytest.mark.program
def test_a_plan_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("plan.svg", "plan.png"):
        path = tmp_path / name
        result = RUNNER.invoke(app, [*KNOWN, "--ranks", "8,64", "--bucket-mb", "25", "--picture", str(path)])
        assert result.exit_code == 0, result.output
        assert path.stat().st_size > 5_000
    assert "exposed communication" in (tmp_path / "plan.svg").read_text()


# -- two real ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.program
@pytest.mark.timeout(120)
def test_two_real_ranks_are_a_calibration(tmp_path: Path) -> None:
    from gradsync.tools.bench.workload import RealWorkload
    from gradsync.tools.calibration import CalibrationPlan, run_calibration

    workload = RealWorkload(layers=2, width=64, batch=1, length=16)
    made = run_calibration(
        CalibrationPlan(workload=workload, steps=4, sizes=(4_096, 65_536, 1 << 20), pause=0.0, timeout=100.0)
    )
    assert made.profile.nbytes == workload.nbytes
    assert made.transport.ranks == 2
    assert made.facts["ranks"] == "2"
    assert "no network link was measured" in made.warnings[-1]
    ready = [bucket.ready for bucket in made.profile.buckets]
    assert ready == sorted(ready)
    # What is ready first is needed last: the head, as against the embedding.
    assert made.profile.buckets[0].need > made.profile.buckets[-1].need
    small, large = (made.transport.cost("all_reduce", nbytes).seconds for nbytes in (1_000, 10**9))
    assert 0 < small < large
    step = simulate(made.profile.in_buckets(1 << 20), made.transport)
    assert step.step >= made.profile.compute * (1 - 1e-9)
    made.save(tmp_path / "plan.json")
    assert predict(Calibration.load(tmp_path / "plan.json"), Setting(ranks=2)).step > 0
