"""Pools of two and of four processes."""

import pytest

from tests.ranks import RankPool, pool_of


@pytest.fixture(scope="module")
def pair() -> RankPool:
    return pool_of(2)


@pytest.fixture(scope="module")
def four() -> RankPool:
    return pool_of(4)
