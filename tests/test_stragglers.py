"""A rank that all others wait for is named, with what it computes; the wire is told apart."""

import logging
import math
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradsync
from gradsync.communicator.collective import Fate, waited_here
from gradsync.watch import straggling as said_so_far
from gradsync.watch.pace import NO_PACE, WINDOWS, Pace, PaceMeter
from gradsync.watch.standing import Sampler, Whereabouts
from gradsync.watch.stragglers import FIRST_PAUSE_SECONDS, OVER, SLOWER, Stragglers, Verdict
from gradsync.watch.words import Member, straggling
from tests.ranks import RankPool

pytestmark = pytest.mark.timeout(120)

LATE_SECONDS = 0.1
MEMBERS = [Member(rank=rank, host="ab"[rank // 2], process=100 + rank) for rank in range(4)]


def pace(own: float, window: int = 20, *, spread: float = 0.001, waited: float = 0.004) -> Pace:
    return Pace(window=window, count=WINDOWS, own=own, spread=spread, waited=waited)


def look(judge: Stragglers, *owns: float, window: int, now: float = 0.0) -> Verdict | None:
    for member, own in enumerate(owns):
        judge.hear(member, pace(own, window))
    return judge.look(now)


def test_a_rank_is_named_after_two_looks_and_again_ever_more_seldom() -> None:
    judge, owns = Stragglers(), (0.120, 0.119, 0.121, 0.142)
    assert look(judge, *owns, window=20) is None
    # The same windows once more are no second look.
    assert look(judge, *owns, window=20) is None
    verdict = look(judge, *owns, window=22)
    assert verdict is not None
    assert straggling(MEMBERS, verdict) == (
        "rank 3 (process 103 on b) computes 18% longer than the median of the others (142 against 120 ms a window, "
        "data and update included), who all wait for it. It waits 4 ms for the wire itself"
    )
    times = [second for second in range(1, 600) if look(judge, *owns, window=22 + second, now=float(second))]
    assert times == [FIRST_PAUSE_SECONDS, 3 * FIRST_PAUSE_SECONDS, 7 * FIRST_PAUSE_SECONDS]
    # Nobody trains any more, and the process goes on.
    assert look(judge, *owns, window=22 + 600, now=1e6) is not None
    assert look(judge, *owns, window=22 + 600, now=1e9) is None


def test_much_slower_is_seen_in_one_look_and_over_is_said_once() -> None:
    judge = Stragglers()
    assert look(judge, 0.1, 0.2, window=10) == Verdict(straggler=judge._named, is_over=False)  # type: ignore[arg-type]
    assert look(judge, 0.1, 0.2, window=11) is None
    over = look(judge, 0.1, 0.101, window=30)
    assert over is not None
    assert over.is_over
    assert "computes no longer than the others any more" in straggling(MEMBERS[:2], over)
    assert look(judge, 0.1, 0.101, window=31) is None


def test_what_scatters_is_no_straggler() -> None:
    judge = Stragglers()
    for window in range(20, 40):
        for member, own in enumerate((0.100, 0.112, 0.095)):
            judge.hear(member, pace(own, window, spread=0.01))
        assert judge.look(0.0) is None


@given(st.lists(st.floats(0.001, 10.0), min_size=2, max_size=8), st.integers(0, 7), st.floats(1.0, 3.0))
def test_only_the_slowest_is_ever_named(owns: list[float], place: int, factor: float) -> None:
    judge = Stragglers()
    owns[place % len(owns)] *= factor
    verdicts = [verdict for window in (20, 21) if (verdict := look(judge, *owns, window=window))]
    for verdict in verdicts:
        assert verdict.straggler.own == max(owns)
        assert verdict.straggler.slower >= SLOWER > OVER


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(vars(NO_PACE))), inner),
        max_leaves=8,
    )
)
def test_whatever_a_rank_says_of_its_pace_does_no_harm(data: object) -> None:
    read = Pace.read(data)
    assert all(math.isfinite(value) and value >= 0 for value in vars(read).values())
    assert Pace.read(vars(pace(0.5))) == pace(0.5)


def test_of_several_models_the_pace_is_always_that_of_the_first() -> None:
    class Placed:
        def __init__(self, own: float, windows: int) -> None:
            self.busy, self._own, self._windows = False, own, windows

        def whereabouts(self) -> Whereabouts:
            return Whereabouts(
                windows=self._windows, phase="idle", progress="", busy=self.busy, pace=pace(self._own, self._windows)
            )

    class Still:
        fates: list[Fate] = []  # noqa: RUF012

    sampler, models = Sampler(Still()), [Placed(0.1, 20), Placed(0.8, 90)]  # type: ignore[arg-type]
    for model in models:
        sampler.add(model)
    for at_work in models:
        at_work.busy = True
        assert sampler.look(0.0).pace.own == 0.1
        at_work.busy = False


def test_waiting_is_no_work(rank_pool: RankPool) -> None:
    """One rank comes late to every collective; the other one waits, and that is not its own time."""
    early, late = rank_pool.run(meet_late)
    assert late.own >= LATE_SECONDS > early.own
    assert early.waited > late.waited


def meet_late() -> Pace:
    wire = gradsync.communicator.ProcessGroupCommunicator(dist.new_group())
    meter, before = PaceMeter(), waited_here()
    for _ in range(WINDOWS):
        time.sleep(LATE_SECONDS if dist.get_rank() == 1 else 0.0)
        wire.all_reduce(torch.ones(4)).wait()
        meter.window_ended()
    assert waited_here() > before
    return meter.pace()


@pytest.fixture(scope="module")
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def train_with_a_slow_one(slow: int) -> list[str]:
    """Until rank 0 has said something, and for 60 steps more than that may take."""
    logging.getLogger("gradsync").setLevel(logging.ERROR)
    group = dist.new_group()
    model = gradsync.DistributedDataParallel(nn.Linear(64, 64), process_group=group)
    said: list[str] = []
    for _ in range(100):
        time.sleep(0.08 if dist.get_rank() == slow else 0.04)
        model(torch.randn(4, 64)).square().mean().backward()
        model.zero_grad()
        found = torch.tensor(float(len(said_so_far())))
        dist.all_reduce(found, group=group)
        if found:
            break
    said = said_so_far()
    dist.destroy_process_group(group)
    return said


@pytest.mark.program
def test_a_slow_rank_is_named_on_rank_0(rank_pool: RankPool) -> None:
    said, others = rank_pool.run(train_with_a_slow_one, 1)
    assert len(said) == 1
    assert said[0].startswith(f"rank 1 (process {rank_pool.pids()[1]} on ")
    assert "longer than the other rank" in said[0]
    assert others == []
