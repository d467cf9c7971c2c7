"""Communicators: one small class per transport, all behind the interface :class:`Communicator`."""

from gradsync.communicator.base import Communicator, Counts, Handle, ReduceOp, Stage
from gradsync.communicator.base_communicator import BaseCommunicator, Shares
from gradsync.communicator.choose import (
    Choice,
    ambient_communicator,
    choose_communicator,
    fit_communicator,
    scattering_over,
)
from gradsync.communicator.collective import Collective, HandleGroup, HandleWithFinish
from gradsync.communicator.hierarchical import HierarchicalCommunicator
from gradsync.communicator.in_process import InProcessCommunicator, InProcessWorld
from gradsync.communicator.logs import configure_logging
from gradsync.communicator.mpi import MPICommunicator
from gradsync.communicator.peer_exchange import PeerExchangeCommunicator
from gradsync.communicator.process_group import ProcessGroupCommunicator
from gradsync.communicator.round_robin import RoundRobinCommunicator
from gradsync.communicator.shared_memory import SharedMemoryCommunicator
from gradsync.communicator.topology import HostLayout, find_topology

__all__ = [
    "BaseCommunicator",
    "Choice",
    "Collective",
    "Communicator",
    "Counts",
    "Handle",
    "HandleGroup",
    "HandleWithFinish",
    "HierarchicalCommunicator",
    "HostLayout",
    "InProcessCommunicator",
    "InProcessWorld",
    "MPICommunicator",
    "PeerExchangeCommunicator",
    "ProcessGroupCommunicator",
    "ReduceOp",
    "RoundRobinCommunicator",
    "SharedMemoryCommunicator",
    "Shares",
    "Stage",
    "ambient_communicator",
    "choose_communicator",
    "find_topology",
    "fit_communicator",
    "scattering_over",
]

configure_logging()
