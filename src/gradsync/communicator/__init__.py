"""The wire: one small class per way of moving bytes, all behind :class:`Communicator`."""

from gradsync.communicator.base import Communicator, Handle, ReduceOp, when_done
from gradsync.communicator.choose import ambient_communicator, choose_communicator
from gradsync.communicator.fitting import Choice, fit_communicator
from gradsync.communicator.in_process import InProcessCommunicator, InProcessWorld
from gradsync.communicator.process_group import ProcessGroupCommunicator
from gradsync.communicator.shared_memory import SharedMemoryCommunicator

__all__ = [
    "Choice",
    "Communicator",
    "Handle",
    "InProcessCommunicator",
    "InProcessWorld",
    "ProcessGroupCommunicator",
    "ReduceOp",
    "SharedMemoryCommunicator",
    "ambient_communicator",
    "choose_communicator",
    "fit_communicator",
    "when_done",
]
