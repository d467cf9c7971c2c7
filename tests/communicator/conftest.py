"""The communicators that the contract is run over: test_communicators.py, test_handles.py and test_shares.py."""

from collections.abc import Callable, Iterator

import pytest

from tests.communicators import EVERYWHERE, ranks_of
from tests.ranks import RankPool, Ranks


@pytest.fixture(scope="session", params=EVERYWHERE, ids=lambda kind_and_size: "{}-{}".format(*kind_and_size))
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return ranks_of(*request.param)


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[Callable[[int], RankPool]]:
    """As many ranks of a module's own as it asks for: some do not survive its tests, or are not as they were."""
    pools: dict[int, RankPool] = {}
    yield lambda size: pools.setdefault(size, RankPool(size))
    for pool in pools.values():
        pool.close()
