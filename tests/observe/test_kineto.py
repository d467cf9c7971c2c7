"""Kineto traces: HTA reads them, and finds the times that were recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

from gradsync.errors import ConfigurationError
from gradsync.observe.kineto import write_kineto
from gradsync.tools.cli.main import main
from tests.recordings import Loop, World, write_all

STEPS = 20
# The second rank is the slower one.
RANKS = (Loop(), Loop(backward=0.030))


def test_each_rank_has_its_steps_its_spans_and_its_buckets(tmp_path: Path) -> None:
    paths = write_kineto(World(ranks=RANKS, steps=STEPS).record(), tmp_path)
    assert [path.name for path in paths] == ["rank-00000.pt.trace.json", "rank-00001.pt.trace.json"]
    for rank, path in enumerate(paths):
        trace = json.loads(path.read_text())
        assert trace["distributedInfo"]["rank"] == rank
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert all(event["ts"] >= 0 and event["dur"] >= 0 and event["pid"] == rank for event in events)
        of: dict[str, list[dict[str, Any]]] = {}
        for event in events:
            of.setdefault(event["name"], []).append(event)
        assert sum(name.startswith("ProfilerStep#") for name in of) == STEPS
        backwards = [event for event in of["backward"] if event["cat"] == "user_annotation"]
        assert sum(event["dur"] for event in backwards) == pytest.approx(STEPS * RANKS[rank].backward * 1e6)
        buckets = of["ncclKernel_gradsync(bucket 3)"]
        assert [event["args"]["step"] for event in buckets] == list(range(STEPS))
        assert all(event["args"]["bytes"] == 1 << 20 and event["cat"] == "kernel" for event in buckets)


def test_the_command_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(tmp_path / "recording", World(ranks=RANKS).record())
    command = ["gradsync", "explain", str(tmp_path / "recording"), "--kineto", str(tmp_path / "traces")]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "2 traces" in capsys.readouterr().out
    assert len(list((tmp_path / "traces").iterdir())) == 2


def test_a_recording_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="hold no step yet"):
        write_kineto(World(ranks=RANKS, steps=0).record(), tmp_path)


@pytest.mark.program
@pytest.mark.filterwarnings("ignore")
def test_hta_prints_its_breakdown(tmp_path: Path) -> None:
    analysis_of = pytest.importorskip("hta.trace_analysis").TraceAnalysis
    paths = write_kineto(World(ranks=RANKS, steps=STEPS).record(), tmp_path)
    analysis = analysis_of(trace_files={rank: str(path) for rank, path in enumerate(paths)}, trace_dir=str(tmp_path))
    breakdown = analysis.get_temporal_breakdown(visualize=False)
    print(breakdown.to_string())
    for rank, loop in enumerate(RANKS):
        computed = loop.forward + loop.backward + loop.optimizer
        # It leaves the last step out, and takes whole microseconds.
        assert breakdown["compute_time(us)"][rank] == pytest.approx((STEPS - 1) * computed * 1e6, rel=1e-3)
    # What is left of a step is exposed communication: the faster rank's, that waits for the slower one.
    assert breakdown["non_compute_time(us)"][0] > 5 * breakdown["non_compute_time(us)"][1] > 0
    overlap = analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"]
    assert 0 < overlap[0] < overlap[1] < 100
