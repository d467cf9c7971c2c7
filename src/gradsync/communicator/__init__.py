"""The wire: one small class per way of moving bytes, all behind :class:`Communicator`."""

from gradsync.communicator.base import Communicator, Handle, ReduceOp
from gradsync.communicator.choose import ambient_communicator, choose_communicator
from gradsync.communicator.in_process import InProcessCommunicator, InProcessWorld
from gradsync.communicator.process_group import ProcessGroupCommunicator

__all__ = [
    "Communicator",
    "Handle",
    "InProcessCommunicator",
    "InProcessWorld",
    "ProcessGroupCommunicator",
    "ReduceOp",
    "ambient_communicator",
    "choose_communicator",
]
