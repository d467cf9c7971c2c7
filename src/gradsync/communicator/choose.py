"""Resolves an argument to a communicator: a process group, a communicator, a device mesh or nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist

from gradsync.base.errors import ConfigurationError, NoProcessGroupError
from gradsync.communicator.base import Communicator
from gradsync.communicator.process_group import ProcessGroupCommunicator

__all__ = ["ambient_communicator", "choose_communicator"]

_MEMBERS = [name for name in vars(Communicator) if not name.startswith("_")]

_ambient: ContextVar[Communicator | None] = ContextVar("gradsync_communicator", default=None)


@contextmanager
def ambient_communicator(communicator: Communicator) -> Iterator[None]:
    """Make ``communicator`` the default in this thread when none is passed."""
    token = _ambient.set(communicator)
    try:
        yield
    finally:
        _ambient.reset(token)


def choose_communicator(group: Any = None) -> Communicator:
    """``group`` may be a communicator, a process group, or None: the ambient communicator, else the default group."""
    if hasattr(group, "all_reduce"):
        # Not by isinstance(): from Python 3.12 on it does not see what an object passes on to another one.
        missing = sorted(name for name in _MEMBERS if not hasattr(group, name))
        if not missing:
            communicator: Communicator = group
            return communicator
        raise ConfigurationError(
            f"{type(group).__name__} is no communicator, it has no {', '.join(missing)}. Derive it from "
            "gradsync.communicator.Wire, which has most of what a communicator needs"
        )
    if group is None:
        ambient = _ambient.get()
        if ambient is not None:
            return ambient
        if not (dist.is_available() and dist.is_initialized()):
            raise NoProcessGroupError(
                "there is no process group to synchronize over. Start the script with torchrun and call "
                "torch.distributed.init_process_group() first, or pass process_group= or communicator="
            )
        group = dist.distributed_c10d._get_default_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise NoProcessGroupError(
            f"this process (rank {dist.get_rank()}) is not a member of the given process group. Call gradsync "
            "only on the ranks that were passed to torch.distributed.new_group()"
        )
    return ProcessGroupCommunicator(group)
