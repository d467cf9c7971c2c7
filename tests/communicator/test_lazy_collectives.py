"""Small collectives come to their end whatever their ranks do meanwhile, as large ones do and as those of Gloo."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from gradsync.communicator import Communicator, background
from gradsync.communicator.background import Background
from tests.communicators import fresh_communicator
from tests.ranks import pool_of

pytestmark = pytest.mark.timeout(120)

SMALL, LARGE = 1024, 200_000
SECONDS = 15.0


def communicators(kind: str) -> list[Communicator]:
    return [fresh_communicator(kind, SECONDS) for _ in range(2)]


def wait_in_two_orders(kind: str, numel: int, looks: bool) -> list[float]:
    """Both ranks start one on each communicator in one order, and wait for them in two."""
    one, other = communicators(kind)
    tensors = [torch.ones(numel), torch.ones(numel)]
    with pytest.MonkeyPatch.context() as patch:
        if not looks:
            # Whoever sleeps must hand the other one over by itself.
            patch.setattr(background._Sweeper, "_look", lambda *_: None)
        handles = [communicator.all_reduce(tensor) for communicator, tensor in zip((one, other), tensors, strict=True)]
        for handle in handles if one.rank == 0 else reversed(handles):
            handle.wait()
    return [float(tensor.mean()) for tensor in tensors]


@pytest.mark.parametrize(
    ("kind", "numel"), [("shared-memory", SMALL), ("shared-memory", LARGE), ("group", SMALL), ("peer-exchange", SMALL)]
)
def test_two_communicators_may_be_waited_for_in_any_order(kind: str, numel: int) -> None:
    assert pool_of(2).run(wait_in_two_orders, kind, numel, True) == [[2.0, 2.0]] * 2


def test_who_sleeps_in_one_hands_the_others_over() -> None:
    assert pool_of(2).run(wait_in_two_orders, "shared-memory", SMALL, False) == [[2.0, 2.0]] * 2


def meet_elsewhere(kind: str) -> list[float]:
    """Between start and wait rank 1 meets the others somewhere else, where they come only after the wait."""
    communicator, _ = communicators(kind)
    tensor = torch.ones(SMALL)
    handle = communicator.all_reduce(tensor)
    if communicator.rank == 0:
        handle.wait()
    dist.barrier()
    handle.wait()
    return [float(tensor.mean())]


@pytest.mark.parametrize("kind", ["shared-memory", "group", "peer-exchange"])
def test_a_barrier_may_come_before_the_wait(kind: str) -> None:
    assert pool_of(2).run(meet_elsewhere, kind) == [[2.0]] * 2


class Leisurely:
    """A queue in which somebody is at work, or not."""

    is_looked_after = True

    def __init__(self, *firsts: object | None) -> None:
        self._firsts = list(firsts)
        self.wakes = 0

    def first(self) -> object | None:
        return self._firsts.pop(0)

    def wake(self) -> None:
        self.wakes += 1


def test_only_what_was_seen_before_is_moved_on() -> None:
    walk = background._Sweeper()
    one, other = object(), object()
    queue = Leisurely(one, one, other, None, None)
    for seen, wakes, looked_after in ((None, 0, True), (one, 1, True), (one, 1, True), (other, 1, False)):
        walk._queues[queue] = seen
        walk._look(queue, seen)
        assert (queue.wakes, queue.is_looked_after) == (wakes, looked_after)
    assert queue not in walk._queues


def test_what_is_added_while_the_patrol_leaves_is_looked_after() -> None:
    walk = background._Sweeper()
    queue = Leisurely(None, object())
    walk._queues[queue] = None
    walk._look(queue, None)
    assert queue.is_looked_after
    assert queue in walk._queues


@pytest.mark.parametrize("lazy", [True, False])
def test_who_looks_on_hurries_nothing(lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be another training that is recorded than the one that is not."""
    monkeypatch.setattr(background._Sweeper, "_look", lambda *_: None)
    queue, threads = Background("of a test"), list[str]()
    task = queue.start(lambda: threads.append(threading.current_thread().name), lazy=lazy)
    task.when_done(lambda: threads.append("told"))
    if lazy:
        time.sleep(0.05)
        assert not threads
        task.wait()
    deadline = time.monotonic() + SECONDS
    while len(threads) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threads == [threading.current_thread().name if lazy else "of a test", "told"]
    queue.close()


@pytest.mark.timeout(20)
def test_a_thread_that_was_interrupted_in_the_middle_holds_nobody_up() -> None:
    """The handler of a signal may wait for another thread, which comes by here."""
    looking, woken = background._Sweeper(), list[bool]()

    class Queue:
        is_looked_after = False

        def first(self) -> object | None:
            return None

        def wake(self) -> None:
            woken.append(True)

    queue = Queue()
    with looking._lock:
        looking.flush_lazy()
        looking.look_after(queue)
    # There it runs by itself, and the next collective has it looked after.
    assert woken == [True]
    assert not queue.is_looked_after
