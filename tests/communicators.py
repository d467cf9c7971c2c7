"""Communicators to run the contract over: a name for each, which a rank resolves itself, and keeps.

Making process groups is slow, so a rank makes a communicator once and uses it for every test after.
"""

import os
import runpy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from gradsync.communicator import (
    Communicator,
    ProcessGroupCommunicator,
    SharedMemoryCommunicator,
    ambient_communicator,
)
from gradsync.communicator.hierarchical import HierarchicalCommunicator
from gradsync.communicator.peer_exchange import PeerExchangeCommunicator
from gradsync.communicator.round_robin import RoundRobinCommunicator
from gradsync.communicator.topology import HOST_VARIABLE
from tests.ranks import PRETEND, RankPool, Ranks, ThreadRanks, nccl_pool_of, pool_of

T = TypeVar("T")


def small_parts(group: dist.ProcessGroup) -> Communicator:
    """Parts of a few elements: every collective takes many of them, and the last one is not full."""
    return PeerExchangeCommunicator(group, part_bytes=3000, in_flight=2)


def round_robin(group: dist.ProcessGroup) -> Communicator:
    return RoundRobinCommunicator.over(group, 2, PeerExchangeCommunicator)


def shared_memory(group: dist.ProcessGroup) -> Communicator:
    return SharedMemoryCommunicator(ProcessGroupCommunicator(group), timeout=30)


def hosts_of(*sizes: int) -> Callable[[dist.ProcessGroup], Communicator]:
    """A factory that pretends that the first ranks are on one host, the next ones on another, and so on."""

    def make(group: dist.ProcessGroup) -> Communicator:
        host = [number for number, size in enumerate(sizes) for _ in range(size)][dist.get_rank(group)]
        os.environ[HOST_VARIABLE] = f"host{host}"
        try:
            return HierarchicalCommunicator.over(group, shared_memory if sizes == (2, 2) else PeerExchangeCommunicator)
        finally:
            del os.environ[HOST_VARIABLE]

    return make


def folder(group: dist.ProcessGroup) -> Communicator:
    """The sample of the page on communicators: a user's own, which is a communicator like any other."""
    own = Path(__file__).parents[1] / "examples" / "own_communicator.py"
    # Removed at the end of rank 0.
    _folders.append(tempfile.TemporaryDirectory())
    name = [_folders[-1].name]
    dist.broadcast_object_list(name, group=group, group_src=0)
    made: Communicator = runpy.run_path(str(own))["FolderCommunicator"](
        name[0], dist.get_rank(group), dist.get_world_size(group)
    )
    return made


_folders: list[tempfile.TemporaryDirectory[str]] = []

WIRES: dict[str, Callable[[dist.ProcessGroup], Communicator]] = {
    "peer-exchange": PeerExchangeCommunicator,
    "small-parts": small_parts,
    "round-robin": round_robin,
    "shared-memory": shared_memory,
    "hosts-1+1": hosts_of(1, 1),
    "hosts-2+2": hosts_of(2, 2),
    "hosts-3+1": hosts_of(3, 1),
    "folder": folder,
}

# Every kind of ranks, in numbers from 1 on.
SIZED = [("threads", 1), ("threads", 2), ("threads", 3), ("processes", 1), ("processes", 2), ("processes", 4)]
SIZED += [("peer-exchange", 1), ("peer-exchange", 2), ("peer-exchange", 4), ("small-parts", 4)]
SIZED += [("round-robin", 2), ("round-robin", 3), ("shared-memory", 1), ("shared-memory", 3), ("shared-memory", 4)]
SIZED += [("hosts-1+1", 2), ("hosts-2+2", 4), ("hosts-3+1", 4), ("folder", 3)]

# And where there is a GPU.
FOUND_ON_GPU = [pytest.param(("nccl-slices", n), id=f"nccl-slices-{n}", marks=pytest.mark.gpu) for n in (2, 3)]
FOUND_ON_GPU = FOUND_ON_GPU if PRETEND in os.environ or torch.cuda.device_count() else []
EVERYWHERE = [*SIZED, *FOUND_ON_GPU]

_made: dict[str, tuple[dist.ProcessGroup, Communicator]] = {}


def communicator_called(name: str) -> Communicator:
    """In a rank: the communicator of that name over the default group."""
    group = dist.distributed_c10d._get_default_group()
    if name not in _made or _made[name][0] is not group:
        _made[name] = group, WIRES[name](group)
    return _made[name][1]


def run_on_communicator(name: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    with ambient_communicator(communicator_called(name)):
        return function(*args, **kwargs)


def fresh_communicator(name: str, seconds: float) -> Communicator:
    """In a rank: a communicator that may be broken, over a group of its own with that timeout. Collective."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    assert group is not None
    if name == "shared-memory":
        return SharedMemoryCommunicator(ProcessGroupCommunicator(group), timeout=seconds)
    return ProcessGroupCommunicator(group) if name == "group" else WIRES[name](group)


@dataclass(frozen=True)
class CommunicatorRanks:
    """The ranks of a pool, to whom `choose_communicator()` means the communicator of that name."""

    pool: RankPool
    name: str

    @property
    def world_size(self) -> int:
        return self.pool.world_size

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
        return self.pool.run(run_on_communicator, self.name, function, *args, **kwargs)


def ranks_of(kind: str, world_size: int) -> Ranks:
    """Threads, processes with their group, or processes to whom a communicator of that name is the ambient one."""
    if kind == "nccl-slices":
        return nccl_pool_of(world_size, "slices")
    if kind == "threads":
        return ThreadRanks(world_size)
    return pool_of(world_size) if kind == "processes" else CommunicatorRanks(pool_of(world_size), kind)
