"""Resolves an argument to a communicator, and chooses the fastest transport for a process group.

The choice depends on backend, device, placement of the ranks, and measured speed:

=====================================================  ============================================================
CPU tensors, all ranks on one host                     shared memory
CPU tensors, several ranks on some host                shared memory inside, peer exchange or the group between
CPU tensors, one rank per host, Gloo                   the group itself, or peer exchange where that is much faster
anything else (GPUs, MPI, a single rank)               the group itself
=====================================================  ============================================================

All ranks make the same choice: they exchange what they know about themselves, and a measurement counts as the slowest
rank's. To override ``auto``, set the environment variable ``GRADSYNC_TRANSPORT`` to ``group``, ``shared-memory``,
``peer-exchange`` or ``hierarchical``.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradsync.base.errors import ConfigurationError, NoProcessGroupError
from gradsync.communicator.agreement import make_together, require_agreement, require_same_library
from gradsync.communicator.base import Communicator
from gradsync.communicator.hierarchical import HierarchicalCommunicator
from gradsync.communicator.peer_exchange import PeerExchangeCommunicator
from gradsync.communicator.process_group import ProcessGroupCommunicator
from gradsync.communicator.shared_memory import SharedMemoryCommunicator
from gradsync.communicator.topology import CommunicatorFactory, HostLayout, find_topology

__all__ = ["TRANSPORTS", "Choice", "ambient_communicator", "choose_communicator", "fit_communicator", "scattering_over"]

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
    """The communicator for ``group``: a communicator, a process group, or None, the ambient one or the default
    group."""
    if hasattr(group, "all_reduce"):
        # Not by isinstance(): from Python 3.12 on it does not see what an object passes on to another one.
        missing = sorted(name for name in _MEMBERS if not hasattr(group, name))
        if not missing:
            communicator: Communicator = group
            return communicator
        raise ConfigurationError(
            f"{type(group).__name__} is no communicator, it has no {', '.join(missing)}. Derive it from "
            "gradsync.communicator.BaseCommunicator, which has most of what a communicator needs"
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


LOGGER = logging.getLogger("gradsync")

VARIABLE = "GRADSYNC_TRANSPORT"
TRANSPORTS = ("auto", "group", "shared-memory", "peer-exchange", "hierarchical")
MEASURED_BYTES = 4 * 1024 * 1024
WARM_UP = 1
TRIES = 5
# An exchange costs more of a core than Gloo's own way, so it must be worth it.
WORTH_EXCHANGING = 0.9


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A communicator, and the reason for choosing it, as text for a log or a summary."""

    communicator: Communicator
    reason: str

    def __str__(self) -> str:
        return f"{_WORDS.get(type(self.communicator), type(self.communicator).__name__)} ({self.reason})"

    @classmethod
    def given(cls, communicator: Communicator) -> "Choice":
        """The choice of a communicator that was given, so that there was nothing to choose."""
        return cls(communicator=communicator, reason="it was given")


_WORDS: dict[type, str] = {
    HierarchicalCommunicator: "shared memory inside hosts, peer exchange between them",
    PeerExchangeCommunicator: "peer exchange",
    ProcessGroupCommunicator: "the process group",
    SharedMemoryCommunicator: "shared memory",
}

SET_UP = "set it up"
_MEASURED = f"{MEASURED_BYTES >> 20} MiB"

# By the id of the group, with the group: communicators hold theirs, so a weak dictionary would never let go.
_chosen: dict[tuple[int, str], tuple[Any, Choice]] = {}


def fit_communicator(communicator: Communicator, device: torch.device) -> Choice:
    """The fastest communicator over the same ranks as ``communicator``, for gradients on ``device``. Collective.

    Only a :class:`ProcessGroupCommunicator` is replaced. The choice for a group is kept for the next model.
    """
    if not isinstance(communicator, ProcessGroupCommunicator):
        return Choice.given(communicator)
    name = _agreed_name(communicator, device)
    alive = dist.distributed_c10d._world.pg_map
    for key in [key for key, (group, _) in _chosen.items() if group not in alive]:
        del _chosen[key]
    key = (id(communicator.group), f"{name} {device.type}")
    if key not in _chosen:
        choice = _choose(communicator, device, name)
        LOGGER.info("gradients travel over %s", choice)
        _chosen[key] = (communicator.group, choice)
    return _chosen[key][1]


def scattering_over(communicator: Communicator, device: torch.device) -> Communicator:
    """A communicator over the same ranks, for the halves of all-reduces.

    Gloo's own reduce-scatter sends as much as a whole all-reduce.
    """
    if not isinstance(communicator, ProcessGroupCommunicator) or communicator.world_size == 1:
        return communicator
    if device.type != "cpu" or "gloo" not in communicator.backend:
        return communicator
    return PeerExchangeCommunicator(communicator.group)


def _agreed_name(communicator: ProcessGroupCommunicator, device: torch.device) -> str:
    """The transport that the environment asks for. All ranks must agree: each way of choosing runs its own collectives.

    Every time, also where a choice is known: the environment may have changed since, on some ranks.
    """
    name = os.environ.get(VARIABLE, "auto")
    if communicator.world_size > 1:
        require_same_library(communicator)
        settings = [(VARIABLE, name), ("the device of the gradients", device.type)]
        remedy = f"Set {VARIABLE} to the same value on all ranks, or on none, and put the model on the same device"
        require_agreement(communicator, "what their transport is chosen by", settings, remedy=remedy)
    if name not in TRANSPORTS:
        raise ConfigurationError(f"{VARIABLE} must be one of {', '.join(TRANSPORTS)}, got {name!r}")
    return name


def _choose(communicator: ProcessGroupCommunicator, device: torch.device, name: str) -> Choice:
    if communicator.world_size == 1:
        return Choice(communicator=communicator, reason="there is only one rank")
    if name == "group":
        return Choice(communicator=communicator, reason=f"{VARIABLE} says so")
    if device.type != "cpu" or communicator.device.type != "cpu":
        return Choice(communicator=communicator, reason=f"gradients lie on {device.type}")
    if name == "peer-exchange":
        return Choice(communicator=PeerExchangeCommunicator(communicator.group), reason=f"{VARIABLE} says so")
    if "gloo" not in communicator.backend:
        return Choice(communicator=communicator, reason=f"{communicator.backend} knows its own ways")
    topology = find_topology(communicator)
    if len(topology.hosts) == 1:
        return _within_a_host(communicator)
    if name == "shared-memory":
        raise ConfigurationError(
            f"{VARIABLE}=shared-memory needs all ranks on one host, got {len(topology.hosts)} hosts. Leave it out, or "
            "set it to hierarchical"
        )
    if name == "hierarchical" or max(map(len, topology.hosts)) > 1:
        return _between_hosts(communicator, topology)
    return _faster(communicator)


def _within_a_host(communicator: ProcessGroupCommunicator) -> Choice:
    try:
        shared = make_together(communicator, SET_UP, lambda: _share_memory(communicator.group))
    except ConfigurationError as error:
        LOGGER.warning("the ranks of this host cannot share memory (%s), so gradients travel over sockets", error)
        return Choice(communicator=communicator, reason=f"memory cannot be shared ({error})")
    return Choice(communicator=shared, reason=f"all {communicator.world_size} ranks are on one host")


def _between_hosts(communicator: ProcessGroupCommunicator, topology: HostLayout) -> Choice:
    reason = f"{communicator.world_size} ranks are on {len(topology.hosts)} hosts"

    def attempt(inside: CommunicatorFactory) -> Communicator:
        over = HierarchicalCommunicator.over
        # On all ranks or on none: those of one host know nothing of the others.
        return make_together(communicator, SET_UP, lambda: over(communicator.group, inside, topology=topology))

    try:
        return Choice(communicator=attempt(_share_memory), reason=reason)
    except ConfigurationError as error:
        LOGGER.warning("the ranks of a host cannot share memory (%s), so gradients travel over sockets", error)
    try:
        return Choice(communicator=attempt(PeerExchangeCommunicator), reason=f"{reason} that cannot share memory")
    except ConfigurationError as error:
        return Choice(communicator=communicator, reason=f"{reason}, but there are no groups for them ({error})")


def _share_memory(group: dist.ProcessGroup) -> Communicator:
    communicator = ProcessGroupCommunicator(group)
    return (
        communicator
        if communicator.world_size == 1
        else SharedMemoryCommunicator(communicator, timeout=communicator.timeout)
    )


def _faster(communicator: ProcessGroupCommunicator) -> Choice:
    """The group; or a peer exchange over it, if that reduces a bucket's worth of bytes in less time again and again.

    A single reading proves nothing on a busy machine, and the same program must not get another transport in every run.
    """
    exchange = PeerExchangeCommunicator(communicator.group)
    buffer = torch.zeros(MEASURED_BYTES // 4)
    ratios = []
    for number in range(WARM_UP + TRIES):
        by_group, by_exchange = _slowest(communicator, [_time(each, buffer) for each in (communicator, exchange)])
        if number < WARM_UP:
            continue
        if by_exchange > WORTH_EXCHANGING * by_group:
            words = f"took {by_exchange * 1e3:.1f} ms by peer exchange and {by_group * 1e3:.1f} ms by the group"
            return Choice(communicator=communicator, reason=f"{_MEASURED} {words}")
        ratios.append(by_exchange / by_group)
    words = f"took at most {max(ratios):.2f} of the group's time in {TRIES} tries"
    return Choice(communicator=exchange, reason=f"{_MEASURED} {words}")


def _time(communicator: Communicator, buffer: torch.Tensor) -> float:
    started = time.perf_counter()
    communicator.all_reduce(buffer).wait()
    return time.perf_counter() - started


def _slowest(communicator: Communicator, seconds: list[float]) -> list[float]:
    readings = torch.tensor(seconds, dtype=torch.float64)
    communicator.all_reduce(readings, "max").wait()
    return readings.tolist()
