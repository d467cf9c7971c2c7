"""How long windows take on a device whose host only queues work, with a device of chosen times."""

import contextlib
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.health.watch import pace_meter
from gradsync.health.watch.pace_meter import (
    MOST_APART,
    MOST_WAITS,
    MOST_WINDOWS,
    NO_PACE,
    SHORTEST_SECONDS,
    DevicePaceMeter,
    Pace,
    PaceMeter,
    UnknownPaceMeter,
    is_marked,
    make_meter,
)
from gradsync.health.watch.stragglers import LENGTHS


@pytest.fixture(autouse=True)
def _all_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short they are for the host."""
    monkeypatch.setattr(pace_meter, "SHORTEST_SECONDS", 0.0)


@dataclass(eq=False)
class Mark:
    """A moment in milliseconds, as CUDA's events have it. The device has passed it when its clock says so."""

    at: float
    device: "Device"

    def query(self) -> bool:
        return self.device.now >= self.at

    def elapsed_time(self, other: "Mark") -> float:
        assert self.query()
        assert other.query(), "nobody may wait for the device"
        return other.at - self.at


@dataclass
class Device:
    """Where work is queued: ``queued`` is when all of it will be done."""

    queued: float = 0.0
    now: float = 0.0
    marks: list[Mark] = field(default_factory=list)

    def __call__(self) -> Mark:
        self.marks.append(Mark(self.queued, self))
        return self.marks[-1]

    def reuse(self, mark: Mark) -> None:
        # Who asks for it afterwards gets an error, and so does who gives it back again.
        self.marks.remove(mark)
        mark.at = math.nan

    def window(self, meter: PaceMeter, own: float, waited: float, *, worked: bool = True) -> None:
        self.queued += own
        meter.work_ended()
        self.queued += waited
        meter.window_ended(worked=worked)

    def catch_up(self, meter: PaceMeter) -> None:
        """All that is queued is done, and one more window ends, of which nothing is known."""
        self.now = self.queued
        meter.window_ended()


def asked(device: Device) -> DevicePaceMeter:
    meter = DevicePaceMeter(device)
    assert meter.since(0) == NO_PACE
    return meter


def marked(meter: DevicePaceMeter, device: Device, windows: int) -> list[int]:
    """Which of the next ``windows`` were."""
    before, device.now = meter.count, math.inf
    for _ in range(windows):
        device.window(meter, 10.0, 2.0)
    pace = meter.since(before)
    return [pace.last - len(pace.own) + 1 + place for place, own in enumerate(pace.own) if own]


def test_short_windows_are_not_all_marked_and_on_all_ranks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(pace_meter, "SHORTEST_SECONDS", SHORTEST_SECONDS)
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    class Rank(DevicePaceMeter):
        def window_ended(self, *, worked: bool = True) -> None:
            nonlocal now
            now += self.takes
            super().window_ended(worked=worked)

        takes = 0.0

    found = {}
    for milliseconds in (30.0, 19.0, 11.0, 6.0, 2.0, 0.01):
        device = Device()
        meter = Rank(device)
        meter.takes = milliseconds / 1e3
        meter.since(0)
        device.window(meter, 10.0, 2.0)
        device.window(meter, 10.0, 2.0)
        found[milliseconds] = marked(meter, device, 62)
        assert len(device.marks) <= 1, "the others were given back"
    assert found[30.0] == list(range(3, 65))
    for milliseconds, apart in ((19.0, 2), (11.0, 2), (6.0, 4), (2.0, 16), (0.01, MOST_APART)):
        assert found[milliseconds] == [number for number in range(3, 65) if is_marked(number, apart)]


@given(st.integers(1, 10**9), st.sampled_from([2, 4, 8, 16, MOST_APART]), st.integers(3, 128))
def test_what_comes_round_in_some_windows_is_never_in_most_that_are_marked(start: int, apart: int, rhythm: int) -> None:
    """As where one rank writes a log in each eighth: it is no straggler."""
    chosen = [number for number in range(start, start + 20 * apart) if is_marked(number, apart)]
    assert all(is_marked(number, apart // 2) for number in chosen), "ranks that mark more have marked these, too"
    assert all(later - earlier < MOST_WINDOWS for earlier, later in pairwise(chosen))
    for first in range(len(chosen) - LENGTHS[0] + 1):
        beats = Counter(number % rhythm for number in chosen[first : first + LENGTHS[0]])
        assert max(beats.values()) <= LENGTHS[0] // 2


def test_who_was_slow_once_is_told_of_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    meter = asked(device)
    device.window(meter, 10.0, 2.0)
    device.window(meter, 10.0, 2.0)
    monkeypatch.setattr(meter, "seconds", 0.0)
    monkeypatch.setattr(pace_meter, "SHORTEST_SECONDS", 1e9)
    for _ in range(2 * MOST_APART):
        device.window(meter, 20.0, 2.0)
        device.now = device.queued
    pace = meter.since(1)
    later = [number for number in range(4, meter.count) if is_marked(number, MOST_APART)]
    assert pace.last == later[-1]
    assert [place for place, own in enumerate(pace.own, 2) if own] == [2, 3, *later]


def test_work_and_waiting_are_those_of_the_device() -> None:
    device = Device()
    meter = asked(device)
    for own in (10.0, 20.0, 30.0):
        device.window(meter, own, 5.0)
    assert meter.count == 3
    assert meter.since(0) == NO_PACE, "the device has not come to any of it"
    device.catch_up(meter)
    # Of the first nobody knows when it began.
    assert meter.since(0) == Pace(last=4, own=(0.020, 0.030, 0.0), waited=(0.005, 0.005, 0.0))
    assert meter.since(2, model=1) == Pace(model=1, last=4, own=(0.030, 0.0), waited=(0.005, 0.0))
    assert meter.since(4) == NO_PACE


def test_only_what_the_device_has_passed_is_told() -> None:
    device = Device()
    meter = asked(device)
    for _ in range(4):
        device.window(meter, 10.0, 2.0)
    device.now = 30.0
    device.window(meter, 10.0, 2.0)
    assert meter.since(0).last == 2
    device.now = 36.0
    device.window(meter, 10.0, 2.0)
    assert meter.since(2) == Pace(last=3, own=(0.010,), waited=(0.002,))


def test_what_a_forward_waits_for_others_is_not_its_work() -> None:
    device = Device()
    meter = asked(device)
    device.window(meter, 10.0, 2.0)
    for _ in range(2):
        device.queued += 4.0
        with meter.waiting():
            device.queued += 30.0
    device.window(meter, 10.0, 2.0)
    device.window(meter, 10.0, 2.0)
    device.catch_up(meter)
    pace = meter.since(1)
    assert pace.own == pytest.approx((0.018, 0.010, 0.0))
    assert pace.waited == pytest.approx((0.062, 0.002, 0.0))


def test_forwards_without_end_do_not_pile_marks_up_and_nothing_is_known_of_their_window() -> None:
    device = Device()
    meter = asked(device)
    meter.window_ended()
    for _ in range(10 * MOST_WAITS):
        with meter.waiting():
            device.queued += 30.0
    assert len(device.marks) == 2 * MOST_WAITS + 1
    device.window(meter, 10.0, 2.0)
    device.window(meter, 10.0, 2.0)
    device.catch_up(meter)
    assert meter.since(1).own == pytest.approx((0.010, 0.0))


def test_a_wait_is_one_however_deep_it_is_and_however_it_ends() -> None:
    device = Device()
    meter = asked(device)
    meter.window_ended()
    with contextlib.suppress(ValueError), meter.waiting():
        with meter.waiting():
            device.queued += 20.0
        device.queued += 10.0
        raise ValueError
    device.window(meter, 10.0, 2.0)
    device.catch_up(meter)
    pace = meter.since(1)
    assert pace.own == pytest.approx((0.010, 0.0))
    assert pace.waited == pytest.approx((0.032, 0.0))


@pytest.mark.parametrize("place", ["recorded", "queried", "read"])
def test_a_device_that_cannot_be_asked_ends_no_training(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """As one that has failed, of which training hears by itself; or events that a graph has captured."""

    class Captured(Mark):
        def query(self) -> bool:
            if place == "queried":
                raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")
            return True

        def elapsed_time(self, other: Mark) -> float:
            raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")

    class Capturing(Device):
        def __call__(self) -> Mark:
            if place == "recorded":
                raise RuntimeError("operation not permitted when stream is capturing")
            return Captured(self.queued, self)

    device = Capturing()
    meter = asked(device)
    for _ in range(4):
        with meter.waiting():
            device.queued += 1.0
        device.window(meter, 10.0, 2.0)
    assert meter.count == 4
    assert meter.since(0) == NO_PACE
    assert [record.levelname for record in caplog.records] == ["WARNING"], "once"


def test_what_another_model_waits_for_is_no_work_of_the_one_that_is_asked() -> None:
    """Else a rank that is slow in the first would look slower than one that is as slow in the second."""
    device, beside = Device(), []
    first, second = (DevicePaceMeter(device, beside) for _ in range(2))
    assert first.since(0) == NO_PACE
    for _ in range(3):
        with second.waiting():
            device.queued += 100.0
        device.window(second, 20.0, 30.0)
        device.window(first, 10.0, 2.0)
    device.catch_up(first)
    pace = first.since(0)
    assert pace.own == pytest.approx((0.030, 0.030, 0.0))
    assert pace.waited == pytest.approx((0.132, 0.132, 0.0))
    assert second.since(0) == NO_PACE


def test_nothing_is_known_of_a_window_in_which_another_model_has_never_ended_to_wait() -> None:
    device, beside = Device(), []
    first, second = (DevicePaceMeter(device, beside) for _ in range(2))
    first.since(0)
    first.window_ended()
    second.work_ended()
    device.queued += 30.0
    device.window(first, 10.0, 2.0)
    device.window(first, 10.0, 2.0)
    device.catch_up(first)
    assert first.since(1).own == pytest.approx((0.0, 0.010, 0.0))


@pytest.mark.parametrize("is_noted", [False, True], ids=["no backward", "stood by"])
def test_a_window_of_which_nothing_is_known_has_no_work(is_noted: bool) -> None:
    device = Device()
    meter = asked(device)
    device.window(meter, 10.0, 2.0)
    if is_noted:
        device.window(meter, 0.0, 12.0, worked=False)
    else:
        device.queued += 12.0
        meter.window_ended()
    device.window(meter, 10.0, 2.0)
    device.catch_up(meter)
    assert meter.since(1) == Pace(last=4, own=(0.0, 0.010, 0.0), waited=(0.0, 0.002, 0.0))


def test_nothing_is_marked_before_somebody_asks() -> None:
    device = Device()
    meter = DevicePaceMeter(device)
    for _ in range(3):
        with meter.waiting():
            device.window(meter, 10.0, 2.0)
    assert device.marks == []
    assert meter.since(0) == NO_PACE
    for _ in range(2):
        device.window(meter, 10.0, 2.0)
    device.catch_up(meter)
    assert meter.since(0) == Pace(last=6, own=(0.010, 0.0), waited=(0.002, 0.0))


def test_each_device_has_its_own_way_of_being_asked() -> None:
    assert type(make_meter(torch.device("cpu"))) is PaceMeter
    assert type(make_meter(torch.device("cuda", 0))) is DevicePaceMeter
    # The host's times are not told where a device's are wanted.
    meter = make_meter(torch.device("xpu", 0))
    assert type(meter) is UnknownPaceMeter
    for _ in range(3):
        meter.work_ended()
        meter.window_ended()
    assert (meter.count, meter.since(0)) == (3, NO_PACE)
