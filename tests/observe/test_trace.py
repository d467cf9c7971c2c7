"""Perfetto traces: what a recording of two real ranks shows, read back by perfetto's own classes."""

import importlib.abc
import itertools
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradsync import DistributedDataParallel, ShardedOptimizer
from gradsync.errors import ConfigurationError
from gradsync.observe.recording import Recorder, Recording, find_recordings, read_recording, read_recordings
from gradsync.observe.recording.files import file_name, lines_of, write_lines
from gradsync.observe.trace import Slice, _lanes, write_trace
from gradsync.tools.cli.main import main
from tests.ranks import pool_of
from tests.recordings import Loop, World
from tests.zygote import run_python

pytest.importorskip("perfetto", reason="traces need the extra gradsync[trace]")

pytestmark = [pytest.mark.program, pytest.mark.timeout(120)]

STEPS = 4


@dataclass
class Shown:
    """A slice as it was read: what lies around it is `outer`."""

    name: str
    begin: int
    end: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    flows: list[int] = field(default_factory=list)
    outer: "Shown | None" = None


@dataclass
class Read:
    """A trace: the names of processes and, by process and name of a track, all slices on its lanes."""

    processes: list[str]
    tracks: dict[tuple[str, str], list[Shown]]


def read(path: Path) -> Read:
    """Every lane is read on its own; that time never goes back and slices nest is checked on the way."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    trace = Trace.FromString(path.read_bytes())
    processes: dict[int, str] = {}
    lanes: dict[int, tuple[str, str]] = {}
    open_slices: dict[int, list[Shown]] = {}
    last: dict[int, int] = {}
    tracks: dict[tuple[str, str], list[Shown]] = {}
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            descriptor = packet.track_descriptor
            if descriptor.HasField("process"):
                processes[descriptor.uuid] = descriptor.process.process_name
            else:
                lanes[descriptor.uuid] = (processes[descriptor.parent_uuid], descriptor.name)
            continue
        event = packet.track_event
        stack = open_slices.setdefault(event.track_uuid, [])
        assert packet.timestamp >= last.get(event.track_uuid, 0)
        assert packet.trusted_packet_sequence_id
        last[event.track_uuid] = packet.timestamp
        if event.type == TrackEvent.Type.TYPE_SLICE_BEGIN:
            values = {each.name: _value(each) for each in event.debug_annotations}
            shown = Shown(event.name, packet.timestamp, 0, values, list(event.flow_ids), stack[-1] if stack else None)
            stack.append(shown)
            tracks.setdefault(lanes[event.track_uuid], []).append(shown)
        else:
            assert event.type == TrackEvent.Type.TYPE_SLICE_END
            stack.pop().end = packet.timestamp
    assert not any(open_slices.values())
    return Read(list(processes.values()), tracks)


def _value(annotation: Any) -> Any:
    kind = annotation.WhichOneof("value")
    return [each.string_value for each in annotation.array_values] if kind is None else getattr(annotation, kind)


def train(folder: str, shard: bool) -> None:
    torch.manual_seed(0)
    recorder = Recorder(folder)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.02, observer=recorder)
    if shard:
        optimizer: Any = ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        for micro_batch in range(2):
            with model.no_sync() if micro_batch == 0 else torch.enable_grad():
                model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if shard:
        optimizer.close()
    recorder.close()


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "sharded"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, Path]:
    folder = tmp_path_factory.mktemp("recording")
    pool_of(2).run(train, str(folder), request.param)
    return request.param, folder


def model_in(folder: Path) -> int:
    """Processes of the pool live through many tests, and count their models."""
    (number,) = {read_recording(path).header.model for path in find_recordings(folder)}
    return number


def recordings(folder: Path) -> list[Recording]:
    return read_recordings(folder, model_in(folder))


def slices(trace: Read, rank: int, track: str) -> list[Shown]:
    (process,) = (name for name in trace.processes if name.startswith(f"rank {rank} on "))
    return trace.tracks.get((process, track), [])


def test_reductions_lie_under_backward(recorded: tuple[bool, Path], tmp_path: Path) -> None:
    shard, folder = recorded
    path = tmp_path / "inner" / "trace.pftrace"
    written = write_trace(recordings(folder), path)
    trace = read(path)
    assert len(trace.processes) == 2
    assert written == sum(map(len, trace.tracks.values()))
    for rank in range(2):
        computed = slices(trace, rank, "steps")
        steps = [each for each in computed if each.outer is None]
        assert [each.name for each in steps] == [f"step {number}" for number in range(len(steps))]
        assert len(steps) >= STEPS - 1
        assert all(each.values["micro-batches"] == 2 for each in steps)
        inner = [each for each in computed if each.outer is not None]
        assert {"forward", "backward", "optimizer"} <= {each.name for each in inner}
        assert all(each.outer.begin <= each.begin <= each.end <= each.outer.end for each in inner if each.outer)
        backwards = [each for each in inner if each.name == "backward"]
        for step in steps:
            sent = [each for each in slices(trace, rank, "communication") if each.values["step"] == int(step.name[5:])]
            assert len(sent) > 2
            # The first window learns the order of gradients, and sends after it.
            first = min(sent, key=lambda each: each.begin)
            under = [each for each in backwards if each.outer is step and each.begin <= first.begin < each.end]
            assert under or step is steps[0]
            assert all(step.begin <= each.begin <= each.end <= step.end for each in sent)
            assert all(each.values["bytes"] > 0 and each.values["parameters"] for each in sent)
            named = [name for each in sent for name in each.values["parameters"]]
            assert sorted(named) == sorted(f"{2 * n}.{kind}" for n in range(4) for kind in ("weight", "bias"))
        assert bool(slices(trace, rank, "gathers")) == shard
        assert {each.name for each in slices(trace, rank, "waiting")} <= {"for communication", "for parameters"}
    # One collective has one flow on both ranks.
    flows = [[each.flows for each in slices(trace, rank, "communication")] for rank in range(2)]
    assert sorted(map(tuple, flows[0])) == sorted(map(tuple, flows[1]))


def test_the_command_writes_it(recorded: tuple[bool, Path], tmp_path: Path) -> None:
    folder = recorded[1]
    options = ["--model", str(model_in(folder)), "--perfetto", "trace.pftrace"]
    result = run_python("-m", "gradsync", "explain", str(folder), *options, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "open it in ui.perfetto.dev" in result.stdout
    assert len(read(tmp_path / "trace.pftrace").processes) == 2


def test_a_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    result = run_python("-m", "gradsync", "explain", str(tmp_path), "--perfetto", "trace.pftrace", folder=tmp_path)
    assert result.returncode == 2
    assert "there is no recording in" in result.stderr
    assert not (tmp_path / "trace.pftrace").exists()


def test_several_models_are_told_apart(recorded: tuple[bool, Path], tmp_path: Path) -> None:
    first = recordings(recorded[1])
    number = first[0].header.model
    second = [replace(each, header=replace(each.header, model=number + 1, name="Critic")) for each in first]
    write_trace([*first, *second], tmp_path / "trace")
    names = {name for _, name in read(tmp_path / "trace").tracks}
    assert {
        f"Critic {number + 1}: steps",
        f"Critic {number + 1}: communication",
        f"{first[0].header.name} {number}: steps",
    } <= names


def test_an_empty_recording_is_refused(recorded: tuple[bool, Path], tmp_path: Path) -> None:
    empty = [replace(each, steps=()) for each in recordings(recorded[1])]
    with pytest.raises(ConfigurationError, match="no step yet"):
        write_trace(empty, tmp_path / "trace")
    assert list(tmp_path.iterdir()) == []


class Refuses(importlib.abc.MetaPathFinder):
    """An installation without the extra."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] == "perfetto":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "perfetto"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])
    with pytest.raises(ConfigurationError, match=r"pip install 'gradsync\[trace\]'"):
        write_trace([], tmp_path / "trace")


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20))))
def test_lanes_hold_every_slice_once_and_none_at_the_same_time(drawn: list[tuple[int, int]]) -> None:
    given_slices = [Slice(name=str(n), begin=begin, end=begin + long) for n, (begin, long) in enumerate(drawn)]
    lanes = _lanes(given_slices)
    assert sorted(each.name for lane in lanes for each in lane) == sorted(each.name for each in given_slices)
    for lane in lanes:
        assert all(one.end <= other.begin for one, other in itertools.pairwise(lane))


def test_a_trace_that_cannot_be_written_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for recording in World(ranks=[Loop()], steps=3).record():
        write_lines(tmp_path / file_name(recording.header.rank, 0), lines_of(recording))
    target = tmp_path / file_name(0, 0) / "run.pftrace"
    monkeypatch.setattr("sys.argv", ["gradsync", "explain", str(tmp_path), "--perfetto", str(target)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert re.fullmatch(r"gradsync: .*rank-00000.*\n", capsys.readouterr().err)
