"""Metrics are read from what was measured anyway, and a sink that fails breaks no training."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from gradsync import DistributedDataParallel
from gradsync.errors import MisuseError, PeerFailedError
from gradsync.observe.metrics import COUNTERS, DESCRIPTIONS, PARTS, StepMetrics
from gradsync.observe.recording import Recorder
from gradsync.testing import run_ranks

WIDTH = 8


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.written.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


class Broken(Kept):
    def write(self, step: int, values: Mapping[str, float]) -> None:
        raise OSError("no space left")


def wrapped(**settings: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    # A bucket a layer.
    cap = 4 * (WIDTH * WIDTH + WIDTH) / 2**20
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model = DistributedDataParallel(layers, bucket_cap_mb=cap, **settings)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    (model(torch.ones(2, WIDTH)).square().mean() * factor).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_write_holds_the_steps_since_the_last_one() -> None:
    def train() -> Any:
        sink = Kept()
        model, optimizer = wrapped()
        with StepMetrics(model, sink) as metrics:
            for step in range(1, 7):
                step_of(model, optimizer)
                if step % 2 == 0:
                    metrics.write(step, loss=float(step))
            steps = model.replica.recorder.steps
        assert sink.closed == 1
        return sink.written, [(step.seconds, {part: step.spent(part) for part in PARTS}) for step in steps]

    for written, steps in run_ranks(train, 2):
        assert [(step, values["loss"]) for step, values in written] == [(2, 2.0), (4, 4.0), (6, 6.0)]
        for (step, values), pair in zip(written, pairs(steps), strict=True):
            assert values["step/seconds"] == pytest.approx(sum(seconds for seconds, _ in pair) / 2)
            for part in PARTS:
                mean = sum(spent[part] for _, spent in pair) / 2
                assert values[f"step/{part}_seconds"] == pytest.approx(mean)
            waited = values["step/synchronization_seconds"] + values["step/gather_seconds"]
            assert values["step/exposed_seconds"] == waited > 0
            assert values["training/steps"] == step
            assert values["communication/collectives"] == 2 * step
            assert sum(values[f"step/{part}_seconds"] for part in PARTS) == pytest.approx(values["step/seconds"])


def pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(values[::2], values[1::2], strict=True))


def test_bytes_are_those_of_the_buckets_also_of_steps_that_are_no_longer_kept() -> None:
    def train() -> Any:
        model, optimizer = wrapped(observer=Recorder(keep=3))
        metrics = StepMetrics(model, Kept())
        for _ in range(10):
            step_of(model, optimizer)
        values = metrics.read()
        return values, sum(part.nbytes for part in model.replica.recorder.layouts[-1])

    for values, nbytes in run_ranks(train, 2):
        assert values["communication/bytes"] == 10 * nbytes
        assert nbytes >= 4 * 2 * (WIDTH * WIDTH + WIDTH)


def test_skipped_steps_are_counted_on_all_ranks() -> None:
    def train() -> Any:
        model, optimizer = wrapped(on_bad_step="skip")
        metrics = StepMetrics(model, Kept())
        for step in range(5):
            step_of(model, optimizer, math.nan if step in (1, 3) else 1.0)
        return metrics.read()

    for values in run_ranks(train, 2):
        assert values["training/skipped_steps"] == 2
        assert values["training/steps"] == 5


def test_a_scaler_that_lowers_its_scale_has_skipped_a_step() -> None:
    def train() -> Any:
        model, optimizer = wrapped()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        metrics = StepMetrics(model, Kept(), scaler=scaler)
        seen = []
        for factor in (1.0, math.inf, math.inf, 1.0):
            scaler.scale(model(torch.ones(2, WIDTH)).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            values = metrics.read()
            seen.append((values["training/loss_scale"], values["training/skipped_steps"]))
        return seen

    for seen in run_ranks(train, 2):
        assert seen == [(1024.0, 0.0), (512.0, 1.0), (256.0, 2.0), (256.0, 2.0)]


def test_a_broken_sink_is_left_out_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    def train() -> Any:
        broken, kept = Broken(), Kept()
        model, optimizer = wrapped()
        metrics = StepMetrics(model, broken, kept)
        for step in range(3):
            step_of(model, optimizer)
            metrics.write(step)
        return [step for step, _ in kept.written]

    with caplog.at_level(logging.ERROR, logger="gradsync"):
        assert run_ranks(train, 1) == [[0, 1, 2]]
    assert len([record for record in caplog.records if "is not used any more" in record.message]) == 1


def test_a_lost_rank_is_counted_and_sinks_are_closed() -> None:
    def train() -> Any:
        sink = Kept()
        model, optimizer = wrapped()
        with pytest.raises(PeerFailedError), StepMetrics(model, sink) as metrics:
            step_of(model, optimizer)
            metrics.write(1)
            raise PeerFailedError("rank 1 was lost")
        return sink.written[-1], sink.closed

    assert run_ranks(train, 1) == [((1, {"ranks/lost": 1.0}), 1)]


def test_restarts_are_the_launcher_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert StepMetrics(Recorder()).read()["ranks/restarts"] == 3


def test_a_model_that_is_not_recorded_is_refused() -> None:
    with pytest.raises(MisuseError, match=r"got Linear\. Models on the CPU are"):
        StepMetrics(nn.Linear(1, 1))


def test_every_metric_of_ours_is_described() -> None:
    recorder = Recorder()
    values = StepMetrics(recorder).read()
    assert set(values) == set(COUNTERS)
    assert set(COUNTERS) < set(DESCRIPTIONS)
