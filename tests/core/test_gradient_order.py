"""The order in which gradients become ready: how it is merged, when ranks compare it, and that rank 0's counts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.communicator import choose_communicator
from gradsync.core.bucket.arrangement import CHECK_EVERY, CHECKS_REMEMBERED, GradientOrder, merge_order
from gradsync.core.engine.exchange import agree_on_order
from tests.ranks import Ranks

# A previous order, what was observed (perhaps twice, perhaps not at all), and what was ever seen.
History = tuple[list[int], list[int], set[int]]


@st.composite
def histories(draw: st.DrawFn) -> History:
    previous = draw(st.permutations(range(draw(st.integers(1, 9)))))
    observed = draw(st.lists(st.sampled_from(previous), max_size=14))
    seen = draw(st.sets(st.sampled_from(previous))) | set(observed)
    return previous, observed, seen


def places(order: list[int]) -> dict[int, int]:
    """Where each element stands for the last time."""
    return {element: place for place, element in enumerate(order)}


@given(histories())
def test_merging_loses_and_invents_nothing(history: History) -> None:
    previous, observed, seen = history
    assert sorted(merge_order(previous, observed, seen)) == sorted(previous)


@given(histories())
def test_the_observed_order_is_kept_by_last_appearance(history: History) -> None:
    """Only at its last appearance is a gradient whole."""
    previous, observed, seen = history
    merged = [element for element in merge_order(previous, observed, seen) if element in observed]
    assert merged == sorted(set(observed), key=places(observed).__getitem__)


@given(histories())
def test_what_was_never_seen_stands_at_the_end_in_its_previous_order(history: History) -> None:
    previous, observed, seen = history
    unseen = [element for element in previous if element not in seen]
    merged = merge_order(previous, observed, seen)
    assert merged[len(merged) - len(unseen) :] == unseen


@given(histories())
def test_what_was_missing_this_time_stays_behind_its_predecessor(history: History) -> None:
    """A dropped layer does not wander: it stands right behind what preceded it, with only such others in between."""
    previous, observed, seen = history
    merged = merge_order(previous, observed, seen)
    absent = [element for element in previous if element in seen and element not in observed]
    for element in absent:
        before = [other for other in previous[: previous.index(element)] if other in observed]
        expected = before[-1] if before else None
        actual = [other for other in merged[: merged.index(element)] if other in observed]
        assert (actual[-1] if actual else None) == expected
    # Those behind one predecessor keep their order among themselves.
    for first, second in itertools.pairwise(absent):
        between = previous[previous.index(first) : previous.index(second)]
        if not any(element in observed for element in between):
            assert merged.index(first) < merged.index(second)


@given(histories())
def test_merging_the_same_again_changes_nothing(history: History) -> None:
    previous, observed, seen = history
    once = merge_order(previous, observed, seen)
    assert merge_order(once, observed, seen) == once


def test_before_anything_is_known_gradients_come_in_reverse() -> None:
    order = GradientOrder(4)
    assert order.order == [3, 2, 1, 0]
    assert not order.learned
    assert not order.due


def run_window(order: GradientOrder, arrivals: list[int]) -> None:
    order.window_began()
    if order.observing:
        order.observe(arrivals)
    order.window_ended()


def test_ranks_look_at_powers_of_two_and_then_now_and_again() -> None:
    """Counting alone tells all ranks when a check is due."""
    order = GradientOrder(1)
    observed, due = [], []
    for window in range(1, 4 * CHECK_EVERY + 2):
        if order.observing:
            observed.append(window)
        run_window(order, [0])
        if order.due:
            # Ranks meet for the window after the one they looked at.
            due.append(window - 1)
    expected = [1, 2, 4, 8, 16, 32, 64, 128, *[CHECK_EVERY * number for number in (1, 2, 3, 4)]]
    assert due == expected
    assert observed == expected


def test_an_order_that_is_kept_asks_for_nothing_until_the_next_check() -> None:
    order = GradientOrder(2)
    run_window(order, [0, 1])
    order.window_began()
    assert order.due
    order.keep()
    assert not order.due
    assert order.order == [1, 0]
    order.window_ended()
    order.window_began()
    assert order.due


def test_a_window_that_fails_on_one_rank_counts_on_all() -> None:
    """It teaches nothing there, but the next check is due in the same window everywhere."""
    well, failed = GradientOrder(2), GradientOrder(2)
    run_window(well, [0, 1])
    failed.window_began()
    failed.window_ended()
    assert well.observed
    assert not failed.observed
    for order in (well, failed):
        order.window_began()
        assert order.due


def agree_on(arrivals: list[list[int]]) -> tuple[bool, bool, list[int]]:
    """Every rank saw another order."""
    communicator = choose_communicator()
    order = GradientOrder(len(arrivals[0]))
    run_window(order, arrivals[communicator.rank])
    order.window_began()
    changed = agree_on_order(order, communicator)
    return changed, order.due, order.order


def test_all_ranks_take_the_order_of_rank_0(ranks: Ranks) -> None:
    """Contract point 6."""
    observed = [[2, 0, 1, 3]] + [[0, 1, 2, 3]] * (ranks.world_size - 1)
    assert ranks.run(agree_on, observed) == [(True, False, [2, 0, 1, 3])] * ranks.world_size


def test_an_order_as_expected_changes_nothing(ranks: Ranks) -> None:
    observed = [[3, 2, 1, 0]] + [[0, 1, 2, 3]] * (ranks.world_size - 1)
    assert ranks.run(agree_on, observed) == [(False, False, [3, 2, 1, 0])] * ranks.world_size


def check_repeatedly(arrivals: list[list[int]]) -> list[list[int]]:
    communicator = choose_communicator()
    order = GradientOrder(4)
    agreed = []
    for window in arrivals:
        while not order.observing:
            run_window(order, [])
        run_window(order, window)
        agree_on_order(order, communicator)
        agreed.append(order.order)
    return agreed


@pytest.mark.parametrize("checks", range(1, CHECKS_REMEMBERED + 2))
def test_a_parameter_is_taken_for_unused_after_some_checks_without_it(thread_ranks: Ranks, checks: int) -> None:
    """Until then it keeps its place, however often its layer is dropped."""
    arrivals = [[0, 1, 2, 3], *[[0, 2, 3]] * checks]
    kept, moved = [0, 1, 2, 3], [0, 2, 3, 1]
    for agreed in thread_ranks.run(check_repeatedly, arrivals):
        assert agreed[-1] == (moved if checks >= CHECKS_REMEMBERED else kept)
