"""Elastic training: ranks come and go. torchft decides who takes part, and the ranks regroup after each change.

::

    settings      Elastic: how many ranks, how long to wait for one
    membership    asks the lighthouse who takes part
    lighthouse    torchft's membership server, on one of the machines
    meeting       a generation: those who take part, with a process group of their own
"""

from gradsync.health.elastic.lighthouse import Lighthouse, require_torchft
from gradsync.health.elastic.membership import LighthouseMembership, Member, Membership, MemberStatus
from gradsync.health.elastic.regroup import Generation, meet
from gradsync.health.elastic.settings import LIGHTHOUSE, Elastic

__all__ = [
    "LIGHTHOUSE",
    "Elastic",
    "Generation",
    "Lighthouse",
    "LighthouseMembership",
    "Member",
    "MemberStatus",
    "Membership",
    "meet",
    "require_torchft",
]
