"""The topology of the ranks: which of them share a host.

A host is identified by its boot id, its network namespace and its name. So containers and the hosts of a lab count as
what they are to a communicator: places with a link between them. ``GRADSYNC_HOST`` overrides it, for clusters where
that is wrong, and for tests.
"""

import functools
import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.communicator.base import Communicator

__all__ = ["HOST_VARIABLE", "Topology", "find_topology", "host_identity"]

HOST_VARIABLE = "GRADSYNC_HOST"
IDENTITY_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Topology:
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
        """For every rank its host's number and its own number on that host."""
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

    def host(self, rank: int) -> int:
        return self.places[rank][0]

    def local_rank(self, rank: int) -> int:
        return self.places[rank][1]


def find_topology(communicator: Communicator) -> Topology:
    """Ask every rank for its host. A collective: all ranks call it."""
    mine = torch.frombuffer(bytearray(host_identity()), dtype=torch.uint8).to(communicator.device)
    gathered = mine.new_zeros(communicator.world_size * IDENTITY_BYTES)
    communicator.all_gather(gathered, mine).wait()
    hosts: dict[bytes, list[int]] = {}
    for rank, row in enumerate(gathered.cpu().view(communicator.world_size, IDENTITY_BYTES).tolist()):
        hosts.setdefault(bytes(row), []).append(rank)
    return Topology(hosts=tuple(tuple(ranks) for ranks in hosts.values()))


def host_identity() -> bytes:
    """32 bytes that are equal on all ranks of this host, and different on all others."""
    parts = [os.environ[HOST_VARIABLE]] if os.environ.get(HOST_VARIABLE) else ["", *_marks()]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=IDENTITY_BYTES).digest()


def _marks() -> list[str]:
    """What tells hosts apart; a system without one of these files does without it."""
    marks = [socket.gethostname()]
    try:
        marks.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    except OSError:
        marks.append("")
    try:
        marks.append(str(os.stat("/proc/self/ns/net").st_ino))
    except OSError:
        marks.append("")
    return marks
