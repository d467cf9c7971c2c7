"""Several models in one backward, over one group: their collectives must come in the same order on all ranks.

Each model's buckets start in an order of their own, but nothing orders those of one model against those of another. So
the first model to begin in a backward overlaps it; the others wait until backward ends and then follow, in the order in
which they began.
"""

import weakref
from typing import Any

from gradsync.communicator import Communicator

__all__ = ["CollectiveLock"]

# Who overlaps the running backward, by the group. A rank that is a thread has a communicator, and so a key, of its own.
_leaders: "dict[int, weakref.ref[Any]]" = {}


class CollectiveLock:
    """One synchronizer's part in it."""

    def __init__(self, owner: Any, communicator: Communicator) -> None:
        self._owner = weakref.ref(owner)
        self._key = id(communicator.group or communicator)

    def take_lead(self) -> bool:
        """True if no other synchronizer leads in the running backward; it then leads, until :meth:`give_up`."""
        leader = _leaders.get(self._key)
        if leader is not None and leader() is not None and leader() is not self._owner():
            return False
        _leaders[self._key] = self._owner
        return True

    @property
    def leads(self) -> bool:
        return _leaders.get(self._key) is self._owner

    def give_up(self) -> None:
        if self.leads:
            del _leaders[self._key]
