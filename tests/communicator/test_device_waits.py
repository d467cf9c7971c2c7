"""What a device waits for, as the watch sees it: no handle of ours waits there, and torch's timeout names nobody.

There is no device here. Its collectives are stood in for by futures, which is all that the watch knows of them.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.communicator import InProcessWorld, ProcessGroupCommunicator, transport_state
from gradsync.communicator import process_group as process_group_module
from gradsync.communicator.collective import Collective
from gradsync.communicator.device_stage import DeviceWork
from gradsync.communicator.transport_state import Outstanding, StartedCollective
from gradsync.errors import CommunicatorLostError
from gradsync.health.watch import detector as judge_module
from gradsync.health.watch.agent import Plan
from gradsync.health.watch.detector import ExitRecord
from gradsync.health.watch.guards import GRACE_SECONDS, LEFT_ON_DEVICE_SECONDS, LEFT_SECONDS, Guards
from gradsync.health.watch.status import Sampler
from tests.health.test_watch import MEMBERS, Engine, Hub, judge_of, stands
from tests.processes import eventually
from tests.ranks import RankPool, pool_of

pytestmark = [pytest.mark.timeout(60), pytest.mark.cpu_ranks("its devices are stood in for")]

SUCCESS, TIMEOUT, COMM_ERROR = 0, 1, 2


def started(place: int, at: float = 0.0) -> StartedCollective:
    """One that is under way; its future is completed by ``outcome.set_result``."""
    return StartedCollective(torch.futures.Future(), place, at, place, "all_reduce", "sum", 3, torch.float32)


def begun() -> Outstanding:
    """In which one has ended, so that it is known that others will."""
    outstanding, first = Outstanding(), started(0)
    first.outcome.set_result(SUCCESS)
    outstanding.add(first)
    assert outstanding.oldest() is None
    outstanding._since = 0.0
    return outstanding


def guarded(timeout: float = math.inf) -> tuple[Guards, Any]:
    communicator = InProcessWorld(1).communicator(0)
    guards = Guards(communicator, timeout)
    guards.add(communicator, str, lambda number, message: None)
    communicator.state.outstanding = begun()
    return guards, communicator


def test_the_oldest_is_the_first_that_has_not_ended() -> None:
    outstanding, works = begun(), [started(place, float(place)) for place in range(1, 5)]
    assert outstanding.oldest() is None
    for work in works:
        outstanding.add(work)
    assert outstanding.oldest() == (works[0], 1.0)
    works[1].outcome.set_result(SUCCESS)
    assert outstanding.oldest() == (works[0], 1.0)
    works[0].outcome.set_result(SUCCESS)
    before = time.monotonic()
    oldest = outstanding.oldest()
    assert oldest is not None
    assert oldest[0] is works[2]
    assert oldest[1] >= before, "the device cannot have come to it before those before it had ended"
    assert len(outstanding) == 2
    works[2].outcome.set_result(COMM_ERROR)
    assert outstanding.oldest() == (works[2], oldest[1]), "the kernels of one that failed hang all the same"
    assert works[2].has_failed


def test_where_no_future_is_ever_completed_nobody_seems_to_wait() -> None:
    outstanding, work = Outstanding(), started(1, -100.0)
    outstanding.add(work)
    outstanding.add(started(2, -100.0))
    assert outstanding.oldest() is outstanding.overdue(1.0) is None
    work.outcome.set_result(SUCCESS)
    oldest, overdue = outstanding.oldest(), outstanding.overdue(1.0)
    assert oldest is not None
    assert overdue is oldest[0]
    assert outstanding.overdue(time.monotonic() + 200.0) is None


def test_what_nobody_looks_at_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_state, "MOST_LISTED", 8)
    outstanding = Outstanding()
    for place in range(40):
        work = started(place)
        work.outcome.set_result(SUCCESS)
        outstanding.add(work)
    assert len(outstanding) <= 9
    for place in range(40):
        outstanding.add(started(place))
    assert len(outstanding) <= 16


def test_threads_that_add_and_look_lose_nothing() -> None:
    outstanding, works = begun(), [started(place) for place in range(2000)]
    last = started(2000)

    def look() -> None:
        while (oldest := outstanding.oldest()) is None or oldest[0] is not last:
            pass

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for work in works:
        outstanding.add(work)
        work.outcome.set_result(SUCCESS)
    outstanding.add(last)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(outstanding) == 1


def test_a_wait_on_a_device_is_one_that_others_hear_of() -> None:
    guards, communicator = guarded()
    sampler = Sampler(lambda: guards.states)
    now = time.monotonic()
    assert sampler.sample(now).waits == ()
    work = started(12, now - 2.0)
    communicator.state.outstanding.add(work)
    (wait,) = sampler.sample(now).waits
    assert (wait.communicator, wait.place, wait.seconds) == (0, 12, 2.0)
    assert wait.what == "collective 12 (all_reduce sum of 3 × torch.float32)"
    work.outcome.set_result(SUCCESS)
    assert sampler.sample(now).waits == ()


def test_a_stopped_rank_is_found_by_those_whose_devices_wait() -> None:
    """As on the CPU: its silence alone harms nobody, and a wait of a second makes it worth a word."""
    guards, communicator = guarded()
    now = time.monotonic()
    communicator.state.outstanding.add(started(13, now - 2.0))
    detector = judge_of(stands(12), stands(12), stands(12), now=now - 6.0)
    detector.update(2, stands(13), now)
    assert detector.suspects(now) == []
    detector.update(0, Sampler(lambda: guards.states).sample(now), now)
    (silent,) = detector.due(now)
    assert (silent.member, silent.kind, silent.waiters) == (1, "silent", (0,))


def test_who_waits_on_a_device_for_a_lost_rank_is_stranded() -> None:
    guards, communicator = guarded()
    now = time.monotonic()
    killed = ExitRecord(member=1, left=False, words="was killed", at=0.0, status=stands(12))
    left = ExitRecord(member=1, left=True, words="has ended its script", at=0.0, status=stands(12))

    def stranded(ending: ExitRecord, after: float) -> bool:
        return bool(list(guards.find_stranded([(ending, now)], now + after)))

    assert not stranded(killed, 60.0), "the device has nothing to do for which it would need the others"
    served = started(12, now - 1.0)
    communicator.state.outstanding.add(served)
    assert not stranded(killed, 0.5 * GRACE_SECONDS)
    assert stranded(killed, 2 * GRACE_SECONDS)
    # What it had started may be under way: its device goes on for a moment.
    assert not stranded(left, LEFT_SECONDS)
    assert stranded(left, 2 * LEFT_ON_DEVICE_SECONDS)
    served.outcome.set_result(COMM_ERROR)
    assert stranded(killed, 0.0)
    assert stranded(left, 0.0)
    communicator.state.outstanding = begun()
    communicator.state.outstanding.add(started(13, now - 1.0))
    assert stranded(left, 2 * LEFT_SECONDS)
    communicator._fail(CommunicatorLostError("it is known"))
    assert not stranded(killed, 60.0)


def test_when_a_device_has_waited_for_too_long() -> None:
    guards, communicator = guarded(20.0)
    assert guards.deadline() == math.inf
    communicator.state.outstanding.add(started(12, 100.0))
    communicator.state.outstanding.add(started(13, 101.0))
    assert guards.deadline() == 120.0
    assert guards.overdue(119.9) == []
    ((number, overdue),) = guards.overdue(120.5)
    assert (number, overdue.started_at) == (0, 100.0)
    assert "collective 12" in overdue.describe()
    communicator._fail(CommunicatorLostError("it is known"))
    assert guards.deadline() == math.inf


def test_what_cannot_end_is_not_started_on_a_device() -> None:
    """Of a rank that left, only what it has not started; of one that was killed nobody knows what it has."""
    guards, communicator = guarded()
    guards.refuse_new(ExitRecord(member=1, left=True, words="left", at=0.0, status=stands(12)), "rank 1 left")
    assert (communicator.state.lost_rank, communicator.state.lost_after) == ("rank 1 left", 12)
    guards.refuse_new(ExitRecord(member=2, left=True, words="left", at=0.0, status=stands(14)), "rank 2 left")
    assert (communicator.state.lost_rank, communicator.state.lost_after) == ("rank 1 left", 12)
    guards.refuse_new(ExitRecord(member=3, left=False, words="gone", at=0.0, status=stands(14)), "rank 3 is gone")
    assert (communicator.state.lost_rank, communicator.state.lost_after) == ("rank 3 is gone", 0)


def test_the_watch_comes_before_torch() -> None:
    def plan(timeout: float) -> Plan:
        return Plan(members=MEMBERS, me=0, here=(True,) * 4, timeout=timeout)

    assert plan(600.0).device_timeout == 599.0
    assert plan(5.0).device_timeout == 4.5


def stop_one(timeout: float) -> tuple[str, float, bool]:
    """A rank says nothing from the beginning, and the device of this one waits for it."""
    judge_module.SLOW_SECONDS = 1.0
    try:
        with Hub(timeout=timeout) as hub:
            line = hub.lines[1]
            engine = Engine(3)
            hub.agent.sampler.add(engine)
            communicator = ProcessGroupCommunicator(hub.group)
            hub.agent.guard(communicator)
            began = time.monotonic()
            communicator.state.outstanding = begun()
            communicator.state.outstanding.add(started(12, began))
            assert eventually(lambda: communicator.failure is not None)
            seconds = time.monotonic() - began
            line.close()
            return str(communicator.failure), seconds, hub.agent._thread.is_alive()
    finally:
        judge_module.SLOW_SECONDS = 5.0


def test_a_wait_on_a_device_ends_before_the_timeout_of_the_group() -> None:
    ((said, seconds, alive),) = pool_of(1).run(stop_one, 4.0)
    assert 3.5 <= seconds <= 4.5
    assert said.startswith("rank 1 (process 101 on here) has not been heard of for ")
    assert "rank 0 waited 4 s in window 4, in collective 12 (all_reduce sum of 3 × torch.float32)" in said
    assert "the timeout of the group is 4 s" in said
    assert alive


def hear_of_what_was_given_up() -> tuple[str, str, list[Any]]:
    """Rank 1 has given up two communicators, one of them over a device; then this rank gives up a third."""
    with Hub() as hub:
        line = hub.lines[1]
        on_device, on_host, own = (InProcessWorld(1).communicator(0) for _ in range(3))
        for communicator in (on_device, on_host, own):
            hub.agent.guard(communicator)
        on_device.state.outstanding = begun()
        for number, words in ((7, "there is none"), (1, "rank 1 is out of luck"), (0, "rank 1 is out of luck")):
            line.send({"given_up": number, "words": words})
        assert eventually(lambda: on_device.failure is not None)
        for _ in range(2):
            own.abort("no luck here either")
        line.connection.settimeout(5.0)
        told: list[Any] = []
        assert eventually(lambda: told.extend(each for each in line.receive() if "given_up" in each) or bool(told))
        time.sleep(0.2)
        told += [each for each in line.receive() if "given_up" in each]
        return str(on_device.failure), str(on_host.failure), told


def test_what_a_rank_gives_up_the_others_lose_at_once_where_only_devices_wait() -> None:
    ((said, on_host, told),) = pool_of(1).run(hear_of_what_was_given_up)
    assert said == "rank 1 is out of luck"
    assert on_host == "None"
    (message,) = told
    assert message["given_up"] == 2
    assert message["words"].endswith("has given its communicator up: no luck here either")


# -- how collectives get there ----------------------------------------------------------------------------------------


class _Work:
    """A work of NCCL's, as far as a device is not needed for it."""

    def __init__(self, *, tells: bool) -> None:
        self.future: Any = torch.futures.Future()
        self._tells = tells

    def is_completed(self) -> bool:
        return bool(self.future.done())

    def wait(self) -> None:
        pass

    def get_future_result(self) -> Any:
        if not self._tells:
            raise RuntimeError("Work::getFutureResult not implemented.")
        return self.future


def list_collectives(tells: bool) -> tuple[list[int], bool, list[str]]:
    """Tensors without values stand in for those of a device."""
    group: Any = dist.new_group([dist.get_rank()])
    communicator = ProcessGroupCommunicator(group)
    tensor = torch.empty(3, device="meta")
    works: list[_Work] = []

    def begin() -> DeviceWork:
        works.append(_Work(tells=tells))
        return DeviceWork(works[-1], [tensor])

    def start() -> Any:
        return communicator._start(Collective(communicator, "all_reduce", "sum", 3, torch.float32), tensor, begin)

    handles = [start()]
    assert communicator.state.outstanding is None, "nobody watches"
    communicator.state.complete_message = str
    handles += [start() for _ in range(3)]
    outstanding = communicator.state.outstanding
    places = [] if outstanding is None else [each.place for each in outstanding._listed]
    # It has left, after the fifth.
    communicator.state.lost_rank, communicator.state.lost_after = "rank 7 has left", 5
    said = []
    for _ in range(3):
        try:
            handles.append(start())
        except CommunicatorLostError as error:
            said.append(str(error))
    for handle in handles:
        handle.work._kept.waited()
    dist.destroy_process_group(group)
    return places, len(works) == 5, said


@pytest.mark.parametrize("tells", [True, False])
def test_collectives_on_devices_are_listed_where_the_backend_tells(tells: bool) -> None:
    ((places, started_none_after, said),) = pool_of(1).run(list_collectives, tells)
    assert places == ([2, 3, 4] if tells else [])
    assert started_none_after, "what needs a rank that has ended is not begun"
    assert said == ["rank 7 has left"] * 2


def go_on_after_a_stop() -> tuple[str, int]:
    """The process was stopped for longer than the timeout, and its thread of training runs before that of the watch."""
    group: Any = dist.new_group([dist.get_rank()])
    communicator = ProcessGroupCommunicator(group)
    communicator.state.complete_message, communicator.state.device_timeout = (
        lambda message: f"rank 7 is gone. {message}",
        5.0,
    )
    communicator.state.outstanding = begun()
    communicator.state.outstanding.add(started(12, time.monotonic() - 20.0))
    works: list[int] = []
    try:
        communicator._start(
            Collective(communicator, "all_reduce", "sum", 3, torch.float32), torch.empty(3, device="meta"), works.pop
        )
        return "", len(works)
    except CommunicatorLostError as error:
        return str(error), len(works)
    finally:
        dist.destroy_process_group(group)


def test_nothing_is_started_behind_what_has_lasted_too_long() -> None:
    ((said, _),) = pool_of(1).run(go_on_after_a_stop)
    assert said == "rank 7 is gone. rank 0 has been in collective 12 (all_reduce sum of 3 × torch.float32) for 20 s"


def test_an_abort_never_holds_up_who_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_group_module, "ABORT_SECONDS", 0.05)
    released = threading.Event()

    class Backend:
        def abort(self) -> None:
            released.wait(20)
            raise RuntimeError("no more\nat frame 0")

    began = time.monotonic()
    process_group_module._abort_in_background(Backend(), "a group")
    assert time.monotonic() - began < 1.0
    assert eventually(lambda: "has not ended within" in caplog.text)
    released.set()
    assert eventually(lambda: "a group could not be aborted: no more" in caplog.text)


def destroy_a_lost_group() -> tuple[bool, float]:
    """As a script does at its end. To shut the lost one down would take long."""

    class Group:
        def shutdown(self) -> None:
            time.sleep(20)

    world, group = dist.distributed_c10d._world, Group()
    world.pg_names[group] = "lost"  # type: ignore[index]
    process_group_module._spare_shutdown(group)  # type: ignore[arg-type]
    began = time.monotonic()
    dist.destroy_process_group()
    return dist.is_initialized(), time.monotonic() - began


def test_a_group_that_is_lost_on_a_device_is_not_shut_down(own_ranks: Callable[[int], RankPool]) -> None:
    ((is_initialized, seconds),) = own_ranks(1).run(destroy_a_lost_group)
    assert not is_initialized
    assert seconds < 10.0
