"""The topology of the ranks (which of them share a host), and new process groups for some of them.

A host is identified by its boot id, its network namespace and its name. So containers and the hosts of a lab count as
what they are to a communicator: places with a link between them. ``GRADSYNC_HOST`` overrides it, for clusters where
that is wrong, and for tests.
"""

import contextlib
import functools
import hashlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from gradsync.base.errors import ConfigurationError
from gradsync.communicator.agreement import make_together
from gradsync.communicator.base import Communicator
from gradsync.communicator.process_group import ProcessGroupCommunicator
from gradsync.communicator.transport_state import FailureDomain

__all__ = ["HOST_VARIABLE", "CommunicatorFactory", "HostLayout", "find_topology", "host_identity", "make_subgroups"]

HOST_VARIABLE = "GRADSYNC_HOST"
IDENTITY_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class HostLayout:
    """The ranks of every host, in order. Hosts are numbered by their lowest rank."""

    hosts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = sorted(rank for host in self.hosts for rank in host)
        in_order = sorted(tuple(sorted(host)) for host in self.hosts)
        if not ranks or ranks != list(range(len(ranks))) or not all(self.hosts) or list(self.hosts) != in_order:
            raise ConfigurationError(
                f"hosts must hold every rank from 0 on once, in order, the host of the lowest rank first, and no host "
                f"may be empty. Got {self.hosts}"
            )

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The number of the host of every rank, and its own number on that host."""
        places = {rank: (host, local) for host, ranks in enumerate(self.hosts) for local, rank in enumerate(ranks)}
        return tuple(places[rank] for rank in range(len(places)))

    @property
    def world_size(self) -> int:
        return len(self.places)

    @property
    def is_even(self) -> bool:
        """Whether every host has the same number of ranks."""
        return len({len(host) for host in self.hosts}) == 1

    @property
    def fewest(self) -> int:
        """The number of ranks of the host that has the fewest."""
        return min(len(host) for host in self.hosts)


def find_topology(communicator: Communicator) -> HostLayout:
    """Ask every rank for its host. A collective: all ranks call it."""
    mine = torch.frombuffer(bytearray(host_identity()), dtype=torch.uint8).to(communicator.device)
    gathered = mine.new_zeros(communicator.world_size * IDENTITY_BYTES)
    communicator.all_gather(gathered, mine).wait()
    hosts: dict[bytes, list[int]] = {}
    for rank, row in enumerate(gathered.cpu().view(communicator.world_size, IDENTITY_BYTES).tolist()):
        hosts.setdefault(bytes(row), []).append(rank)
    return HostLayout(hosts=tuple(tuple(ranks) for ranks in hosts.values()))


def host_identity() -> bytes:
    """32 bytes that are equal on all ranks of this host, and different on all others."""
    parts = [os.environ[HOST_VARIABLE]] if os.environ.get(HOST_VARIABLE) else ["", *_marks()]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=IDENTITY_BYTES).digest()


def _marks() -> list[str]:
    """What tells hosts apart; a system without one of these files does without it."""
    boot_id = network = ""
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        network = str(os.stat("/proc/self/ns/net").st_ino)
    return [socket.gethostname(), boot_id, network]


# Of a group of Gloo's, beside one for each of its ranks; with some to spare.
DESCRIPTORS = 8

CommunicatorFactory: TypeAlias = Callable[[dist.ProcessGroup], Communicator]


def make_subgroups(domain: FailureDomain, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """One group for each of ``parts``, out of that of ``domain`` and into that domain; the one of this rank, if any.

    Parts are numbers in the group of the domain, and do not overlap. Every rank of it calls this with the same parts.
    Processes outside need not. Where one of the ranks is short of descriptors, all raise ConfigurationError.
    """
    group = domain.group
    _require_descriptors(group, sum(map(len, parts)) + len(parts) * DESCRIPTORS)
    is_whole_world = dist.get_world_size(group) == dist.get_world_size()
    if not is_whole_world:
        _level_group_counts(group)
    rank, mine = dist.get_rank(group), None
    for part in parts:
        # Of groups of the whole world torch wants to hear on all processes, of others on their members only.
        if is_whole_world or rank in part:
            made = _new_group(group, part, only_members_call=not is_whole_world)
            mine = made if rank in part else mine
    if mine is not None:
        domain.add(mine)
    return mine


def _require_descriptors(group: dist.ProcessGroup, count: int) -> None:
    """A rank that runs out of them while it makes a group leaves the others waiting for it: so ranks ask before."""

    def try_it() -> None:
        with contextlib.ExitStack() as opened:
            for _ in range(count):
                opened.enter_context(open(os.devnull, "rb", buffering=0))

    make_together(ProcessGroupCommunicator(group), f"open {count} descriptors for new process groups", try_it)


def _new_group(group: dist.ProcessGroup, part: Sequence[int], *, only_members_call: bool) -> dist.ProcessGroup:
    name = dist.get_backend(group)
    made: dist.ProcessGroup = dist.new_group(
        [dist.get_global_rank(group, member) for member in part],
        # A group that was made without a name for its backend knows them by device only.
        backend=dist.get_backend_config(group) if name == "undefined" else name,
        timeout=_timeout_of(group),
        use_local_synchronization=only_members_call,
    )
    return made


def _timeout_of(group: Any) -> timedelta | None:
    backend = group._get_backend(group._device_types[0])
    # Backends that are not torch's own may have no options; torch's default is theirs then.
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _level_group_counts(group: dist.ProcessGroup) -> None:
    """Give every rank as many process groups as the rank with the most, by adding groups.

    torch names a group that only its members make by the number of groups they have. Where that differs, so do the
    names, and the members would wait for each other until the timeout.
    """
    communicator = ProcessGroupCommunicator(group)
    count = len(dist.distributed_c10d._world.pg_names)
    most = torch.tensor([count], device=communicator.device)
    communicator.all_reduce(most, "max").wait()
    for _ in range(int(most) - count):
        _new_group(group, [communicator.rank], only_members_call=True)
