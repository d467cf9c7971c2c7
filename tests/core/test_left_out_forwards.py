"""Micro-batches of `accumulate()` in which a rank runs no forward, inside a `join()` and without one.

Forwards have collectives of their own: buffers are broadcast, and in a join all ranks say who has data. A rank that
leaves one out takes part in them all the same, so the mean is over those who had a backward; or, where ranks cannot
come together any more, all of them hear it at once.
"""

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync import DistributedDataParallel, MisuseError, PeerFailedError
from gradsync.communicator import choose_communicator
from tests.core.common import TINY, Line, gradients, still
from tests.laws import costly
from tests.ranks import pool_of

pytestmark = pytest.mark.timeout(60)

# What a rank does in a micro-batch: x of its backward, or nothing; a window is a list of them.
Windows = Sequence[Sequence[float | None]]

on_two_and_three = pytest.mark.parametrize(
    "world_size", [2, pytest.param(3, marks=pytest.mark.breadth)], ids=["processes-2", "processes-3"]
)


def train(plans: Sequence[Windows], joins: bool, style: str) -> list[Any]:
    """Windows as they are planned for each rank: the gradients of each, or the error; and then a good window without a
    join."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(Line(2, counts=True), bucket_cap_mb=TINY)
    optimizer = still(model)
    seen: list[Any] = []

    def step() -> None:
        optimizer.step()
        seen.append(gradients(model))
        optimizer.zero_grad()

    try:
        with warnings.catch_warnings(), model.join() if joins else contextlib.nullcontext():
            for window in plans[rank]:
                if style == "iterator":
                    for x in model.accumulate(window):
                        if x is not None:
                            model(x).backward()
                    step()
                    continue
                for number, x in enumerate(window):
                    last = number == len(window) - 1
                    with model.accumulate(last=last):
                        if x is not None:
                            model(x).backward()
                        if last and style == "step inside":
                            step()
                if style != "step inside":
                    step()
    except (MisuseError, PeerFailedError, ValueError) as error:
        seen.append(f"{type(error).__name__}: {error}")
        model.zero_grad()
    model(rank + 1.0).backward()
    step()
    return seen


def mean(values: Sequence[float | None]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return [None, None]
    x = sum(known) / len(known)
    return pytest.approx([x, x + 1], rel=1e-12)


def check(plans: Sequence[Windows], joins: bool, style: str) -> None:
    world_size = len(plans)
    count = max(len(plan) for plan in plans)
    windows = [mean([x for plan in plans if number < len(plan) for x in plan[number]]) for number in range(count)]
    for rank, seen in enumerate(pool_of(world_size).run(train, plans, joins, style)):
        assert seen[:-1] == windows[: len(plans[rank])]
        assert seen[-1] == mean([each + 1.0 for each in range(world_size)])


LEFT_OUT: dict[str, Windows] = {
    "the first": [[None, 3.0], [4.0, 5.0]],
    "the last": [[2.0, None], [4.0, 5.0]],
    "all": [[None, None], [4.0, 5.0]],
    "all, twice": [[None, None], [None, None]],
}


@on_two_and_three
@pytest.mark.parametrize("style", ["iterator", "blocks", "step inside"])
@pytest.mark.parametrize("left_out", LEFT_OUT)
@pytest.mark.parametrize("joins", [False, True], ids=["alone", "joined"])
def test_a_forward_may_be_left_out(world_size: int, style: str, left_out: str, joins: bool) -> None:
    """In a join the last rank has fewer windows than the others."""
    whole: Windows = [[1.0, 2.0], [3.0, 7.0], [2.0, 9.0]]
    few = whole if not joins else whole[:1]
    plans = {2: [whole, [*LEFT_OUT[left_out], *whole[2:]]], 3: [whole, [*LEFT_OUT[left_out], *whole[2:]], few]}
    check(plans[world_size], joins, style)


def test_a_window_without_a_batch_is_one_without_a_forward() -> None:
    check([[[1.0], [2.0]], [[], [5.0]]], True, "iterator")
    check([[[1.0, 3.0], [2.0]], [[], [5.0]]], False, "iterator")


@st.composite
def uneven_plans(draw: st.DrawFn) -> tuple[list[Windows], bool, str]:
    """Windows that are as long on all ranks; in a join not all ranks have all of them."""
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    joins = draw(st.booleans())
    batch = st.none() | st.integers(1, 9).map(float)
    plans: list[Windows] = []
    for _ in range(2):
        count = draw(st.integers(0, len(lengths))) if joins else len(lengths)
        plans.append([draw(st.lists(batch, min_size=each, max_size=each)) for each in lengths[:count]])
    return plans, joins, draw(st.sampled_from(["iterator", "blocks", "step inside"]))


@costly
@given(uneven_plans())
def test_any_forwards_may_be_left_out(plan: tuple[list[Windows], bool, str]) -> None:
    check(*plan)


# -- where ranks cannot come together ---------------------------------------------------------------------------------


@on_two_and_three
@pytest.mark.parametrize("fewer", [[], [2.0]], ids=["none", "one"])
def test_windows_of_different_lengths_in_a_join_are_refused_on_all_ranks(world_size: int, fewer: list[float]) -> None:
    """Also on one that has left the loop."""
    whole: Windows = [[1.0], [1.0, 2.0], [3.0]]
    plans = [whole, [[1.0], fewer, [3.0]], whole[:1]][:world_size]
    for rank, seen in enumerate(pool_of(world_size).run(train, plans, True, "iterator")):
        assert seen[0] == pytest.approx([1.0, 2.0], rel=1e-12)
        assert "MisuseError: of 2 ranks with data in join(), 1 have come to the last micro-batch" in seen[1]
        assert seen[2] == mean([each + 1.0 for each in range(world_size)]), rank


def leave_before_forward(style: str, handler: str) -> list[Any]:
    """In the last micro-batch of a window rank 1 raises in the place of its forward, and all go on."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(Line(2, counts=True), bucket_cap_mb=TINY)
    optimizer = still(model)
    seen: list[Any] = []

    def work(window: int, x: float) -> None:
        if window == 1 and rank == 1 and x == 3.0:
            raise ValueError("a bad batch")
        if window != 1 or rank != 1:
            model(x).backward()

    for window in range(3):
        try:
            if style == "iterator":
                for x in model.accumulate([rank + 1.0, rank + 2.0]):
                    work(window, x)
            else:
                for number in range(2):
                    with model.accumulate(last=number == 1):
                        work(window, rank + number + 1.0)
            seen.append(gradients(model))
        except (ValueError, PeerFailedError) as error:
            seen.append(type(error).__name__)
            model.zero_grad()
            if handler == "abstains" and rank == 1:
                model.abstain()
        if handler == "steps":
            optimizer.step()
        model.zero_grad()
    return seen


@pytest.mark.parametrize("handler", ["goes on", "steps", "abstains"])
@pytest.mark.parametrize("style", ["iterator", "blocks"])
def test_an_error_in_the_place_of_a_forward_is_told(style: str, handler: str) -> None:
    """Also that the buffers are those of rank 0, in a forward that this rank never runs; and the next window is its
    own. The body of an iterator can only be heard of later: in time to abstain."""
    skips = style == "iterator" and handler == "abstains"
    first, second = pool_of(2).run(leave_before_forward, style, handler)
    assert first[1] == ([0.0, 0.0] if skips else "PeerFailedError")
    assert second[1] == "ValueError"
    assert first[0] == second[0] == first[2] == second[2] == mean([1.0, 2.0, 2.0, 3.0])


def abstain_in_blocks(where: int, times: int) -> list[Any]:
    """Inside a join and a block, before the forward or after its backward, once or twice."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(Line(2, counts=True), bucket_cap_mb=TINY, on_bad_step="drop-rank")
    optimizer = still(model)
    seen: list[Any] = []
    with warnings.catch_warnings(), model.join():
        for window in range(3):
            for number in range(2):
                faulty = window == 1 and rank == 1 and number == where % 2
                with model.accumulate(last=number == 1):
                    if not faulty or where >= 2:
                        model(rank + window + 1.0).backward()
                    for _ in range(times if faulty else 0):
                        model.abstain()
            optimizer.step()
            seen.append([float(each.grad) for each in model.parameters()])  # type: ignore[arg-type]
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_in_a_join_a_block_has_one_forward_however_often_its_rank_abstains(where: int, times: int) -> None:
    for seen in pool_of(2).run(abstain_in_blocks, where, times):
        assert seen == [mean([1.0, 2.0]), mean([2.0]), mean([3.0, 4.0])]


def abstain_under_no_sync(plans: Sequence[Sequence[str]]) -> list[Any]:
    """Inside a join, micro-batches that rank 1 gives up after their forward (``f``) or without one (``-``)."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(Line(2, counts=True), bucket_cap_mb=TINY, on_bad_step="skip")
    optimizer = still(model)
    seen: list[Any] = []
    with warnings.catch_warnings(), model.join():
        for plan in plans:
            for number, way in enumerate(plan):
                with contextlib.nullcontext() if number == len(plan) - 1 else model.no_sync():
                    loss = None if rank == 1 and way == "-" else model(1.0)
                    if rank == 1 and way != "b":
                        model.abstain()
                    elif loss is not None:
                        loss.backward()
            optimizer.step()
            seen.append(model.step_was_skipped)
            optimizer.zero_grad()
    return seen


def test_in_a_join_a_forward_is_that_of_one_micro_batch() -> None:
    """Who gives one up after its forward and then one without has left the second forward out."""
    plans = ["bbb", "f-b", "ff-", "-f-", "f--", "b-f", "bbb"]
    assert pool_of(2).run(abstain_under_no_sync, plans) == [[plan != "bbb" for plan in plans]] * 2


def leave_and_keep(last: bool) -> list[Any]:
    """Rank 1 leaves the last micro-batch of a window, or both ranks the first, and the iterator is kept until the next
    one runs. The gradients of two windows."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(Line(2, counts=True), bucket_cap_mb=TINY)
    seen: list[Any] = []
    kept = model.accumulate([1.0, 2.0])
    try:
        for x in kept:
            if (last and rank == 1 and x == 2.0) or (not last and x == 1.0):
                break
            model(x).backward()
    except PeerFailedError as error:
        seen.append(type(error).__name__)
    model.discard()
    for batches in ([rank + 1.0, rank + 2.0, rank + 6.0], [rank + 1.0, rank + 3.0]):
        for number, x in enumerate(model.accumulate(batches)):
            if number == 1:
                kept = iter(())
            model(x).backward()
        seen.append([float(each.grad) for each in model.parameters()])  # type: ignore[arg-type]
        model.zero_grad()
    return seen


@pytest.mark.parametrize("last", [False, True])
def test_an_iterator_that_is_kept_has_no_part_in_the_next_window(last: bool) -> None:
    """Its block is closed while another runs, and neither ends that nor its window. The others have heard by then."""
    good = [mean([1.0, 2.0, 6.0, 2.0, 3.0, 7.0]), mean([1.0, 3.0, 2.0, 4.0])]
    assert pool_of(2).run(leave_and_keep, last) == [[*(["PeerFailedError"] if last else []), *good], good]
