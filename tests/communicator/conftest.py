"""The communicators that the contract is run over: test_communicators.py, test_handles.py and test_shares.py."""

import pytest

from tests.ranks import Ranks
from tests.wires import EVERYWHERE, ranks_of


@pytest.fixture(scope="session", params=EVERYWHERE, ids=lambda kind_and_size: "{}-{}".format(*kind_and_size))
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return ranks_of(*request.param)
