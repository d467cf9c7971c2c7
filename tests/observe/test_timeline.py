"""The timeline: evidence that collectives run while backward computes."""

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from gradsync import DistributedDataParallel, Timeline
from gradsync.communicator import InProcessWorld, choose_communicator
from gradsync.core.bucket.control_flags import Requests
from gradsync.observe.recording import GatherTimes
from gradsync.observe.timeline import BucketTimes, StepTimes, render
from gradsync.optim.sharded import ShardedOptimizer
from tests.ranks import RankPool, Ranks, pool_of

LAYERS, WIDTH = 4, 16
# Seconds. A device may time the end of a collective a moment before its start has been noted.
CLOCK_SLACK = 1e-4 if torch.cuda.is_available() else 0.0


@pytest.fixture(scope="module")
def pair() -> RankPool:
    return pool_of(2)


class Slowly(torch.autograd.Function):
    """The identity; its backward takes some milliseconds, so that there is something to overlap with."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(0.004)
        return gradient


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(Slowly.apply(hidden))
        return hidden


# One layer a bucket.
CAP = 4 * (WIDTH * WIDTH + WIDTH) / 2**20


def train(steps: int, timeline: Timeline, schedule: Any = "overlapped", cap: Any = CAP) -> DistributedDataParallel:
    model = Slow()
    model.unused.requires_grad_(False)
    wrapper = DistributedDataParallel(model, bucket_cap_mb=cap, schedule=schedule, observer=timeline)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        wrapper(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    return wrapper


def watch(schedule: str, steps: int = 5, keep: int = 100) -> tuple[list[StepTimes], str]:
    timeline = Timeline(keep=keep)
    train(steps, timeline, schedule)
    return timeline.steps, str(timeline)


def test_overlapped_buckets_start_while_backward_computes(pair: RankPool) -> None:
    for steps, _ in pair.run(watch, "overlapped"):
        assert not steps[0].overlaps  # the order of the gradients is not known yet
        assert all(step.overlaps for step in steps[1:])
        for step in steps[1:]:
            early = [times for times in step.buckets if times.start is not None and times.start < step.backward_end]
            # Every bucket but the last layer's to come, which is ready when backward ends.
            assert len(early) >= LAYERS - 1
            assert early[0].finish is not None


@pytest.mark.parametrize("schedule", ["bucketed", "naive"])
def test_the_other_schedules_do_not_overlap(pair: RankPool, schedule: str) -> None:
    for steps, _ in pair.run(watch, schedule):
        assert not any(step.overlaps for step in steps)
        for step in steps:
            assert all(times.start is not None and times.start >= step.backward_end for times in step.buckets)


@pytest.mark.parametrize("schedule", ["overlapped", "bucketed", "naive"])
def test_times_are_in_the_order_of_the_path(pair: RankPool, schedule: str) -> None:
    for steps, _ in pair.run(watch, schedule):
        assert len(steps) == 5
        for step in steps:
            assert [times.index for times in step.buckets] == list(range(2 * LAYERS if schedule == "naive" else LAYERS))
            assert 0 < step.backward_end <= step.finished
            assert step.exposed == step.finished - step.backward_end
            for times in step.buckets:
                assert times.ready is not None
                assert times.start is not None
                assert times.finish is not None
                assert 0 <= times.ready <= times.start <= times.finish <= step.finished
                assert times.ready <= step.backward_end
                assert times.reduced is None or times.start <= times.reduced + CLOCK_SLACK
            starts = [times.start or 0.0 for times in step.buckets]
            assert starts == sorted(starts)


def test_sizes_are_those_of_the_buckets(pair: RankPool) -> None:
    layer, flags, control = 4 * (WIDTH * WIDTH + WIDTH), 4 * 2, 4 * (2 + Requests.PLACES)
    for steps, _ in pair.run(watch, "overlapped"):
        assert [times.nbytes for times in steps[-1].buckets] == [layer + flags] * (LAYERS - 1) + [
            layer + flags + control
        ]


def test_only_the_latest_steps_are_kept(pair: RankPool) -> None:
    for steps, _ in pair.run(watch, "bucketed", steps=5, keep=2):
        assert len(steps) == 2


def watch_windows() -> list[int]:
    timeline = Timeline()
    wrapper = train(0, timeline)
    for _ in range(3):
        with wrapper.no_sync():
            for _ in range(2):
                wrapper(torch.ones(2, WIDTH)).sum().backward()
        wrapper(torch.ones(2, WIDTH)).sum().backward()
        wrapper.zero_grad()
    return [len(step.buckets) for step in timeline.steps]


def test_a_window_of_several_backwards_is_one_step(ranks: Ranks) -> None:
    assert ranks.run(watch_windows) == [[LAYERS] * 3] * ranks.world_size


class Notes:
    """An observer that writes down its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def backward_began(self, *, synchronizes: bool) -> None:
        self.calls.append(f"began, synchronizes: {synchronizes}")

    def bucket_ready(self, bucket: Any) -> None:
        self.calls.append("ready")

    def bucket_started(self, bucket: Any, handle: Any) -> None:
        assert hasattr(handle, "wait")
        self.calls.append("start")

    def backward_ended(self) -> None:
        self.calls.append("ended")

    def bucket_finished(self, bucket: Any) -> None:
        self.calls.append("finish")

    def synchronization_finished(self) -> None:
        self.calls.append("synchronized")


def take_notes() -> tuple[list[str], list[str]]:
    notes = Notes()
    wrapper = DistributedDataParallel(nn.Linear(2, 2), observer=notes)
    with wrapper.no_sync():
        wrapper(torch.ones(1, 2)).sum().backward()
    quiet, notes.calls = notes.calls, []
    wrapper(torch.ones(1, 2)).sum().backward()
    return quiet, notes.calls


def test_an_observer_sees_every_stage_and_no_communication_under_no_sync(ranks: Ranks) -> None:
    for quiet, loud in ranks.run(take_notes):
        assert quiet == ["began, synchronizes: False", "ready", "ended"]
        assert loud == ["began, synchronizes: True", "ready", "ended", "start", "finish", "synchronized"]


def watch_unused() -> list[StepTimes]:
    timeline, model = Timeline(), Slow()
    wrapper = DistributedDataParallel(model, bucket_cap_mb=CAP, observer=timeline)
    for _ in range(4):
        wrapper.zero_grad()
        wrapper(torch.ones(2, WIDTH)).sum().backward()
    return timeline.steps


def test_a_bucket_without_gradients_starts_without_having_been_ready(ranks: Ranks) -> None:
    for steps in ranks.run(watch_unused):
        for step in steps:
            assert len(step.buckets) == LAYERS + 1
            unready = [times for times in step.buckets if times.ready is None]
            assert len(unready) == 1
            assert unready[0].start is not None
            assert unready[0].start >= step.backward_end


def synchronize_by_hand() -> list[StepTimes]:
    """Rank 0 has a backward, under no_sync; the others have none."""
    timeline = Timeline()
    wrapper = train(0, timeline)
    for _ in range(2):
        if choose_communicator().rank == 0:
            with wrapper.no_sync():
                wrapper(torch.ones(2, WIDTH)).sum().backward()
        wrapper.synchronize()
    return timeline.steps


def test_a_synchronization_outside_backward_is_a_step_that_overlaps_with_nothing(ranks: Ranks) -> None:
    for steps in ranks.run(synchronize_by_hand):
        assert len(steps) == 2
        for step in steps:
            assert not step.overlaps
            assert len(step.buckets) == LAYERS
            assert all(times.start is not None and times.finish is not None for times in step.buckets)
            assert render(step)


def test_a_timeline_keeps_no_gradients_alive() -> None:
    timeline = Timeline()
    wrapper = DistributedDataParallel(Slow(), observer=timeline, communicator=InProcessWorld(1).communicator(0))
    wrapper(torch.ones(2, WIDTH)).sum().backward()
    buckets = [weakref.ref(bucket) for bucket in wrapper.synchronizer.buckets]
    del wrapper
    gc.collect()
    assert len(timeline.steps) == 1
    assert [bucket() for bucket in buckets] == [None] * len(buckets)


# -- as text ----------------------------------------------------------------------------------------------------------


def test_before_the_first_step_it_says_so() -> None:
    timeline = Timeline()
    assert timeline.steps == []
    assert "no synchronized backward" in str(timeline)


def test_its_text_shows_the_last_step() -> None:
    timeline = Timeline()
    model = nn.Linear(2, 2)
    wrapper = DistributedDataParallel(model, observer=timeline, communicator=InProcessWorld(1).communicator(0))
    wrapper(torch.ones(1, 2)).sum().backward()
    assert str(timeline) == render(timeline.steps[-1])
    assert str(timeline).startswith("backward ends at ")


def test_the_text_of_a_step_draws_waiting_communication_and_the_end_of_backward() -> None:
    step = StepTimes(
        buckets=[
            BucketTimes(index=0, nbytes=2**20, ready=0.001, start=0.003, reduced=0.005, finish=0.009),
            BucketTimes(index=1, nbytes=2**19, ready=0.006, start=0.008, reduced=None, finish=0.009),
            BucketTimes(index=2, nbytes=0),
        ],
        backward_end=0.006,
        finished=0.010,
    )
    assert step.overlaps
    assert step.exposed == pytest.approx(0.004)
    assert render(step, width=10).splitlines() == [
        "backward ends at 6.00 ms, synchronized at 10.00 ms",
        "bucket   0     1.00 MiB  ··███|",
        "bucket   1     0.50 MiB       ··██",
        "bucket   2     0.00 MiB       |",
    ]


def test_nothing_overlaps_in_a_step_whose_buckets_start_at_its_end() -> None:
    step = StepTimes(buckets=[BucketTimes(index=0, nbytes=1, start=0.5, finish=0.6)], backward_end=0.5, finished=0.6)
    assert not step.overlaps


# -- the gathers of a sharded optimizer -------------------------------------------------------------------------------


def watch_gathers() -> tuple[list[StepTimes], str]:
    timeline = Timeline()
    wrapper = DistributedDataParallel(Slow(), bucket_cap_mb=CAP, observer=timeline, find_unused_parameters=True)
    optimizer = ShardedOptimizer(torch.optim.SGD(wrapper.parameters(), lr=0.1), wrapper)
    for _ in range(4):
        wrapper(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return timeline.steps, str(timeline)


def test_gathers_are_shown_before_the_backward_that_they_end_before(pair: RankPool) -> None:
    for steps, picture in pair.run(watch_gathers):
        assert steps[0].gathers == []
        for step in steps[1:]:
            # What the forward needs first goes first.
            assert [gather.index for gather in step.gathers] == [times.index for times in reversed(step.buckets)]
            assert all(gather.end is not None and gather.start < gather.end < 0 for gather in step.gathers)
        assert "▒" in picture
        assert "gathers begin" in picture


def test_text_of_a_step_with_gathers() -> None:
    step = StepTimes(
        buckets=[BucketTimes(index=0, nbytes=2**20, ready=0.001, start=0.002, reduced=0.003, finish=0.004)],
        gathers=[GatherTimes(index=0, nbytes=2**20, start=-0.004, end=-0.002)],
        backward_end=0.003,
        finished=0.004,
    )
    first, row = render(step, width=8).splitlines()
    assert first == "gathers begin 4.00 ms before backward; it ends at 3.00 ms, synchronized at 4.00 ms"
    assert row == "bucket   0     1.00 MiB ▒▒▒ [·██"


def test_marks_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler may come in the middle of one, and wait for another thread, which makes one, too."""
    observer, ended = Timeline(), list[bool]()
    other = threading.Thread(target=observer.backward_ended, daemon=True)

    def handle() -> float:
        if other.ident is None:
            other.start()
            other.join(10)
            ended.append(not other.is_alive())
        return 0.0

    monkeypatch.setattr(observer, "_now", handle)
    observer.backward_began(synchronizes=True)
    assert ended == [True]
