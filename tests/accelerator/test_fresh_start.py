"""Ranks that are started again over the same store never take what an earlier life has left there for their own."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from gradsync.accelerator.world import run_id
from gradsync.errors import GradsyncError

pytestmark = pytest.mark.timeout(60)


def live(store: Any, order: list[int], world_size: int, seconds: float = 20.0) -> list[Any]:
    """What each rank finds, or raises: started in this ``order``, each when the one before has had its time."""

    def rank(number: int, delay: float) -> Any:
        threading.Event().wait(delay)
        try:
            return run_id(store, number, world_size, timedelta(seconds=seconds))
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(order)) as pool:
        found = {number: pool.submit(rank, number, 0.05 * place) for place, number in enumerate(order)}
        return [found[number].result() for number in sorted(found)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_ranks_of_a_life_find_one_word_and_another_one_in_the_next(order: list[int]) -> None:
    store = dist.HashStore()
    words = [live(store, order, 3) for _ in range(3)] + [live(store, order[::-1], 3)]
    assert all(len(set(life)) == 1 for life in words)
    assert len({life[0] for life in words}) == 4


def test_a_life_in_which_not_all_came_does_not_matter() -> None:
    store = dist.HashStore()
    first, second = live(store, [0, 1], 3, seconds=0.5)
    assert isinstance(first, GradsyncError)
    assert "rank 2 did not come" in str(first)
    assert isinstance(second, str)
    words = live(store, [2, 0, 1], 3)
    assert len(set(words)) == 1
    assert words[0] != second
