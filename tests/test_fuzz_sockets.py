"""Some hundreds of strangers while ranks train: ``python -m tests.fuzz_sockets`` sends 10,000."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz_sockets import attack_a_training
from tests.ranks import RankPool

pytestmark = [pytest.mark.timeout(180), pytest.mark.breadth]

MESSAGES = 600


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """Ranks of their own, of which one is a stranger."""
    pool = RankPool(3)
    yield pool
    pool.close()


def test_strangers_neither_join_nor_disturb_a_training(pool: RankPool, tmp_path: Path) -> None:
    found = attack_a_training(pool, MESSAGES, int.from_bytes(os.urandom(4), "little"), tmp_path)
    assert found["wrong"] == []
    assert found["sent"] > MESSAGES // 2
