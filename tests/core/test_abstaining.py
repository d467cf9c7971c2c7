"""`abstain()` at odd places: twice in a window, beside the backward it stands for, in blocks, after errors.

A rank that has said its word for a window has no second one. Whatever it tries, it hears at once that it is refused, or
nothing comes of it; no other rank waits, and the windows after it have the right means.
"""

import contextlib
from typing import Any

import pytest

from gradsync import BadStepError, DistributedDataParallel, MisuseError, PeerFailedError
from gradsync.communicator import choose_communicator
from tests.core.common import TINY, Line, gradients, in_threads_and_processes, still
from tests.fuse import Explosion
from tests.ranks import Ranks, ThreadRanks, pool_of

pytestmark = pytest.mark.timeout(60)

POLICIES = ("raise", "skip", "drop-rank")
AT = 2

on_two_and_three = pytest.mark.parametrize(
    "world_size", [2, pytest.param(3, marks=pytest.mark.breadth)], ids=["processes-2", "processes-3"]
)
of_each_policy = pytest.mark.parametrize("on_bad_step", POLICIES)


def abstain(model: DistributedDataParallel) -> None:
    """As where somebody's handler swallows the error that is raised under one of the policies."""
    with contextlib.suppress(BadStepError):
        model.abstain("a bad batch")


def twice(model: DistributedDataParallel, x: float) -> None:
    abstain(model)
    abstain(model)


def twice_after_forward(model: DistributedDataParallel, x: float) -> None:
    model(x)
    twice(model, x)


def then_backward(model: DistributedDataParallel, x: float) -> None:
    loss = model(x)
    abstain(model)
    loss.backward()


def then_counted_backward(model: DistributedDataParallel, x: float) -> None:
    loss = model(x)
    abstain(model)
    model.backward(loss)


def then_local_backward(model: DistributedDataParallel, x: float) -> None:
    loss = model(x)
    abstain(model)
    with model.no_sync():
        loss.backward()


WAYS = (twice, twice_after_forward, then_backward, then_counted_backward, then_local_backward)


def windows(way: str, on_bad_step: Any) -> tuple[list[Any], str]:
    """Six windows. In one of them rank 1 abstains and does not leave it at that. The mean or error of each window on
    this rank, and what it was told of its misuse."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(Line(), bucket_cap_mb=TINY, on_bad_step=on_bad_step)
    optimizer = still(model)
    act = next(each for each in WAYS if each.__name__ == way)
    seen: list[Any] = []
    told = ""
    counted = way == "then_counted_backward"
    for window in range(6):
        try:
            if window == AT and rank == 1:
                act(model, rank + window + 1.0)
            elif counted:
                model.backward(model(rank + window + 1.0))
            else:
                model(rank + window + 1.0).backward()
            error = ""
        except MisuseError as refused:
            error, told = "", str(refused)
        except PeerFailedError as raised:
            error = type(raised).__name__
            model.zero_grad()
        came = error or gradients(model)
        if on_bad_step == "raise" and window == AT:
            model.zero_grad()
        optimizer.step()
        seen.append("skipped" if model.step_was_skipped else came)
        optimizer.zero_grad()
    return seen, told


def mean(ranks: list[int], window: int) -> Any:
    x = sum(rank + window + 1.0 for rank in ranks) / len(ranks)
    return pytest.approx([x, x + 1, x + 2], rel=1e-12)


@on_two_and_three
@of_each_policy
@pytest.mark.parametrize("way", [way.__name__ for way in WAYS])
def test_a_second_word_is_refused_and_the_next_windows_are_right(world_size: int, on_bad_step: str, way: str) -> None:
    everybody = list(range(world_size))
    for rank, (seen, told) in enumerate(pool_of(world_size).run(windows, way, on_bad_step)):
        if rank == 1:
            assert ("second time" if way.startswith("twice") else "has abstained") in told
            assert "optimizer.step()" in told
        else:
            assert not told
        for window, came in enumerate(seen):
            if window != AT:
                assert came == mean(everybody, window)
            elif on_bad_step == "skip":
                assert came == "skipped"
            elif on_bad_step == "drop-rank":
                assert came == mean([each for each in everybody if each != 1], window)
            elif rank != 1:
                assert came == "BadStepError"


@pytest.mark.parametrize("way", [way.__name__ for way in WAYS])
def test_without_a_policy_too(way: str) -> None:
    for rank, (seen, told) in enumerate(ThreadRanks(3).run(windows, way, None)):
        assert bool(told) is (rank == 1)
        assert [came == "skipped" for came in seen] == [False, False, True, False, False, False]


# -- the next window --------------------------------------------------------------------------------------------------


def again_and_again(on_bad_step: Any, ends: str) -> list[Any]:
    """Rank 1 abstains from three windows in a row, and ends each as ``ends`` says; the last window is a good one."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(Line(), bucket_cap_mb=TINY, on_bad_step=on_bad_step)
    optimizer = still(model)
    seen: list[Any] = []
    for window in range(4):
        try:
            if window < 3 and rank == 1:
                model.abstain()
            else:
                model(rank + window + 1.0).backward()
            seen.append([float(each.grad) for each in model.parameters()])  # type: ignore[arg-type]
        except BadStepError:
            seen.append("skip vote")
            model.zero_grad()
        if ends == "step":
            optimizer.step()
        elif ends == "discard":
            model.discard()
        optimizer.zero_grad(set_to_none=ends != "zeros")
    return seen


@pytest.mark.parametrize("ends", ["step", "discard", "none", "zeros"])
@pytest.mark.parametrize("on_bad_step", ["skip", "drop-rank"])
def test_a_rank_may_abstain_from_one_window_after_the_other(on_bad_step: str, ends: str) -> None:
    for seen in ThreadRanks(3).run(again_and_again, on_bad_step, ends):
        assert seen[3] == mean([0, 1, 2], 3)
        for window in range(3):
            assert seen[window] == (mean([0, 2], window) if on_bad_step == "drop-rank" else [0.0] * 3)


@pytest.mark.parametrize("ends", ["step", "discard"])
def test_a_rank_may_abstain_after_the_error_of_its_last_abstention(ends: str) -> None:
    for seen in pool_of(2).run(again_and_again, "raise", ends):
        assert seen == ["skip vote", "skip vote", "skip vote", mean([0, 1], 3)]


def all_of_them(steps: bool) -> list[str]:
    """All ranks abstain from two windows in a row, which leave no gradient that could be zeroed."""
    model = DistributedDataParallel(Line(), on_bad_step="skip")
    optimizer = still(model)
    told = []
    for _ in range(2):
        try:
            model.abstain()
            told.append("")
        except MisuseError as error:
            told.append(str(error))
        if steps:
            optimizer.step()
        optimizer.zero_grad()
    return told


def test_a_window_that_has_left_nothing_is_ended_by_a_step() -> None:
    assert ThreadRanks(2).run(all_of_them, True) == [["", ""]] * 2
    for first, second in ThreadRanks(2).run(all_of_them, False):
        assert not first
        assert "optimizer.step()" in second


# -- after a backward that failed, or was rejected by another rank ----------------------------------------------------


def after_a_failure(on_bad_step: Any) -> list[Any]:
    """Rank 1's backward fails in the second window, and it abstains as it should, and once more. In the third it
    abstains at once."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(Line(), bucket_cap_mb=TINY, on_bad_step=on_bad_step)
    optimizer = still(model)
    seen: list[Any] = []
    for window in range(4):
        told = []
        try:
            if window == 2 and rank == 1:
                model.abstain()
            else:
                model(rank + window + 1.0, lit=window == 1 and rank == 1).backward()
            told.append([float(each.grad) for each in model.parameters()])  # type: ignore[arg-type]
        except (Explosion, PeerFailedError) as error:
            told.append(type(error).__name__)
            model.zero_grad()
        for _ in range(2 if window == 1 and rank == 1 else 0):
            try:
                model.abstain()
                told.append("nothing")
            except MisuseError:
                told.append("refused")
        optimizer.step()
        optimizer.zero_grad()
        seen.append(told)
    return seen


@pytest.mark.parametrize("on_bad_step", [None, "skip", "drop-rank"])
def test_an_error_in_backward_is_a_word_too(on_bad_step: Any) -> None:
    first, second = pool_of(2).run(after_a_failure, on_bad_step)
    assert second[1] == ["Explosion", "nothing", "refused"]
    assert first[1] == ["PeerFailedError" if on_bad_step is None else [0.0] * 3]
    assert second[2] == first[2] == [mean([0], 2) if on_bad_step == "drop-rank" else [0.0] * 3]
    assert first[3] == second[3] == [mean([0, 1], 3)]


def rejected_by_another() -> list[Any]:
    """After a window from which rank 1 abstained, rank 0 would abstain from it as well."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(Line(), on_bad_step="skip")
    optimizer = still(model)
    told: list[Any] = []
    for window in range(2):
        if window == 0 and rank == 1:
            model.abstain()
        else:
            model(rank + window + 1.0).backward()
        if window == 0 and rank == 0:
            with pytest.raises(MisuseError) as refused:
                model.abstain()
            told.append(str(refused.value))
        optimizer.step()
        optimizer.zero_grad()
        told.append(model.step_was_skipped)
    return told


def test_it_is_too_late_after_a_backward_that_another_rank_rejected() -> None:
    (words, *first), second = pool_of(2).run(rejected_by_another)
    assert "in the place of that backward" in words
    assert first == second == [True, False]


# -- in blocks, and without a wrapper ---------------------------------------------------------------------------------


def in_a_block(how: str, on_bad_step: Any) -> list[Any]:
    """In the second of four windows rank 1 abstains in its last micro-batch, and goes on in some way."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(Line(), bucket_cap_mb=TINY, on_bad_step=on_bad_step)
    optimizer = still(model)
    seen: list[Any] = []
    for window in range(4):
        faulty = window == 1 and rank == 1
        loss: Any = None
        with model.accumulate(last=True):
            if not faulty:
                model(rank + window + 1.0).backward()
                if how == "after two" and window == 1:
                    model(rank + window + 1.0).backward()
            elif how == "after two":
                model(rank + window + 1.0).backward()
                model(rank + window + 1.0)
                model.abstain()
            else:
                loss = model(rank + window + 1.0)
                model.abstain()
                if how == "twice":
                    model.abstain()
                elif how == "backward":
                    loss.backward()
        if faulty and how == "later":
            with pytest.raises(MisuseError, match="has abstained"):
                loss.backward()
            with pytest.raises(MisuseError, match="second time"):
                model.abstain()
        came = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        seen.append("skipped" if model.step_was_skipped else came)
    return seen


@pytest.mark.parametrize("on_bad_step", ["skip", "drop-rank"])
@pytest.mark.parametrize("how", ["twice", "backward", "later", "after two"])
def test_in_a_block_it_is_one_word(how: str, on_bad_step: str) -> None:
    for seen in pool_of(2).run(in_a_block, how, on_bad_step):
        good = [each for number, each in enumerate(seen) if number != 1]
        assert good == [mean([0, 1], window) for window in (0, 2, 3)]
        if on_bad_step == "skip":
            assert seen[1] == "skipped"
        elif how != "after two":
            assert seen[1] == mean([0], 1)


def too_late_in_a_block() -> list[Any]:
    """Rank 0 abstains after the backward of a block that rank 1 has voted to skip, with its gradients zeroed."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(Line(), on_bad_step="skip")
    optimizer = still(model)
    seen: list[Any] = []
    for window in range(3):
        with model.accumulate(last=True):
            if window == 1 and rank == 1:
                model.abstain()
            else:
                model(rank + window + 1.0).backward()
            if window == 1 and rank == 0:
                model.zero_grad()
                with pytest.raises(MisuseError, match="in the place of that backward"):
                    model.abstain()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(model.step_was_skipped)
    return seen


def test_no_word_is_kept_for_the_next_window() -> None:
    assert ThreadRanks(2).run(too_late_in_a_block) == [[False, True, False]] * 2


def through_another() -> tuple[str, list[Any]]:
    """A forward that was given up, in a loss together with one that was not: the other ranks hear that it failed."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(Line())
    optimizer = still(model)
    old = model(1.0)
    if rank == 1:
        model.abstain()
    else:
        old.backward()
    optimizer.step()
    optimizer.zero_grad()
    new = model(rank + 1.0)
    try:
        (new + old if rank == 1 else new).backward()
        told = ""
    except (MisuseError, PeerFailedError) as error:
        told = type(error).__name__
    optimizer.zero_grad()
    model(rank + 1.0).backward()
    return told, gradients(model)


@in_threads_and_processes
def test_a_forward_that_was_given_up_spoils_no_other(ranks: Ranks) -> None:
    for rank, (told, came) in enumerate(ranks.run(through_another)):
        assert told == ("MisuseError" if rank == 1 else "PeerFailedError")
        assert came == mean(list(range(ranks.world_size)), 0)
