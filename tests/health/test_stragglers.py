"""A rank that all others wait for is named, with what it computes; slow communication is told apart."""

import contextlib
import dataclasses
import json
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradsync
from gradsync.communicator import choose_communicator
from gradsync.communicator.collective import waited_here
from gradsync.health.watch import leave_watch
from gradsync.health.watch import slowness_warnings as said_so_far
from gradsync.health.watch.messages import Member, slow_communication, straggler_text
from gradsync.health.watch.pace_meter import MOST_WINDOWS, NO_PACE, Pace, PaceMeter, read_pace
from gradsync.health.watch.pace_reports import (
    LONGEST_SECONDS,
    SHORTEST_SECONDS,
    PaceDetector,
    Pacing,
    Rounds,
)
from gradsync.health.watch.status import Sampler
from gradsync.health.watch.stragglers import (
    AS_SLOW,
    FIRST_PAUSE_SECONDS,
    OVER,
    SLOWER,
    CommunicationDetector,
    Round,
    Slowdown,
    Straggler,
    StragglerDetector,
    against_the_others,
)
from tests.fuse import Explosion, Fuse
from tests.ranks import RankPool, ThreadRanks

pytestmark = pytest.mark.timeout(120)

LATE_SECONDS = 0.1
# Of the beginning of a slowness, whatever happens: that is what is promised. Telling of windows takes five of them.
NAMED_WITHIN = 15
MEMBERS = [Member(rank=rank, host="ab"[rank // 2], process=100 + rank) for rank in range(4)]

# What each rank works in a window, and what communication takes.
Times = Callable[[random.Random, int], tuple[Sequence[float], float]]


def told(window: int, owns: Sequence[float], communication: float = 0.004) -> Round:
    """All ranks leave the window together: who is early waits."""
    last = max(owns)
    return Round(
        model=0,
        window=window,
        own=dict(enumerate(owns)),
        waited={member: last - own + communication for member, own in enumerate(owns)},
    )


def judged(detector: StragglerDetector, times: Times, windows: range, seed: int = 0) -> list[tuple[int, Straggler]]:
    """What is said, and in which window."""
    random_numbers, said = random.Random(seed), []
    for window in windows:
        detector.add(told(window, *times(random_numbers, window)))
        said += [(window, found) for found in detector.warnings(0.0)]
    return said


def equal(ranks: int, noise: float, own: float = 0.02) -> Times:
    def times(numbers: random.Random, window: int) -> tuple[Sequence[float], float]:
        return [own * max(0.1, numbers.gauss(1, noise)) for _ in range(ranks)], 0.004

    return times


def slowed(times: Times, rank: int, by: float, since: int) -> Times:
    def slow(numbers: random.Random, window: int) -> tuple[Sequence[float], float]:
        owns, communication = times(numbers, window)
        return [own * (1 + by * (number == rank and window > since)) for number, own in enumerate(owns)], communication

    return slow


def test_a_rank_is_named_and_again_ever_more_seldom() -> None:
    detector, owns = StragglerDetector(), (0.120, 0.119, 0.121, 0.142)
    for window in range(1, 10):
        detector.add(told(window, owns))
        assert detector.warnings(0.0) == []
    detector.add(told(10, owns))
    (verdict,) = detector.warnings(0.0)
    assert straggler_text(MEMBERS, verdict) == (
        "rank 3 (process 103 on b) computes 18% longer than the median of the others (142 against 120 ms a window, "
        "data and update included), who all wait for it. It waits 4 ms for communication itself"
    )
    times = []
    for second in range(1, 600):
        detector.add(told(10 + second, owns))
        times += [second for _ in detector.warnings(float(second))]
    assert times == [FIRST_PAUSE_SECONDS, 3 * FIRST_PAUSE_SECONDS, 7 * FIRST_PAUSE_SECONDS]
    # Nobody trains any more, and the process goes on.
    detector.add(told(1000, owns))
    assert detector.warnings(1e6)
    assert detector.warnings(1e9) == []


def test_over_is_said_once_and_a_moment_makes_patient() -> None:
    detector = StragglerDetector()
    said = judged(detector, slowed(equal(2, 0.0), 1, 0.5, since=20), range(1, 41))
    assert [(verdict.member, verdict.is_over) for _, verdict in said] == [(1, False)]
    said = judged(detector, equal(2, 0.0), range(41, 81))
    assert [verdict.is_over for _, verdict in said] == [True]
    assert "computes no longer than the others any more" in straggler_text(MEMBERS[:2], said[0][1])
    # It was so for a few windows only: next time twice as many are wanted.
    said = judged(detector, slowed(equal(2, 0.0), 1, 0.5, since=300), range(81, 360))
    assert [(window > 310, verdict.is_over) for window, verdict in said] == [(True, False)]


def test_who_was_slow_for_long_and_is_again_is_named_as_quickly() -> None:
    detector = StragglerDetector()
    judged(detector, slowed(equal(2, 0.02), 1, 0.5, since=20), range(1, 201))
    assert [verdict.is_over for _, verdict in judged(detector, equal(2, 0.02), range(201, 241))] == [True]
    said = judged(detector, slowed(equal(2, 0.02), 1, 0.5, since=240), range(241, 281))
    assert [verdict.is_over for _, verdict in said] == [False]
    assert said[0][0] <= 240 + NAMED_WITHIN


@settings(max_examples=30)
@given(
    st.integers(2, 5),
    st.floats(0.15, 1.0),
    st.integers(0, 300),
    st.floats(0.01, 5.0),
    st.integers(0, 1000),
)
def test_whoever_becomes_slow_is_named_within_a_few_windows(
    ranks: int, by: float, since: int, own: float, seed: int
) -> None:
    """15 % and more, where single windows scatter by 2 %. Nobody else ever is, and nobody before."""
    rank = seed % ranks
    said = judged(StragglerDetector(), slowed(equal(ranks, 0.02, own), rank, by, since), range(1, since + 31), seed)
    assert [verdict.member for _, verdict in said] == [rank]
    assert since < said[0][0] <= since + NAMED_WITHIN


@pytest.mark.parametrize(
    ("noise", "ranks"), [(0.02, 4), (0.05, 2), (0.2, 2), pytest.param(0.1, 8, marks=pytest.mark.breadth)]
)
def test_equal_ranks_are_never_named(noise: float, ranks: int) -> None:
    assert judged(StragglerDetector(), equal(ranks, noise), range(1, 5_001)) == []


def checkpoints(numbers: random.Random, window: int) -> tuple[Sequence[float], float]:
    """Rank 0 saves in every tenth window, and looks at its validation loss in every seventh."""
    owns = [0.02 * numbers.gauss(1, 0.02) for _ in range(3)]
    owns[0] += 0.1 * (window % 10 == 0)
    owns[0] += 0.05 * (window % 7 == 0 and window % 10 != 0)
    return owns, 0.004


def uneven(numbers: random.Random, window: int) -> tuple[Sequence[float], float]:
    """Long batches on one rank, short ones on the other, in turn."""
    owns = [0.02, 0.03] if window % 2 else [0.03, 0.02]
    return [own * numbers.gauss(1, 0.02) for own in owns], 0.004


def any_length(numbers: random.Random, window: int) -> tuple[Sequence[float], float]:
    """Texts of any length: windows differ by half, on each rank for itself."""
    return [0.02 * numbers.lognormvariate(0, 0.5) for _ in range(3)], 0.004


def all_slower(numbers: random.Random, window: int) -> tuple[Sequence[float], float]:
    """The whole machine is slower for a while."""
    factor = 2.0 if window % 400 > 200 else 1.0
    return [0.02 * factor * numbers.gauss(1, 0.03) for _ in range(3)], 0.004


def slow_link(numbers: random.Random, window: int) -> tuple[Sequence[float], float]:
    """A link loses three quarters of its rate."""
    return [0.02 * numbers.gauss(1, 0.03) for _ in range(3)], 0.005 if window < 500 else 0.02


@pytest.mark.parametrize("times", [checkpoints, uneven, any_length, all_slower, slow_link])
def test_no_rank_is_blamed_for(times: Times) -> None:
    assert judged(StragglerDetector(), times, range(1, 1_501)) == []


def test_a_machine_that_slows_one_process_after_the_other_is_soon_known() -> None:
    """Each for some 20 windows, at any time: that is true when it is said, and worth saying a few times only."""
    left = [0, 0]

    def times(numbers: random.Random, window: int) -> tuple[Sequence[float], float]:
        for rank in range(2):
            left[rank] = max(0, left[rank] - 1) or (int(numbers.expovariate(0.05)) if numbers.random() < 0.01 else 0)
        return [0.02 * numbers.gauss(1.5 if left[rank] else 1.0, 0.03) for rank in range(2)], 0.004

    said = [verdict for _, verdict in judged(StragglerDetector(), times, range(1, 5_001)) if not verdict.is_over]
    assert len(said) <= 10


@given(st.lists(st.floats(0.001, 10.0), min_size=2, max_size=8), st.integers(0, 7), st.floats(1.0, 3.0))
def test_only_the_slowest_are_ever_named(owns: list[float], place: int, factor: float) -> None:
    owns[place % len(owns)] *= factor
    for _, verdict in judged(StragglerDetector(), lambda _, window: (owns, 0.0), range(1, 21)):
        assert verdict.own >= AS_SLOW * max(owns)
        assert verdict.slower >= SLOWER > OVER


@given(st.lists(st.floats(0.001, 10.0), min_size=2, max_size=9))
def test_the_others_are_all_but_oneself(owns: list[float]) -> None:
    for member, others in against_the_others(dict(enumerate(owns))).items():
        assert others == median([own for number, own in enumerate(owns) if number != member])


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(vars(NO_PACE))), inner),
        max_leaves=8,
    )
)
def test_whatever_a_rank_says_of_its_pace_does_no_harm(data: object) -> None:
    read = read_pace(data)
    assert all(math.isfinite(value) and value >= 0 for value in (*read.own, *read.waited))
    assert len(read.own) == len(read.waited)
    PaceDetector(MEMBERS).add(1, read, 0.0)
    true = Pace(model=1, last=7, own=(0.5, 0.25), waited=(0.125, 0.0))
    assert read_pace(dataclasses.asdict(true)) == true


# -- windows of several ranks -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), max_size=40))
def test_windows_are_judged_once_all_have_told_of_them_in_order(steps: list[tuple[int, int]]) -> None:
    rounds, told_of, found = Rounds(3), [0, 0, 0], []
    for member, count in steps:
        last = told_of[member] + count
        own = tuple(float(window) for window in range(told_of[member] + 1, last + 1))
        told_of[member] = last
        found += list(rounds.add(member, Pace(last=last, own=own, waited=(0.5,) * count)))
    assert [each.window for each in found] == list(range(1, min(told_of) + 1))
    for each in found:
        assert each.own == dict.fromkeys(range(3), float(each.window))
        assert each.is_whole


def test_who_stands_by_is_not_compared() -> None:
    """Its data has run out: the others are not slow because it does nothing."""
    rounds = Rounds(2)
    list(rounds.add(0, Pace(last=1, own=(0.0,), waited=(0.0,))))
    (each,) = rounds.add(1, Pace(last=1, own=(0.02,), waited=(0.001,)))
    assert each.own == {1: 0.02}
    assert not each.is_whole
    detector = StragglerDetector()
    for _ in range(50):
        detector.add(each)
    assert detector.warnings(0.0) == []


@pytest.mark.parametrize("slow", [(0.120, 0.120, 0.120), (0.120, 0.120, 0.180)], ids=["equal", "named"])
def test_who_has_stood_by_for_long_says_nothing_new(slow: Sequence[float]) -> None:
    """Its data has run out, or it is gone: it may be in none of the windows that are kept."""
    detector = StragglerDetector()
    for window in range(1, 41):
        detector.add(told(window, slow))
        detector.warnings(0.0)
    for window in range(41, 241):
        detector.add(told(window, (0.120, 0.120)))
        assert detector.warnings(1e6) == []
    said = judged(detector, slowed(equal(2, 0.0), 1, 0.5, since=240), range(241, 300))
    assert [(verdict.member, verdict.is_over) for _, verdict in said] == [(1, False)]
    # Alone there is nobody to compare with.
    detector.add(told(300, (0.120,)))
    assert detector.warnings(1e9) == []


def test_another_model_is_another_story_and_who_is_gone_is_not_waited_for() -> None:
    rounds = Rounds(2)
    assert list(rounds.add(0, Pace(model=0, last=5, own=(0.1,), waited=(0.0,)))) == []
    assert list(rounds.add(0, Pace(model=1, last=2, own=(0.3,), waited=(0.0,)))) == []
    assert list(rounds.add(1, Pace(model=0, last=5, own=(0.1,), waited=(0.0,)))) == [], "that one is gone"
    (each,) = rounds.add(1, Pace(model=1, last=2, own=(0.3,), waited=(0.0,)))
    assert (each.model, each.window) == (1, 2)
    rounds.forget(1)
    assert [each.window for each in rounds.add(0, Pace(model=1, last=3, own=(0.3,), waited=(0.0,)))] == [3]
    assert list(rounds.add(1, Pace(model=1, last=9, own=(0.3,), waited=(0.0,)))) == []


class Placed:
    """A model, as far as it is measured."""

    def __init__(self) -> None:
        self.pace = PaceMeter()


def test_of_several_models_the_pace_is_always_that_of_the_first_that_is_left() -> None:
    sampler, models = Sampler(list), [Placed(), Placed()]
    assert sampler.meter is None
    for model in models:
        sampler.add(model)  # type: ignore[arg-type]
    assert sampler.meter == (0, models[0].pace)
    del models[0], model
    assert sampler.meter == (1, models[0].pace)


def test_a_straggler_is_named_also_where_the_last_window_told_of_was_not_measured_by_all() -> None:
    """Of short windows on devices one rank may know all, and another one every second."""
    detector, said = PaceDetector(MEMBERS[:2]), []
    for last in range(8, 161, 8):
        numbers = range(last - 7, last + 1)
        every_second = tuple(0.013 if number % 2 == 0 else 0.0 for number in numbers)
        said += detector.add(1, Pace(last=last, own=every_second, waited=(0.001,) * 8), 0.0)
        # It tells of an odd one last.
        own = (0.010,) * 8 if last > 8 else (0.010,) * 7
        said += detector.add(0, Pace(last=last - 1, own=own, waited=(0.004,) * len(own)), 0.0)
    (words,) = said
    assert words.startswith("rank 1 ")


# -- what a rank tells ------------------------------------------------------------------------------------------------


def test_a_rank_tells_of_every_window_once_and_as_often_as_they_are_long() -> None:
    sampler, sent = Sampler(list), list[dict[str, Any]]()
    pacing = Pacing(MEMBERS, 1, sampler, send=sent.append, warn=str)

    def told_at(now: float) -> Pace | None:
        sent.clear()
        pacing.tick(now)
        return read_pace(sent[0]["pace"]) if sent else None

    assert told_at(0.0) is None
    assert pacing.next == LONGEST_SECONDS
    model, other, windows = Placed(), Placed(), 0
    sampler.add(model)  # type: ignore[arg-type]
    sampler.add(other)  # type: ignore[arg-type]
    for count in (1, 3, 2):
        for _ in range(count):
            model.pace.window_ended()
        pace = told_at(1.0)
        assert pace is not None
        assert (pace.last, len(pace.own)) == (windows + count, count)
        assert told_at(1.0) is None
        windows += count
    for _ in range(2 * MOST_WINDOWS):
        model.pace.window_ended()
    pace = told_at(1.0)
    assert pace is not None
    assert len(pace.own) == MOST_WINDOWS
    assert pacing.next == 1.0 + SHORTEST_SECONDS
    other.pace.window_ended()
    del model
    pace = told_at(2.0)
    assert pace is not None
    assert (pace.model, pace.last) == (1, 1)


def test_waiting_is_no_work(rank_pool: RankPool) -> None:
    """One rank comes late to every collective; the other one waits, and that is not its own time."""
    early, late = rank_pool.run(meet_late)
    assert early.own[0] == late.own[0] == 0.0, "nobody knows when the first window began"
    assert median(late.own[1:]) >= LATE_SECONDS > median(early.own[1:])
    assert median(early.waited) > median(late.waited)


def meet_late() -> Pace:
    communicator = gradsync.communicator.ProcessGroupCommunicator(dist.new_group())
    meter, before = PaceMeter(), waited_here()
    for _ in range(10):
        time.sleep(LATE_SECONDS if dist.get_rank() == 1 else 0.0)
        communicator.all_reduce(torch.ones(4)).wait()
        meter.window_ended()
    assert waited_here() > before
    meter.window_ended(worked=False)
    assert meter.since(10).own == (0.0,)
    return meter.since(0)


@pytest.mark.parametrize(
    "place",
    ["buffers", "join", *(pytest.param(each, marks=pytest.mark.breadth) for each in ("a hook", "another thread"))],
)
def test_waiting_in_a_forward_is_no_work(rank_pool: RankPool, place: str) -> None:
    """For rank 0's buffers, and in torch's own collective, which asks who has data."""
    late, early = rank_pool.run(forward_late, place)
    assert median(late.own[1:]) >= LATE_SECONDS > median(early.own[1:])
    assert median(early.waited[1:]) > median(late.waited[1:])


def forward_late(place: str) -> Pace:
    joins = place == "join"
    layers = [nn.Linear(8, 8)] if joins else [nn.Linear(8, 8), nn.BatchNorm1d(8)]
    model = gradsync.DistributedDataParallel(nn.Sequential(*layers), process_group=dist.new_group())
    if place == "a hook":
        model._register_buffer_comm_hook(None, broadcast_means)
    with model.join() if joins else contextlib.nullcontext(), ThreadPoolExecutor(1) as other:
        for _ in range(10):
            time.sleep(LATE_SECONDS if dist.get_rank() == 0 else 0.0)
            inputs = torch.randn(4, 8)
            outputs = other.submit(model, inputs).result() if place == "another thread" else model(inputs)
            outputs.square().mean().backward()
            model.zero_grad()
    return model.synchronizer.pace.since(0)


def broadcast_means(state: None, buffers: dict[str, torch.Tensor]) -> None:
    """By torch, after the forward."""
    dist.broadcast(buffers["1.running_mean"], 0)


def test_waiting_is_counted_once_and_also_where_it_fails() -> None:
    meter = PaceMeter()
    meter.window_ended()
    with contextlib.suppress(ValueError), meter.waiting(), meter.waiting():
        time.sleep(LATE_SECONDS)
        raise ValueError
    time.sleep(LATE_SECONDS)
    meter.window_ended()
    pace = meter.since(1)
    assert pace.own[0] >= LATE_SECONDS
    assert pace.waited[0] >= LATE_SECONDS
    # Each is rounded to microseconds.
    assert sum(pace.own + pace.waited) == pytest.approx(meter.seconds, abs=1e-5)


def windows_around_a_failure(on_bad_step: str | None) -> tuple[int, tuple[float, ...]]:
    """Rank 1's backward fails in the third of five."""
    rank = choose_communicator().rank
    model = gradsync.DistributedDataParallel(Lit(), on_bad_step=on_bad_step)
    for window in range(5):
        with contextlib.suppress(Explosion, gradsync.PeerFailedError):
            model(window == 2 and rank == 1).backward()
        model.zero_grad()
    pace = model.synchronizer.pace
    return pace.count, pace.since(0).own


class Lit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, lit: bool) -> torch.Tensor:
        return Fuse.apply(2 * self.scale, lit)


@pytest.mark.parametrize("on_bad_step", [None, "skip", "drop-rank"])
def test_a_window_that_failed_has_a_number_too(on_bad_step: str | None) -> None:
    """On all ranks: from then on other windows would be compared, and of some that are marked on devices all others."""
    (first, _), (second, own) = ThreadRanks(2).run(windows_around_a_failure, on_bad_step)
    assert (first, second) == (5, 5)
    assert own[2] == 0.0, "that is no work to be compared"


@pytest.fixture(scope="module")
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def train_with_a_slow_one(slow: int, seconds: float) -> list[str]:
    """Until rank 0 has said something, and for longer than that may take on a busy machine."""
    logging.getLogger("gradsync").setLevel(logging.ERROR)
    group = dist.new_group()
    model = gradsync.DistributedDataParallel(nn.Linear(64, 64), process_group=group)
    for _ in range(300):
        time.sleep(2 * seconds if dist.get_rank() == slow else seconds)
        model(torch.randn(4, 64)).square().mean().backward()
        model.zero_grad()
        found = torch.tensor(float(len(said_so_far())))
        gradsync.communicator.ProcessGroupCommunicator(group).all_reduce(found).wait()
        if found:
            break
    dist.destroy_process_group(group)
    leave_watch(group, "is done")
    # They are for a report of the whole run, whatever becomes of the group.
    return said_so_far()


@pytest.mark.program
def test_a_slow_rank_is_named_on_rank_0(rank_pool: RankPool) -> None:
    said, others = rank_pool.run(train_with_a_slow_one, 1, 0.02)
    assert len(said) == 1
    assert said[0].startswith(f"rank 1 (process {rank_pool.pids()[1]} on ")
    assert "longer than the other rank" in said[0]
    assert others == []


# -- slow communication -----------------------------------------------------------------------------------------------


def heard(detector: CommunicationDetector, times: Times, windows: range, seed: int = 0) -> list[tuple[int, Slowdown]]:
    numbers, said = random.Random(seed), []
    for window in windows:
        detector.add(told(window, *times(numbers, window)))
        verdict = detector.warning(0.0)
        said += [] if verdict is None else [(window, verdict)]
    return said


def over_a_wire(seconds: Callable[[int], float], noise: float = 0.05) -> Times:
    def times(numbers: random.Random, window: int) -> tuple[Sequence[float], float]:
        return equal(3, 0.05)(numbers, window)[0], seconds(window) * max(0.1, numbers.gauss(1, noise))

    return times


@settings(max_examples=30)
@given(st.floats(0.01, 1.0), st.floats(1.8, 10.0), st.integers(40, 200), st.integers(0, 1000))
def test_a_wire_that_becomes_slow_is_named_soon_and_when_it_is_over(
    seconds: float, slower: float, since: int, seed: int
) -> None:
    detector = CommunicationDetector()
    quick = over_a_wire(lambda _: seconds)
    slow = over_a_wire(lambda window: seconds * slower)
    assert heard(detector, quick, range(1, since + 1), seed) == []
    (window, verdict), *more = heard(detector, slow, range(since + 1, since + 201), seed)
    assert more == []
    assert window <= since + NAMED_WITHIN
    assert verdict.now == pytest.approx(seconds * slower, rel=0.2)
    assert verdict.before == pytest.approx(seconds, rel=0.1)
    ((window, verdict),) = heard(detector, quick, range(since + 201, since + 251), seed)
    assert verdict.is_over
    assert "no slower than before any more" in slow_communication(verdict)
    # As quick as the first time, though it was slow for long.
    ((window, verdict),) = heard(detector, slow, range(since + 251, since + 281), seed)
    assert window <= since + 250 + NAMED_WITHIN
    assert "communication has become slow: it takes" in slow_communication(verdict)


@pytest.mark.parametrize(
    "times",
    [
        checkpoints,
        uneven,
        any_length,
        all_slower,
        over_a_wire(lambda window: 0.01, noise=0.3),
        slowed(equal(3, 0.02), 1, 1.0, since=100),
        # It takes twice as long, which is next to nothing.
        over_a_wire(lambda window: 0.001 if window < 100 else 0.002),
        # Long in every eighth window: the norm of all gradients, or an evaluation.
        over_a_wire(lambda window: 0.05 if window % 8 == 0 else 0.005),
    ],
)
def test_the_wire_is_not_blamed_for(times: Times) -> None:
    assert heard(CommunicationDetector(), times, range(1, 1_001)) == []


def test_who_stands_by_says_nothing_of_the_wire() -> None:
    detector = CommunicationDetector()
    for window in range(1, 200):
        seconds = 0.004 if window < 100 else 0.1
        detector.add(Round(model=0, window=window, own={0: 0.02}, waited={0: seconds}, is_whole=False))
        assert detector.warning(0.0) is None


def test_the_hub_hears_its_own_windows_as_it_hears_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, Pace]] = []
    monkeypatch.setattr(PaceDetector, "add", lambda self, member, pace, now, models: heard.append((member, pace)) or [])
    model = Placed()
    model.pace.window_ended()
    sampler = Sampler(list)
    sampler.add(model)  # type: ignore[arg-type]
    sent: list[dict[str, object]] = []
    for rank, messages in ((0, []), (1, sent)):
        Pacing(MEMBERS, rank, sampler, send=messages.append, warn=str).tick(1.0)
    hub = Pacing(MEMBERS, 0, Sampler(list), send=str, warn=str)
    hub.take(1, json.loads(json.dumps(sent[0])), 1.0)
    (_, own), (_, told) = heard
    assert own == told == model.pace.since(0)


def test_an_error_in_judging_who_is_slow_ends_that_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever watches for lost ranks calls it on the same thread."""
    asked = []

    def fail(*_: object) -> None:
        asked.append(1)
        raise IndexError("on purpose")

    monkeypatch.setattr(Rounds, "add", fail)
    said: list[str] = []
    pacing = Pacing(MEMBERS, 0, Sampler(list), send=str, warn=said.append)
    pacing.tick(1.0)
    assert pacing.next < math.inf
    for number in (1, 2, 1):
        pacing.take(number, {"pace": dataclasses.asdict(NO_PACE)}, 1.0)
    pacing.tick(2.0)
    pacing.forget(1)
    assert (asked, said, pacing.next) == ([1], [], math.inf)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "lost ones still are" in caplog.text
