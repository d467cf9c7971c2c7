"""Contract point 8: one copy of the gradients, living in the buckets, and nothing left behind.

Bytes are those of tensors, counted by torch's profiler, which is told of every allocation and release: exact, unlike
the resident size of a process. Gloo's threads may let go of a tensor a moment late, which can only add to a reading,
so a reading is the least of a few.
"""

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function

from gradsync import DistributedDataParallel, synchronize_gradients
from gradsync.communicator import InProcessWorld, ambient_communicator, choose_communicator
from gradsync.core.engine.synchronizer import synchronizer_of
from tests.core.common import in_processes, on
from tests.processes import eventually
from tests.ranks import Ranks, ThreadRanks

pytestmark = pytest.mark.timeout(90)

TorchDDP = nn.parallel.DistributedDataParallel

WIDTH = 256
LAYERS = 12
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
MODEL_BYTES = LAYERS * LAYER_BYTES
# Small gradients are brought into the buckets up to a quarter of a MiB at a time.
IN_HAND = 256 * 1024

in_threads_and_processes = on(("threads", 2), ("processes", 2))


def net(layers: int = 3, width: int = 8) -> nn.Sequential:
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1 / width)
    return module


def batch(width: int = 8) -> torch.Tensor:
    return torch.full((2, width), 1.0 + choose_communicator().rank)


# -- the gradient is the bucket -----------------------------------------------------------------------------------


def storages(tensors: Sequence[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def live_in_buckets(model: DistributedDataParallel) -> bool:
    """Whether every gradient lies in bucket memory, each in a place of its own."""
    gradients = [parameter.grad for parameter in model.parameters()]
    places = sorted((g.data_ptr(), g.data_ptr() + g.nbytes) for g in gradients)
    apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    buffers = [bucket.buffer for bucket in model.synchronizer.buckets]
    return apart and storages(gradients) == storages(buffers) and len(storages(buffers)) == len(buffers)


def train_and_look(bucket_cap_mb: float, set_to_none: bool, accumulate: bool) -> list[bool]:
    model = DistributedDataParallel(net(), bucket_cap_mb=bucket_cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    answers = []
    for _ in range(6):
        optimizer.zero_grad(set_to_none=set_to_none)
        if accumulate:
            for _ in range(2):
                with model.no_sync():
                    model(batch()).sum().backward()
                answers.append(live_in_buckets(model))
        model(batch()).sum().backward()
        answers.append(live_in_buckets(model))
        optimizer.step()
        answers.append(live_in_buckets(model))
    return answers


@in_threads_and_processes
@pytest.mark.parametrize("accumulate", [False, True], ids=["every backward", "accumulating"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "in place"])
@pytest.mark.parametrize("bucket_cap_mb", [1e-4, 1.0])
def test_gradients_lie_in_the_buckets(ranks: Ranks, bucket_cap_mb: float, set_to_none: bool, accumulate: bool) -> None:
    """Contract point 8: after a synchronized backward, after one under no_sync, and after the step."""
    for answers in ranks.run(train_and_look, bucket_cap_mb, set_to_none, accumulate):
        assert all(answers), answers


def test_buckets_hold_little_more_than_the_gradients() -> None:
    """Contract point 8: padding and tail are the only bytes beside the gradients."""
    for bucket_cap_mb in (0.3, 1.0, 25.0):
        module = net(LAYERS, WIDTH)
        communicator = InProcessWorld(1).communicator(0)
        model = DistributedDataParallel(module, communicator=communicator, bucket_cap_mb=bucket_cap_mb)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, WIDTH)).sum().backward()
            held = sum(bucket.buffer.untyped_storage().nbytes() for bucket in model.synchronizer.buckets)
            assert MODEL_BYTES <= held <= 1.001 * MODEL_BYTES


# -- peak memory --------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Reading:
    """Tensor bytes beyond those that were live before: the most at once, and how many at the end, per window."""

    peaks: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)


def read_memory(setup: Callable[[], Callable[[], None]], windows: int) -> Reading:
    """What ``setup`` allocates counts too; it returns what is run in every window."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        window = setup()
        for _ in range(windows):
            with record_function("window"):
                window()
    del window
    events = recorded.profiler.kineto_results.events()
    ends = sorted(event.start_ns() + event.duration_ns() for event in events if event.name() == "window")
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    assert len(ends) == windows
    reading, live, peak = Reading(), 0, 0
    for moment, nbytes in [*sorted(changes), (ends[-1] + 1, 0)]:
        while len(reading.live) < windows and moment > ends[len(reading.live)]:
            reading.peaks.append(peak)
            reading.live.append(live)
            peak = live
        live += nbytes
        peak = max(peak, live)
    return reading


def wrap_with_torch(module: nn.Module, bucket_cap_mb: float) -> Any:
    return TorchDDP(module, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb, init_sync=False)


def wrap_with_gradsync(module: nn.Module, bucket_cap_mb: float) -> Any:
    return DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb, init_sync=False)


def least_peaks(
    wrap: Callable[[nn.Module, float], Any], kind: str, bucket_cap_mb: float, layers: int, width: int
) -> list[int]:
    """The peak in each of the first windows: the one that learns, the one that rebuilds the buckets, and later ones."""
    module, x = net(layers, width), batch(width)

    def setup() -> Callable[[], None]:
        model = wrap(module, bucket_cap_mb)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

        def window() -> None:
            optimizer.zero_grad(set_to_none=kind != "in place")
            if kind == "accumulating":
                with model.no_sync():
                    model(x).sum().backward()
            model(x).sum().backward()
            optimizer.step()

        return window

    readings = []
    for _ in range(2):
        readings.append(read_memory(setup, windows=3).peaks)
        module.zero_grad()
        gc.collect()
    return [min(of_one_window) for of_one_window in zip(*readings, strict=True)]


@in_processes
@pytest.mark.parametrize(
    ("kind", "bucket_cap_mb"),
    [
        ("plain", 1.0),
        pytest.param("plain", 25.0, marks=pytest.mark.breadth),
        pytest.param("in place", 25.0, marks=pytest.mark.breadth),
        pytest.param("accumulating", 1.0, marks=pytest.mark.breadth),
    ],
)
def test_the_peak_is_not_above_torchs_with_views(ranks: Ranks, kind: str, bucket_cap_mb: float) -> None:
    """Contract point 8; one part in a hundred is for the tails of the buckets, one layer is eight."""
    ours = ranks.run(least_peaks, wrap_with_gradsync, kind, bucket_cap_mb, LAYERS, WIDTH)
    theirs = ranks.run(least_peaks, wrap_with_torch, kind, bucket_cap_mb, LAYERS, WIDTH)
    for our_peaks, their_peaks in zip(ours, theirs, strict=True):
        for window, (our_peak, their_peak) in enumerate(zip(our_peaks, their_peaks, strict=True)):
            assert our_peak > MODEL_BYTES
            assert our_peak <= their_peak + MODEL_BYTES // 100, f"window {window}: {our_peak} above {their_peak}"


@in_processes
def test_small_gradients_in_hand_are_bounded(ranks: Ranks) -> None:
    """Contract point 8: many small gradients wait for one another outside the buckets, but never many bytes of them."""
    layers, width = 16, 128
    model_bytes = 4 * layers * (width * width + width)
    assert model_bytes > 3 * IN_HAND
    ours = ranks.run(least_peaks, wrap_with_gradsync, "plain", 25.0, layers, width)
    theirs = ranks.run(least_peaks, wrap_with_torch, "plain", 25.0, layers, width)
    for our_peaks, their_peaks in zip(ours, theirs, strict=True):
        for our_peak, their_peak in zip(our_peaks, their_peaks, strict=True):
            assert our_peak <= their_peak + IN_HAND + model_bytes // 50


# -- nothing is left behind ---------------------------------------------------------------------------------------


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def make_long_training(schedule: str) -> Callable[[], None]:
    """Returns a window that is every kind of window in turn."""
    module, x = net(4, 32), batch(32)
    model: Any = DistributedDataParallel(module, bucket_cap_mb=0.005, init_sync=False, schedule=schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    count = itertools.count()

    def window() -> None:
        number = next(count)
        optimizer.zero_grad(set_to_none=number % 4 != 1)
        if number % 4 == 2:
            with model.no_sync():
                model(x).sum().backward()
        if number % 4 == 3:
            fail_in_backward(model, x)
            optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return window


def fail_in_backward(model: Any, x: torch.Tensor) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    hook = model.module[1].weight.register_hook(fail)
    with contextlib.suppress(ArithmeticError):
        model(x).sum().backward()
    hook.remove()


@pytest.mark.parametrize("schedule", ["overlapped", "bucketed"])
def test_no_bytes_are_left_by_windows(schedule: str) -> None:
    """Contract point 8: twenty windows, some accumulating, some failing, leave what the first of them left."""
    with ambient_communicator(InProcessWorld(1).communicator(0)):
        live = read_memory(lambda: make_long_training(schedule), windows=20).live
    assert max(live[4:]) == min(live[4:]) <= max(live[:4]), live


def live_tensors_in_long_training(schedule: str) -> list[int]:
    window, counts = make_long_training(schedule), []
    for _ in range(5):
        for _ in range(4):
            window()
        counts.append(live_tensors())
    return counts


@in_processes
def test_no_tensors_are_left_by_windows(ranks: Ranks) -> None:
    """Contract point 8: and none that Python holds, where ranks are processes."""
    for counts in ranks.run(live_tensors_in_long_training, "overlapped"):
        assert len(set(counts[1:])) == 1, counts


def train_a_little(model: Any, x: torch.Tensor) -> None:
    for _ in range(4):
        model.zero_grad()
        model(x).sum().backward()


def traces(module: nn.Module) -> int:
    """How many hooks the engine has left on the parameters."""
    return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in module.parameters())


def assert_freed(memory: Sequence[StorageWeakRef]) -> None:
    """For a moment another rank's thread may hold the last message, and autograd's on a GPU the end of the backward."""
    assert eventually(lambda: all(reference.expired() for reference in memory))


def delete_the_wrapper() -> None:
    module, x = net(), batch()
    model = DistributedDataParallel(module, bucket_cap_mb=1e-4)
    train_a_little(model, x)
    buckets = model.synchronizer.buckets
    assert traces(module)
    assert len(buckets) > 1
    memory = [StorageWeakRef(bucket.buffer.untyped_storage()) for bucket in buckets]
    parts = [weakref.ref(part) for part in (model, model.synchronizer, model.replica, *buckets)]
    means = [parameter.grad.clone() for parameter in module.parameters()]
    del model, buckets
    gc.collect()
    assert eventually(lambda: not any(part() for part in parts))
    assert traces(module) == 0
    assert all(synchronizer_of(parameter) is None for parameter in module.parameters())
    # The gradients are still wanted, and they are all that holds the memory.
    assert all(torch.equal(p.grad, mean) for p, mean in zip(module.parameters(), means, strict=True))
    assert not any(reference.expired() for reference in memory)
    module.zero_grad()
    assert_freed(memory)
    train_a_little(module, x)  # a plain module again: nobody waits for anybody


@in_threads_and_processes
def test_deleting_the_wrapper_leaves_a_plain_module(ranks: Ranks) -> None:
    """Contract point 8: the buckets go with the wrapper, the hooks too, and gradients stay while they are wanted."""
    ranks.run(delete_the_wrapper)


def delete_without_collecting() -> bool:
    model = DistributedDataParallel(net(), bucket_cap_mb=1e-4)
    train_a_little(model, batch())
    model.zero_grad()
    memory = [StorageWeakRef(bucket.buffer.untyped_storage()) for bucket in model.synchronizer.buckets]
    gc.disable()
    try:
        del model
        return all(reference.expired() for reference in memory)
    finally:
        gc.enable()


def test_the_memory_is_free_at_once() -> None:
    """Contract point 8: the engine has no reference cycles, so nothing waits for the garbage collector."""
    assert ThreadRanks(1).run(delete_without_collecting) == [True]


def detach_the_engine() -> None:
    rank = choose_communicator().rank
    module, x = net(), batch()
    handle = synchronize_gradients(module, bucket_cap_mb=1e-4)
    train_a_little(module, x)
    memory = [StorageWeakRef(bucket.buffer.untyped_storage()) for bucket in handle.synchronizer.buckets]
    synchronizer = weakref.ref(handle.synchronizer)
    watched = module(x)  # its backward comes when the engine is gone
    handle.detach()
    assert traces(module) == 0
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    del handle
    gc.collect()
    assert synchronizer() is None
    module.zero_grad()
    assert_freed(memory)
    watched.sum().backward()
    if rank == 0:  # alone: there is nothing left to synchronize with
        train_a_little(module, x)


@in_threads_and_processes
def test_a_detached_engine_leaves_nothing_on_the_module(ranks: Ranks) -> None:
    """Contract point 8."""
    ranks.run(detach_the_engine)


def detach_between_forward_and_backward() -> list[bool]:
    module, x = net(), batch()
    handle = synchronize_gradients(module, bucket_cap_mb=1e-4)
    train_a_little(module, x)
    module.zero_grad()
    output = module(x)
    handle.detach()
    output.sum().backward()
    buffers = storages([bucket.buffer for bucket in handle.synchronizer.buckets])
    return [parameter.grad.untyped_storage().data_ptr() in buffers for parameter in module.parameters()]


@in_threads_and_processes
def test_a_detached_engine_takes_no_gradient(ranks: Ranks) -> None:
    """Contract point 8: not even that of a forward it has seen, while somebody still holds its handle."""
    for answers in ranks.run(detach_between_forward_and_backward):
        assert not any(answers)


class Entangled(nn.Module):
    """Forwards of two threads that overlap: both are inside before the first one leaves."""

    def __init__(self, inside: threading.Barrier, first_has_left: threading.Event) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.inside, self.first_has_left = inside, first_has_left

    def forward(self, x: torch.Tensor) -> Any:
        self.inside.wait()
        if choose_communicator().rank == 1:
            self.first_has_left.wait()
        return self.layer(x)


def run_entangled(inside: threading.Barrier, entered: threading.Event, first_has_left: threading.Event) -> None:
    model = DistributedDataParallel(Entangled(inside, first_has_left))
    if choose_communicator().rank == 1:
        entered.wait()
    else:
        model.module.register_forward_pre_hook(lambda *_: entered.set())
    model(torch.ones(1, 2))
    first_has_left.set()


def test_ranks_that_are_threads_leave_torchs_class_as_it_was() -> None:
    """Contract point 8: the compiler is told of the running wrapper by a class attribute, which threads share."""
    before = TorchDDP._active_ddp_module  # type: ignore[attr-defined]
    ThreadRanks(2).run(run_entangled, threading.Barrier(2), threading.Event(), threading.Event())
    assert TorchDDP._active_ddp_module is before  # type: ignore[attr-defined]
