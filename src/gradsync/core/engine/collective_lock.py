"""Orders the collectives of several models in one backward over one group, so that all ranks start them alike.

Each model's buckets start in an order of their own, but nothing orders the buckets of one model relative to another's.
So only the first model that begins in a backward overlaps it. The others wait until backward ends and then follow, in
the order in which they began.
"""

import weakref
from typing import Any

from gradsync.communicator import Communicator

__all__ = ["CollectiveLock"]

# The synchronizer that overlaps the running backward, per group. A rank that is a thread has its own communicator, and
# so its own key.
_leaders: "dict[int, weakref.ref[Any]]" = {}


class CollectiveLock:
    """The lock as seen by one synchronizer."""

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
