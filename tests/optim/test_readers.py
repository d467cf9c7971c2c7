"""Any thread and any signal handler may read parameters at any moment: each gets them after a whole step, and training
computes what it would have computed without. An interrupt is raised once, and the model stays readable.

A signal handler runs between two bytecodes of the main thread. A trace function runs there, too, and does not depend on
time: it stands for handlers and interrupts here, but for the tests that send real signals.
"""

import copy
import gc
import io
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from gradsync import DistributedDataParallel, OverlappedOptimizer, ShardedOptimizer
from gradsync.communicator import Communicator, choose_communicator
from gradsync.errors import GradsyncError, MisuseError
from gradsync.optim.sharded.gather import AwaitedParameter, Gather, Gathers
from gradsync.optim.sharded.update_thread import UpdateThread, end_records_at_once
from tests.communicators import fresh_communicator
from tests.optim.training import assert_same, batch, filled, parameters_of, take_steps, train_step
from tests.ranks import Ranks
from tests.scripts import run_scripts

pytestmark = pytest.mark.timeout(120)

KINDS = ["sharded", "overlapped"]
in_processes = pytest.mark.parametrize("ranks", [("processes", 2)], indirect=True, ids=["processes-2"])
in_threads_and_processes = pytest.mark.parametrize(
    "ranks", [("threads", 2), ("processes", 2)], indirect=True, ids="{0[0]}-{0[1]}".format
)

# A layer is a bucket.
TINY = 7e-4


class Layers(nn.Module):
    """A chain of layers, and a parameter that has no place in a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(5, 9, sparse=True)
        self.layers = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(9, 9), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x + self.rows(torch.tensor([[0, 3]], device=x.device)))


def wrapped(communicator: Communicator | None = None) -> DistributedDataParallel:
    return DistributedDataParallel(filled(Layers().double()), bucket_cap_mb=TINY, communicator=communicator)


def optimizer_of(kind: str, model: nn.Module) -> Any:
    rows, *others = model.parameters()
    # A sparse momentum would be added up by atomic operations on a GPU, in another order on each rank.
    groups = [{"params": [rows], "momentum": 0.0}, {"params": others}]
    plain = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    if kind == "plain":
        return plain
    return ShardedOptimizer(plain, model) if kind == "sharded" else OverlappedOptimizer(plain, model)


def train(kind: str, steps: int) -> list[list[torch.Tensor]]:
    """The parameters before the first step, and after each."""
    rank, model = choose_communicator().rank, wrapped()
    optimizer, states = optimizer_of(kind, model), [parameters_of(model)]
    for step in range(steps):
        train_step(model, optimizer, batch(rank, step, width=9))
        states.append(parameters_of(model))
    return states


# -- threads ----------------------------------------------------------------------------------------------------------


READS: dict[str, Callable[[DistributedDataParallel], Any]] = {
    "save": lambda model: torch.save(model.module.state_dict(), io.BytesIO()),
    "deepcopy": lambda model: copy.deepcopy(model.module),
    "evaluation": lambda model: model.module(torch.ones(1, 9, dtype=torch.float64, device=model.replica.device)),
    "sum": lambda model: [parameter.sum() for parameter in reversed(list(model.parameters()))],
}


def train_beside_readers(kind: str, steps: int) -> list[torch.Tensor]:
    rank, model = choose_communicator().rank, wrapped()
    optimizer, is_over, errors = optimizer_of(kind, model), threading.Event(), list[BaseException]()

    def read(how: str) -> None:
        while not is_over.is_set():
            try:
                with torch.no_grad():
                    READS[how](model)
            except BaseException as error:
                errors.append(error)
                raise
            time.sleep(0.0005)

    readers = [threading.Thread(target=read, args=(how,)) for how in READS] if rank == 0 else []
    for reader in readers:
        reader.start()
    try:
        take_steps(model, optimizer, range(steps), width=9)
        parameters = parameters_of(model)
    finally:
        is_over.set()
        for reader in readers:
            reader.join()
    assert not errors
    return parameters


@pytest.mark.parametrize("kind", KINDS)
@in_threads_and_processes
def test_threads_that_read_change_nothing(ranks: Ranks, kind: str) -> None:
    theirs = ranks.run(train, "plain", 30)[0][-1]
    assert_same(ranks.run(train_beside_readers, kind, 30), theirs)


class Crowded(torch.optim.SGD):
    """Lets somebody else in while it updates, and counts who is inside at the same time."""

    parameter_wise = True
    inside = most = 0
    when_inside: Callable[[], None] | None = None

    def step(self, closure: Any = None) -> Any:
        Crowded.inside += 1
        Crowded.most = max(Crowded.most, Crowded.inside)
        if (call := Crowded.when_inside) is not None:
            Crowded.when_inside = None
            call()
        result = super().step(closure)
        Crowded.inside -= 1
        return result


def read_two_buckets_at_once() -> tuple[int, list[torch.Tensor]]:
    rank, model = choose_communicator().rank, wrapped()
    optimizer = OverlappedOptimizer(Crowded(model.parameters(), lr=0.05, momentum=0.9), model)
    model(batch(rank, 0, width=9)).square().mean().backward()
    optimizer.step()
    first, *_, last = model.module.layers.parameters()
    reader = threading.Thread(target=last.sum)

    def meet() -> None:
        reader.start()
        # Long enough for it to get inside, if it could.
        reader.join(0.2)

    Crowded.inside = Crowded.most = 0
    Crowded.when_inside = meet
    first.sum()
    reader.join()
    optimizer.flush()
    return Crowded.most, parameters_of(model)


@in_processes
def test_two_threads_never_update_at_the_same_time(ranks: Ranks) -> None:
    results = ranks.run(read_two_buckets_at_once)
    assert [most for most, _ in results] == [1, 1]
    assert_same([parameters for _, parameters in results], ranks.run(train, "plain", 1)[0][-1])


def flush_from_all_sides(kind: str) -> list[torch.Tensor]:
    rank, model = choose_communicator().rank, wrapped()
    optimizer, errors = optimizer_of(kind, model), list[BaseException]()

    def flush() -> None:
        try:
            optimizer.flush()
        except BaseException as error:
            errors.append(error)

    for step in range(30):
        train_step(model, optimizer, batch(rank, step, width=9))
        threads = [threading.Thread(target=flush) for _ in range(3)]
        for thread in threads:
            thread.start()
        flush()
        assert not any(type(parameter) is AwaitedParameter for parameter in model.parameters())
        for thread in threads:
            thread.join()
    assert not errors
    return parameters_of(model)


@pytest.mark.parametrize("kind", KINDS)
@in_processes
def test_several_threads_may_flush(ranks: Ranks, kind: str) -> None:
    assert_same(ranks.run(flush_from_all_sides, kind), ranks.run(train, "plain", 30)[0][-1])


def test_all_who_flush_wait_for_the_end() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    gathers, may_arrive, results = Gathers(torch.device("cpu")), threading.Event(), list[Any]()

    def arrive(parameter: nn.Parameter) -> None:
        may_arrive.wait()
        parameter.add_(1)

    def make(started: Any) -> None:
        for gather, parameter in zip(started, parameters, strict=True):
            gather.started(lambda parameter=parameter: arrive(parameter))

    def flush() -> None:
        gathers.finish()
        results.append([parameter.tolist() for parameter in parameters])

    gathers.change([[parameter] for parameter in parameters], make)
    threads = [threading.Thread(target=flush) for _ in range(4)]
    for thread in threads:
        thread.start()
    may_arrive.set()
    for thread in threads:
        thread.join()
    assert results == [[[1.0, 1.0]] * 3] * 4


# -- signal handlers and interrupts, at any moment --------------------------------------------------------------------


OURS = (f"optim{os.sep}sharded",)


@contextmanager
def at_moment(number: int, call: Callable[[], None], where: tuple[str, ...] = OURS) -> Iterator[list[int]]:
    """Have ``call`` run before the bytecode of that number in these files on this thread. Yields their number."""
    count = [0]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not any(name in frame.f_code.co_filename for name in where):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count[0] += 1
            if count[0] == number:
                call()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def train_with_a_handler(
    kind: str, steps: int, where: tuple[str, ...] = OURS
) -> tuple[list[list[torch.Tensor] | None], list[torch.Tensor], int]:
    """In each step rank 0 reads all parameters at another moment. What it has read; None where it was refused."""
    rank, model = choose_communicator().rank, wrapped()
    assert threading.current_thread() is threading.main_thread()
    optimizer, seen, most = optimizer_of(kind, model), list[list[torch.Tensor] | None](), 1

    def handle() -> None:
        try:
            seen.append([parameter.detach().clone() for parameter in model.parameters()])
        except MisuseError:
            seen.append(None)

    for step in range(steps):
        loss = model(batch(rank, step, width=9)).square().mean()
        loss.backward()
        moment = 1 + most * step // steps if rank == 0 else 0
        with at_moment(moment, handle, where) as count:
            optimizer.step()
            optimizer.zero_grad()
            READS["sum"](model)
        most = max(most, count[0])
        if rank == 0 and len(seen) == step:
            # There is no such moment in this step.
            handle()
    return seen, parameters_of(model), most


# What torch's optimizers do around a step.
RECORDS = (f"autograd{os.sep}profiler.py", f"torch{os.sep}_ops.py")


@pytest.mark.parametrize(
    "where", [pytest.param(OURS, id="ours"), pytest.param(RECORDS, id="records", marks=pytest.mark.breadth)]
)
@pytest.mark.parametrize("kind", KINDS)
@in_processes
def test_a_signal_handler_reads_parameters_of_one_step(ranks: Ranks, kind: str, where: tuple[str, ...]) -> None:
    steps = 80
    states = ranks.run(train, "plain", steps)[0]
    results = ranks.run(train_with_a_handler, kind, steps, where)
    assert_same([parameters for _, parameters, _ in results], states[-1])
    seen, _, _ = results[0]
    assert len(seen) == steps
    befores = 0
    for step, snapshot in enumerate(seen):
        assert snapshot is not None
        is_old, is_new = (
            all(
                torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12)
                for mine, theirs in zip(snapshot, state, strict=True)
            )
            for state in states[step : step + 2]
        )
        assert is_old or is_new
        befores += is_old
    # Moments of both kinds were there.
    assert 0 < befores < steps


def test_no_python_code_runs_where_a_record_ends_with_torch_functions_switched_off() -> None:
    """Of a mode either, as that of torch.set_default_device(): see [Note: switched off]."""
    end_records_at_once()
    switched_on = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            switched_on.append(torch._C._is_torch_function_enabled())
            return func(*args, **(kwargs or {}))

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with Watching(), record_function("sums"):
            torch.ones(3).sum()
        torch.ones(3).prod()
    assert len(switched_on) >= 2
    assert all(switched_on)
    (record,) = [event for event in profiler.events() if event.name == "sums"]
    within = {event.name for event in profiler.events() if event.time_range.end <= record.time_range.end}
    assert "aten::sum" in within
    assert "aten::prod" not in within


def pickle_at_every_moment(kind: str, steps: int) -> int:
    """Modules are pickled with their parameters, and not by way of a state_dict()."""
    rank, model = choose_communicator().rank, wrapped()
    optimizer, most = optimizer_of(kind, model), 1
    for step in range(steps):
        model(batch(rank, step, width=9)).square().mean().backward()
        moment = 1 + most * step // steps if rank == 0 else 0
        with at_moment(moment, lambda: pickle.dumps(model.module), ANNOUNCING) as count:
            optimizer.step()
        most = max(most, count[0])
        optimizer.zero_grad()
    return most


ANNOUNCING = (f"sharded{os.sep}gather.py",)


@pytest.mark.parametrize("kind", KINDS)
@in_processes
def test_a_signal_handler_pickles_the_model(ranks: Ranks, kind: str) -> None:
    assert ranks.run(pickle_at_every_moment, kind, 80)[0] > 80


def test_a_parameter_arrives_while_it_is_pickled() -> None:
    """By a handler that reads it, at any moment."""
    gathers, most, moment = Gathers(torch.device("cpu")), 1, 1
    while moment <= most:
        parameter = nn.Parameter(torch.zeros(2))
        parameter.note = "kept"  # type: ignore[attr-defined]
        gathers.change([[parameter]], partial(_add_one, parameter))
        with at_moment(moment, parameter.sum, ANNOUNCING) as count:
            pickled = pickle.dumps(parameter)
        again = pickle.loads(pickled)
        assert again.tolist() == [1.0, 1.0]
        assert vars(again) == {"note": "kept"}
        most, moment = max(most, min(count[0], 150)), moment + 1
    assert most > 50


def _add_one(parameter: nn.Parameter, started: Sequence[Gather]) -> None:
    started[0].started(lambda: parameter.detach().add_(1))


def train_and_interrupt(kind: str, steps: int) -> tuple[list[torch.Tensor], int]:
    """In each step rank 0 is interrupted at another moment while it waits for parameters, and goes on."""
    rank, model = choose_communicator().rank, wrapped()
    optimizer, interrupts, most = optimizer_of(kind, model), 0, 1

    def interrupt() -> None:
        raise KeyboardInterrupt

    for step in range(steps):
        train_step(model, optimizer, batch(rank, step, width=9))
        # The first steps tell how many moments there are.
        moment = 1 + most * (step - 3) // steps if rank == 0 and step > 2 else 0
        try:
            with at_moment(moment, interrupt) as count:
                torch.save(model.module.state_dict(), io.BytesIO())
        except KeyboardInterrupt:
            interrupts += 1
        most = max(most, count[0])
        torch.save(model.module.state_dict(), io.BytesIO())
    return parameters_of(model), interrupts


@pytest.mark.parametrize("kind", KINDS)
@in_processes
def test_an_interrupted_wait_goes_on(ranks: Ranks, kind: str) -> None:
    results = ranks.run(train_and_interrupt, kind, 60)
    assert_same([parameters for parameters, _ in results], ranks.run(train, "plain", 60)[0][-1])
    assert results[0][1] > 50


def interrupt_a_step(kind: str, part: float) -> str:
    """Rank 0 is interrupted somewhere in its third step, and reads: old parameters, or new ones."""
    communicator = fresh_communicator("shared-memory", 30.0)
    model = wrapped(communicator)
    optimizer, most, before = optimizer_of(kind, model), 0, parameters_of(model)

    def interrupt() -> None:
        raise KeyboardInterrupt

    for step in range(3):
        model(batch(communicator.rank, step, width=9)).square().mean().backward()
        moment = 1 + int(most * part) if communicator.rank == 0 and step == 2 else 0
        try:
            with at_moment(moment, interrupt) as count:
                optimizer.step()
        except KeyboardInterrupt:
            # If its step has not begun, rank 1 waits for it in vain.
            read = parameters_of(model)
            communicator.abort("interrupted")
            are_old = [torch.equal(mine, theirs) for mine, theirs in zip(read, before, strict=True)]
            assert all(are_old) or not any(are_old)
            return "old" if all(are_old) else "new"
        most = count[0]
        if step < 2:
            before = parameters_of(model)
            optimizer.zero_grad()
    with suppress(GradsyncError):
        optimizer.flush()
    return "not interrupted"


@pytest.mark.parametrize("kind", KINDS)
@in_processes
def test_an_interrupted_step_leaves_a_model_that_can_be_read(ranks: Ranks, kind: str) -> None:
    # Most moments are those before it begins.
    parts = [0.0, 0.5, 0.9, 0.97, 0.98, 0.99]
    found = [ranks.run(interrupt_a_step, kind, part)[0] for part in parts]
    assert {"old", "new"} <= set(found)


def optimize_anew(kind: str) -> list[torch.Tensor]:
    """After a step that was interrupted while it was announced, another optimizer takes the parameters."""
    rank, model = choose_communicator().rank, wrapped()
    optimizer = optimizer_of(kind, model)
    model(batch(rank, 0, width=9)).square().mean().backward()
    with patch.object(UpdateThread, "run", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.zero_grad()
    assert any(type(parameter) is AwaitedParameter for parameter in model.parameters())
    optimizer.close()
    optimizer = optimizer_of(kind, model)
    model(batch(rank, 0, width=9)).square().mean().backward()
    optimizer.step()
    return parameters_of(model)


@pytest.mark.parametrize("kind", KINDS)
@in_processes
def test_after_an_interrupted_step_another_optimizer_may_be_made(ranks: Ranks, kind: str) -> None:
    assert_same(ranks.run(optimize_anew, kind), ranks.run(train, "plain", 1)[0][-1])


# -- real signals -----------------------------------------------------------------------------------------------------


def step_apart(kind: str, may_step: Path) -> DistributedDataParallel:
    """Rank 0 has taken its step; rank 1 takes its own when there is a file of that name."""
    rank, model = choose_communicator().rank, wrapped()
    optimizer = optimizer_of(kind, model)
    model(batch(rank, 0, width=9)).square().mean().backward()
    while rank == 1 and not may_step.exists():
        time.sleep(0.001)
    optimizer.step()
    return model


@contextmanager
def signalled_in_a_wait(model: DistributedDataParallel, number: signal.Signals) -> Iterator[None]:
    """This process gets the signal when it waits for another rank."""
    waits = model.synchronizer.engine.communicator.state.waits

    def send() -> None:
        while not waits:
            time.sleep(0.001)
        os.kill(os.getpid(), number)

    helper = threading.Thread(target=send)
    helper.start()
    yield
    helper.join()


def interrupt_a_wait(kind: str, folder: str) -> list[torch.Tensor]:
    """Rank 1 comes to its step when rank 0 was interrupted in the wait for it."""
    was_interrupted = Path(folder) / "interrupted"
    model = step_apart(kind, was_interrupted)
    if choose_communicator().rank == 1:
        return parameters_of(model)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with signalled_in_a_wait(model, signal.SIGINT), pytest.raises(KeyboardInterrupt):
        model.module.state_dict()["layers.0.weight"].sum()
        next(model.parameters()).sum()
    was_interrupted.touch()
    torch.save(model.module.state_dict(), io.BytesIO())
    return parameters_of(model)


@pytest.mark.parametrize("kind", KINDS)
@in_processes
def test_after_ctrl_c_in_a_wait_the_model_can_be_saved(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    assert_same(ranks.run(interrupt_a_wait, kind, str(tmp_path)), ranks.run(train, "plain", 1)[0][-1])


def save_on_a_signal(kind: str, folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The handler of a signal waits for parameters that rank 1 has not sent yet, inside of a wait for them."""
    is_waiting, saved = Path(folder) / "waiting", list[torch.Tensor]()
    model = step_apart(kind, is_waiting)
    if choose_communicator().rank == 1:
        return [], parameters_of(model)

    def save(*_: Any) -> None:
        is_waiting.touch()
        saved.extend(parameters_of(model))

    before = signal.signal(signal.SIGUSR1, save)
    with signalled_in_a_wait(model, signal.SIGUSR1):
        parameters = parameters_of(model)
    signal.signal(signal.SIGUSR1, before)
    return saved, parameters


@pytest.mark.parametrize("kind", KINDS)
@in_processes
def test_a_handler_that_saves_waits_inside_of_a_wait(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    (saved, parameters), (_, theirs) = ranks.run(save_on_a_signal, kind, str(tmp_path))
    assert_same([saved, parameters], theirs)


# -- the end of a process ---------------------------------------------------------------------------------------------

ENDS_AFTER_A_STEP = """
import atexit, sys
# Before torch is there, so after all that it does at the end.
atexit.register(lambda: print(model.module.weight.sum().item() != before) if READS else None)
import torch
import torch.distributed as dist
from gradsync import DistributedDataParallel, OverlappedOptimizer, ShardedOptimizer

kind, READS = sys.argv[1], sys.argv[2] == "read"
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
plain = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = ShardedOptimizer(plain, model) if kind == "sharded" else OverlappedOptimizer(plain, model)
before = model.module.weight.sum().item()
model(torch.ones(2, 64)).square().sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize("then", ["read", "leave"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_may_end_after_a_step(kind: str, then: str, tmp_path: Path) -> None:
    """Nobody has waited for the parameters, and who reads them at the very end still gets them."""
    script = tmp_path / "ends_after_a_step.py"
    script.write_text(ENDS_AFTER_A_STEP)
    ran = run_scripts([script], ranks=2, folder=tmp_path, arguments=[kind, then], timeout=50)[script]
    assert ran.error is None
    assert ran.output.split() == (["True"] * 2 if then == "read" else [])


# -- several ----------------------------------------------------------------------------------------------------------


def train_two_models() -> list[list[torch.Tensor]]:
    """Parameters of several optimizers in one operation."""
    rank, models = choose_communicator().rank, [wrapped(), wrapped()]
    optimizers = [optimizer_of(kind, model) for kind, model in zip(KINDS, models, strict=True)]
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            train_step(model, optimizer, batch(rank, step, width=9))
        torch._foreach_norm([parameter for model in models for parameter in model.parameters()])
    return [parameters_of(model) for model in models]


@in_threads_and_processes
def test_several_optimizers(ranks: Ranks) -> None:
    for each in ranks.run(train_two_models):
        assert_same(each, ranks.run(train, "plain", 5)[0][-1])


def train_and_forget(kind: str, mode: Any) -> list[bool]:
    """Whether the engine, the optimizer and a parameter of a model are gone that was trained and dropped."""
    rank = choose_communicator().rank

    def work() -> list[Any]:
        model = wrapped()
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        made: Any = ShardedOptimizer(plain, model, mode=mode) if kind == "sharded" else None
        optimizer = made or OverlappedOptimizer(plain, model, mode=mode)
        train_step(model, optimizer, batch(rank, 0, width=9))
        optimizer.flush()
        return [weakref.ref(each) for each in (model.synchronizer.engine, optimizer, next(model.parameters()))]

    references = work()
    # Threads that wait for a device let go of what they hold when it has ended.
    deadline = time.monotonic() + 10.0
    gc.collect()
    while any(reference() is not None for reference in references) and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()
    return [reference() is None for reference in references]


@pytest.mark.parametrize("mode", ["next-forward", "auto"])
@pytest.mark.parametrize("kind", KINDS)
@in_processes
def test_a_model_that_is_not_used_any_more_goes_away(ranks: Ranks, kind: str, mode: Any) -> None:
    assert ranks.run(train_and_forget, kind, mode) == [[True] * 3] * 2


def test_an_optimizer_that_is_not_used_any_more_has_no_thread() -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "gradsync updates"]

    before = len(names())
    gathers = Gathers(torch.device("cpu"))
    gathers.change([[nn.Parameter(torch.zeros(1))]], lambda _: None)
    assert len(names()) == before + 1
    thread = next(each for each in reversed(threading.enumerate()) if each.name == "gradsync updates")
    del gathers
    thread.join()
    assert len(names()) == before


def leave_memory() -> list[list[bool]]:
    """Of the memory in which parameters were made, whether each is there still: before a step, after it, and later."""
    layers = filled(Layers().double())
    model = DistributedDataParallel(layers, bucket_cap_mb=TINY)
    optimizer = ShardedOptimizer(torch.optim.SGD(list(layers.layers.parameters()), lr=0.1), model)
    memory = [StorageWeakRef(parameter.untyped_storage()) for parameter in layers.layers.parameters()]
    found = []
    for step in range(3):
        train_step(model, optimizer, batch(choose_communicator().rank, step, width=9))
        optimizer.flush()
        found.append([not reference.expired() for reference in memory])
    return found


@in_threads_and_processes
def test_memory_that_a_thread_may_be_reading_is_not_freed_under_it(ranks: Ranks) -> None:
    """A step moves parameters into other memory; what began to read one before it goes on there."""
    for first, second, third in ranks.run(leave_memory):
        assert all(first)
        assert not any(second + third)


def read_across_the_beginning(kind: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """A thread reads a parameter in two halves: one before a step begins, one when it was asked to."""
    rank, model = choose_communicator().rank, wrapped()
    optimizer = optimizer_of(kind, model)
    train_step(model, optimizer, batch(rank, 0, width=9))
    optimizer.flush()
    parameter, read = model.module.layers[0].weight, []
    announced, reading = threading.Event(), threading.Event()

    def halves(values: torch.Tensor) -> torch.Tensor:
        if torch.overrides.has_torch_function_unary(values):
            return torch.overrides.handle_torch_function(halves, (values,), values)
        first = values[:4].clone()
        reading.set()
        # More than the step needs, where it does not wait.
        time.sleep(0.2)
        return torch.cat([first, values[4:].clone()])

    def read_it() -> None:
        announced.wait()
        with torch.no_grad():
            read.append(halves(parameter))

    run = UpdateThread.run

    def run_later(self: UpdateThread, action: Callable[[], None]) -> None:
        if type(parameter) is AwaitedParameter and threading.current_thread() is not reader and not announced.is_set():
            announced.set()
            reading.wait()
        run(self, action)

    reader = threading.Thread(target=read_it)
    before = parameter.detach().clone()
    model(batch(rank, 1, width=9)).square().mean().backward()
    reader.start()
    with patch.object(UpdateThread, "run", run_later):
        optimizer.step()
    reader.join()
    optimizer.flush()
    return read, before, parameter.detach().clone()


@in_threads_and_processes
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_begins_when_threads_have_read_what_it_has_announced(ranks: Ranks, kind: str) -> None:
    for read, before, after in ranks.run(read_across_the_beginning, kind):
        assert not torch.equal(before, after)
        assert len(read) == 1
        assert torch.equal(read[0], before)
