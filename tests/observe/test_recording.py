"""What a recorder makes of loops as people write them, and that it breaks none."""

import copy
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gradsync import DistributedDataParallel, ShardedOptimizer, synchronize_gradients
from gradsync.communicator import choose_communicator
from gradsync.errors import ConfigurationError, MisuseError
from gradsync.observe.explain import explain_recordings
from gradsync.observe.recording import Recorder, Step, close_recorders, loading, read_models, read_recordings
from gradsync.observe.recording.attach import align_clocks, measure_offset
from gradsync.observe.recording.files import step_line
from gradsync.testing import run_ranks
from tests.ranks import RankFailure, RankPool, pool_of

WIDTH = 8


@pytest.fixture(scope="module")
def pair() -> RankPool:
    return pool_of(2)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def wrapped(recorder: Recorder, **settings: object) -> DistributedDataParallel:
    # A bucket a layer.
    cap = 4 * (WIDTH * WIDTH + WIDTH) / 2**20
    return DistributedDataParallel(make_model(), bucket_cap_mb=cap, observer=recorder, **settings)  # type: ignore[arg-type]


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, WIDTH) * (choose_communicator().rank + 1)).square().mean()


def names(step: Step) -> list[str]:
    return [span.name for span in step.spans]


def require_whole(steps: list[Step]) -> None:
    """Spans fill the step, and steps follow each other."""
    for step in steps:
        assert sum(span.seconds for span in step.spans) == pytest.approx(step.seconds, abs=1e-9)
        assert all(span.seconds > 0 for span in step.spans)
        for part in step.synchronizations:
            assert part.begin <= part.backward_end <= part.finished <= step.end
            assert part.busy is None or 0.0 <= part.busy <= part.backward_end - part.begin
            for bucket in part.buckets:
                assert bucket.reduced is not None
                assert bucket.finish is not None
                assert part.begin <= bucket.start <= bucket.finish <= part.finished
                if bucket.ready is not None:
                    assert bucket.full is not None
                    assert part.begin <= bucket.full <= bucket.ready <= bucket.start
    for before, after in itertools.pairwise(steps):
        assert before.end == after.begin
        assert before.number + 1 == after.number


def record(loop: Callable[[DistributedDataParallel], None], ranks: int = 2, **settings: object) -> list[list[Step]]:
    """What each rank has recorded of a loop over a model."""

    def train() -> list[Step]:
        recorder = Recorder()
        loop(wrapped(recorder, **settings))
        return recorder.steps

    recorded = run_ranks(train, ranks)
    for steps in recorded:
        require_whole(steps)
    return recorded


def steps_of(model: nn.Module, number: int) -> Iterator[int]:
    """``number`` steps of an optimizer, each after what the caller does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(number):
        yield step
        optimizer.step()
        optimizer.zero_grad()


def plainly(model: DistributedDataParallel) -> None:
    for _ in steps_of(model, 5):
        loss_of(model).backward()


def test_an_unchanged_loop_is_cut_into_steps() -> None:
    for steps in record(plainly):
        assert [step.number for step in steps] == [0, 1, 2, 3, 4]
        for step in steps[1:]:
            assert names(step)[:4] == ["loop", "forward", "backward", "synchronization"]
            assert names(step)[-1] == "optimizer"
            assert (step.micro_batches, len(step.synchronizations), step.collectives) == (1, 1, 2)


class SleepsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return gradient


def test_a_backward_that_sleeps_is_told_from_one_that_computes() -> None:
    def loop(model: DistributedDataParallel) -> None:
        inner = model.module
        assert isinstance(inner, nn.Sequential)
        inner[0].register_forward_hook(lambda module, inputs, output: SleepsInBackward.apply(output))
        plainly(model)

    for steps in record(loop):
        for step in steps:
            (part,) = step.synchronizations
            assert part.busy is not None
            assert part.busy <= part.backward_end - part.begin - 0.045
        written = step_line(step)
        assert json.loads(written)["synchronizations"][0]["busy"] == pytest.approx(part.busy, abs=1e-6)


def test_a_step_of_several_micro_batches_has_one_synchronization() -> None:
    def loop(model: DistributedDataParallel) -> None:
        for _ in steps_of(model, 3):
            for _ in model.accumulate(range(4)):
                loss_of(model).backward()

    for steps in record(loop):
        for step in steps:
            assert (step.micro_batches, len(step.synchronizations), step.collectives) == (4, 1, 2)
            assert names(step).count("backward") == 4


def test_a_forgotten_no_sync_is_seen() -> None:
    def loop(model: DistributedDataParallel) -> None:
        for _ in steps_of(model, 3):
            for _ in range(4):
                loss_of(model).backward()

    for steps in record(loop):
        assert {(step.micro_batches, len(step.synchronizations), step.collectives) for step in steps} == {(4, 4, 8)}


def test_validation_between_two_steps_is_not_the_loops_own_code() -> None:
    def loop(model: DistributedDataParallel) -> None:
        for number in steps_of(model, 4):
            if number == 2:
                with torch.no_grad():
                    loss_of(model)
            loss_of(model).backward()

    for steps in record(loop):
        assert [("loop" in names(step)) for step in steps[1:]] == [True, False, True]


def test_backwards_inside_a_step_by_closure_are_no_optimizer() -> None:
    def loop(model: DistributedDataParallel) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    for steps in record(loop):
        assert steps
        for step in steps:
            assert step.micro_batches == len(step.synchronizations) >= 1
            assert {"forward", "backward", "optimizer"} <= set(names(step))


def test_gathers_of_a_sharded_optimizer_belong_to_the_step_that_needs_them() -> None:
    def loop(model: DistributedDataParallel) -> None:
        optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for _ in range(4):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()

    for steps in record(loop):
        assert not steps[0].gathers
        for step in steps[1:]:
            assert len(step.gathers) == 2
            for gather in step.gathers:
                assert gather.start < step.begin
                assert gather.needed is not None
                assert gather.arrived is not None
                assert gather.end is not None
                assert step.begin <= gather.needed <= gather.arrived
            assert "gather" in names(step)


def test_a_rank_without_a_backward_has_a_synchronization_all_the_same() -> None:
    def loop(model: DistributedDataParallel) -> None:
        for number in steps_of(model, 4):
            idle = choose_communicator().rank == 1 and number == 2
            for _ in model.accumulate([] if idle else [0]):
                loss_of(model).backward()

    one, other = record(loop)
    assert [step.micro_batches for step in one] == [1, 1, 1, 1]
    # No forward begins the third step of rank 1: it is part of the fourth.
    assert sum(step.micro_batches for step in other) == 3
    assert sum(len(step.synchronizations) for step in other) == 4


def by_two_optimizers(model: DistributedDataParallel) -> None:
    """Both make one step."""
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.module)  # type: ignore[union-attr]
    for _ in range(3):
        loss_of(model).backward()
        first.step()
        second.step()


def with_a_bad_window(model: DistributedDataParallel) -> None:
    for number in steps_of(model, 4):
        loss = loss_of(model)
        if number == 2 and choose_communicator().rank == 0:
            loss = loss * float("nan")
        loss.backward()


def of_one_layer(model: DistributedDataParallel) -> None:
    for _ in steps_of(model, 4):
        model(torch.ones(2, WIDTH))
        first: nn.Module = model.module[0]  # type: ignore[index, assignment]
        first(torch.ones(2, WIDTH)).sum().backward()


@pytest.mark.parametrize(
    ("loop", "steps", "settings"),
    [
        (by_two_optimizers, 3, {}),
        (with_a_bad_window, 4, {"on_bad_step": "skip"}),
        (of_one_layer, 4, {"find_unused_parameters": True}),
        (plainly, 5, {"reduction": "int8"}),
        (plainly, 5, {"reduction": "low-rank:1"}),
        (plainly, 5, {"ranks": 1}),
    ],
)
def test_every_step_is_recorded(
    loop: Callable[[DistributedDataParallel], None], steps: int, settings: dict[str, Any]
) -> None:
    for recorded in record(loop, **settings):
        assert [len(step.synchronizations[0].buckets) for step in recorded] == [2] * steps


def test_an_attached_model_is_recorded_and_explains_itself() -> None:
    def train() -> str:
        model = make_model()
        attachment = synchronize_gradients(model)
        for _ in steps_of(model, 6):
            loss_of(model).backward()
        return str(attachment.explain(all_ranks=True))

    first, second = run_ranks(train, 2)
    assert first == second
    assert "2 ranks on cpu" in first


def test_a_backward_that_fails_ends_no_recording() -> None:
    def loop(model: DistributedDataParallel) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(5):
            loss = loss_of(model)
            if number == 2:
                loss.register_hook(lambda _: (_ for _ in ()).throw(ZeroDivisionError))
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
                optimizer.zero_grad()
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    recorder = Recorder()

    def train() -> int:
        loop(wrapped(recorder))
        return len(recorder.steps)

    assert run_ranks(train, 1) == [4]
    require_whole(recorder.steps)


def test_the_last_steps_are_kept_and_no_more() -> None:
    def train() -> list[int]:
        recorder = Recorder(keep=3)
        plainly(wrapped(recorder))
        return [step.number for step in recorder.steps]

    assert run_ranks(train, 2) == [[2, 3, 4]] * 2


def test_a_copy_begins_with_nothing_recorded() -> None:
    def train() -> tuple[int, int]:
        recorder = Recorder("nowhere")
        plainly(wrapped(recorder))
        twin = copy.deepcopy(recorder)
        recorder.folder = None
        recorder.close()
        return len(twin.steps), twin.folder is None

    assert run_ranks(train, 1) == [(0, True)]


def test_before_anything_was_recorded_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> str:
        model = DistributedDataParallel(make_model())
        with pytest.raises(ConfigurationError, match="recorded no step"):
            model.explain()
        with pytest.raises(ConfigurationError, match="recorded no step"):
            model.explain(all_ranks=True)
        return "said"

    assert run_ranks(train, 2) == ["said"] * 2
    monkeypatch.setenv("GRADSYNC_RECORD", "off")

    def unrecorded() -> str:
        model = DistributedDataParallel(make_model())
        with pytest.raises(MisuseError, match="this model is not recorded"):
            model.explain()
        with pytest.raises(ConfigurationError, match="rank 0 is not recorded"):
            model.explain(all_ranks=True)
        return "said"

    assert run_ranks(unrecorded, 2) == ["said"] * 2


# -- files ------------------------------------------------------------------------------------------------------------


def write(folder: str) -> list[str]:
    recorder = Recorder(Path(folder))
    model = wrapped(recorder)
    plainly(model)
    plainly(model)
    recorder.close()
    return sorted(os.listdir(folder))


def test_every_rank_writes_a_file_that_explains(pair: RankPool, tmp_path: Path) -> None:
    pair.run(write, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["rank-00000.jsonl", "rank-00001.jsonl"]
    recordings = read_recordings(tmp_path)
    assert [each.header.rank for each in recordings] == [0, 1]
    assert all(each.ended and each.total == 10 and len(each.steps) == 10 for each in recordings)
    assert recordings[0].header.optimizer == "SGD"
    assert [bucket.parameters for bucket in recordings[0].layouts[-1]] == [
        ("1.bias", "1.weight"),
        ("0.bias", "0.weight"),
    ]
    # On one machine there is one clock.
    assert recordings[1].header.clock.error == 0.0
    explanation = explain_recordings(recordings)
    assert explanation.split.collectives == 2
    assert explanation.split.mean.step > 0


def test_all_models_of_a_process_are_written_at_its_end_each_to_a_file_of_its_own(tmp_path: Path) -> None:
    def train() -> None:
        recorders = [Recorder(tmp_path) for _ in range(3)]
        for number, recorder in enumerate(recorders):
            plainly(wrapped(recorder))
            if number == 0:
                # Its end takes nothing from those that come later.
                recorder.close()

    run_ranks(train, 1)
    close_recorders()
    assert [[each.ended for each in recordings] for recordings in read_models(tmp_path)] == [[True]] * 3


def test_rank_0_gets_the_recordings_of_ranks_whose_disk_it_does_not_see(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from gradsync.tools.llm.run import _bring_together

    def train() -> None:
        communicator = choose_communicator()
        folder = tmp_path / f"disk of {min(communicator.rank, 1)}"
        recorder = Recorder(folder)
        plainly(wrapped(recorder))
        recorder.close()
        accelerator: Any = SimpleNamespace(
            world=SimpleNamespace(communicator=communicator),
            is_main_process=communicator.rank == 0,
            num_processes=communicator.world_size,
            process_index=communicator.rank,
        )
        _bring_together(accelerator, recorder, folder)

    run_ranks(train, 3)
    assert len(os.listdir(tmp_path / "disk of 1")) == 2
    recordings = read_recordings(tmp_path / "disk of 0")
    assert [len(each.steps) for each in recordings] == [5, 5, 5]
    assert explain_recordings(recordings).timeline.is_whole


def test_a_folder_that_cannot_be_written_breaks_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")

    def train() -> int:
        recorder = Recorder(tmp_path / "file")
        model = wrapped(recorder)
        plainly(model)
        recorder.write()
        plainly(model)
        recorder.close()
        return len(recorder.steps)

    with caplog.at_level(logging.ERROR, "gradsync"):
        assert run_ranks(train, 1) == [10]
    assert sum("cannot be written" in line.message for line in caplog.records) == 1


def wrap_with(folder: str | None) -> None:
    if folder is not None and dist.get_rank() == 1:
        os.environ["GRADSYNC_RECORD"] = folder
    try:
        DistributedDataParallel(make_model())
    finally:
        os.environ.pop("GRADSYNC_RECORD", None)


def test_recording_on_one_rank_alone_is_refused(pair: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="recording"):
        pair.run(wrap_with, str(tmp_path))


def test_earlier_steps_are_kept_ever_further_apart(tmp_path: Path) -> None:
    def train() -> list[int]:
        recorder = Recorder(tmp_path, keep=8)
        model = wrapped(recorder)
        for _ in range(12):
            plainly(model)
            recorder.write()
        recorder.close()
        lines = [json.loads(line) for line in (tmp_path / "rank-00000.jsonl").read_text().splitlines()]
        return [line["number"] for line in lines if line["kind"] == "step"]

    (kept,) = run_ranks(train, 1)
    assert kept[-8:] == list(range(52, 60))
    assert len(kept) <= 16
    assert kept[0] == 0
    strides = {after - before for before, after in itertools.pairwise(kept[:-8])}
    assert strides == {8}


# -- clocks -----------------------------------------------------------------------------------------------------------


def offsets() -> tuple[float, float, float | None]:
    communicator = choose_communicator()
    measured = measure_offset(communicator, 1)
    aligned = align_clocks(communicator)
    if measured is None:
        return 0.0, 0.0, aligned.error
    assert measured.error is not None
    return measured.offset, measured.error, aligned.error


def test_ranks_of_one_machine_have_one_clock_and_a_measurement_agrees(pair: RankPool) -> None:
    for offset, error, aligned in pair.run(offsets):
        assert abs(offset) <= error
        assert aligned == 0.0


def align_as_machines() -> tuple[float, float | None]:
    from unittest.mock import patch

    # As if every rank had a machine, and a clock, of its own.
    with patch("gradsync.observe.recording.attach.clock_identity", lambda: f"machine {choose_communicator().rank}"):
        clock = align_clocks(choose_communicator())
    return clock.offset, clock.error


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_machine_is_measured_against_the_first(ranks: int) -> None:
    measured = run_ranks(align_as_machines, ranks)
    assert measured[0] == (0.0, 0.0)
    for offset, error in measured[1:]:
        assert error is not None
        assert error > 0
        # They are threads of one process, and read one clock.
        assert abs(offset) <= error


def test_a_model_that_is_only_evaluated_or_never_stepped_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradsync.observe.recording.recorder.MOST_MARKS", 50)

    def train() -> tuple[int, int]:
        recorder = Recorder()
        model = wrapped(recorder)
        with torch.no_grad():
            for _ in range(200):
                loss_of(model)
        evaluated = len(recorder._marks)
        for _ in range(200):
            loss_of(model).backward()
            model.zero_grad()
        return evaluated, len(recorder._marks)

    for evaluated, trained in run_ranks(train, 2):
        assert evaluated <= 1
        assert trained <= 70


# -- a process that is killed ---------------------------------------------------------------------------------------

KILLED = """
import os, sys, torch
from gradsync import DistributedDataParallel
from gradsync.communicator import InProcessWorld
from gradsync.observe.recording import Recorder
recorder = Recorder(sys.argv[1])
communicator = InProcessWorld(1).communicator(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4), communicator=communicator, observer=recorder)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(20):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if number == 10:
        recorder.write()
os.kill(os.getpid(), 9)
"""


@pytest.mark.program
def test_of_a_rank_that_was_killed_there_is_what_it_wrote_last(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=100, check=False)
    assert result.returncode == -9
    (recording,) = read_recordings(tmp_path)
    assert (len(recording.steps), recording.ended) == (11, False)
    assert "has no end" in str(explain_recordings([recording]))


class SlowInputs(Dataset[int]):
    """A sleep for each sample."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> int:
        time.sleep(0.03)
        return place


@pytest.mark.parametrize("fetched_by", ["loader", "own code"])
def test_the_loop_waits_for_its_loader_or_for_itself(fetched_by: str) -> None:
    """The loader's time is data's, and what the loop does besides is its own."""

    def batches() -> Iterator[object]:
        if fetched_by == "loader":
            yield from DataLoader(SlowInputs())
        for place in range(4 if fetched_by == "own code" else 0):
            with loading():
                batch = SlowInputs()[place]
            yield batch

    def loop(model: DistributedDataParallel) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in batches():
            time.sleep(0.02)
            loss_of(model).backward()
            optimizer.step()

    for steps in record(loop):
        assert len(steps) == 4
        for step in steps[1:]:
            assert step.spent("data") >= 0.03
            assert step.spent("loop") >= 0.02
            assert names(step)[:4] == ["loop", "data", "loop", "forward"]


def test_what_other_threads_load_is_loaded_meanwhile() -> None:
    def loop(model: DistributedDataParallel) -> None:
        for _ in steps_of(model, 3):
            thread = threading.Thread(target=lambda: list(DataLoader(SlowInputs())))
            thread.start()
            thread.join()
            loss_of(model).backward()

    for steps in record(loop):
        assert all("data" not in names(step) for step in steps)


@pytest.mark.parametrize("event", ["backward_ended", "loading_began"])
def test_a_recorder_that_raises_breaks_no_training_and_no_loader(monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    def fail(self: Recorder) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Recorder, event, fail)

    def train() -> list[float]:
        model = DistributedDataParallel(make_model())
        plainly(model)
        assert len(list(DataLoader(SlowInputs()))) == 4
        return [float(parameter.detach().sum()) for parameter in model.parameters()]

    first, second = run_ranks(train, 2)
    assert first == second
