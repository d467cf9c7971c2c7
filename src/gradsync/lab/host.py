"""A host of a lab, what its interface has counted, and the ranks that run on hosts."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradsync.errors import ConfigurationError
from gradsync.lab.kernel import inside
from gradsync.lab.ranks import Place

__all__ = ["INTERFACE", "Counters", "Host", "places_here", "places_on", "read_counters"]

INTERFACE = "eth0"
LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host of a lab."""

    index: int
    name: str
    namespace: str
    address: str
    interface: str = INTERFACE


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Bytes through a host's interface since the lab was made, with the headers of the network."""

    sent: int
    received: int


def read_counters(interface: str = INTERFACE) -> Counters:
    """Those of this process's own network: inside a rank, of its host."""
    # Not /proc/net, which shows the network of the process's first thread.
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return Counters(sent=int(fields[8]), received=int(fields[0]))
    raise ConfigurationError(f"there is no interface {interface} here. A host of a lab has {INTERFACE}")


def places_on(hosts: Sequence[Host], ranks_per_host: int) -> list[Place]:
    """The ranks of a program on the hosts of a lab, host by host as torchrun numbers them."""
    if ranks_per_host < 1:
        raise ConfigurationError(f"a host runs at least 1 rank, got {ranks_per_host}")
    port = inside(hosts[0].namespace, _free_port)
    addresses = {host.name: host.address for host in hosts}
    return [
        Place(
            rank=host.index * ranks_per_host + local,
            host=host.name,
            namespace=host.namespace,
            addresses=addresses,
            variables=_variables(
                (host.index, len(hosts)), (local, ranks_per_host), (hosts[0].address, port), host.interface
            ),
        )
        for host in hosts
        for local in range(ranks_per_host)
    ]


def places_here(ranks: int) -> list[Place]:
    """The ranks of a program on this machine, which talk over loopback."""
    if ranks < 1:
        raise ConfigurationError(f"a program has at least 1 rank, got {ranks}")
    port = _free_port(LOOPBACK)
    return [
        Place(
            rank=rank,
            host="this machine",
            namespace=None,
            variables=_variables((0, 1), (rank, ranks), (LOOPBACK, port), LOOPBACK_INTERFACE),
        )
        for rank in range(ranks)
    ]


def _variables(
    host: tuple[int, int], local: tuple[int, int], master: tuple[str, int], interface: str
) -> dict[str, str]:
    """What torchrun sets, from (index, count) of the host and of the rank on it, and Gloo's interface."""
    (group_rank, groups), (local_rank, local_size), (address, port) = host, local, master
    rank, size = group_rank * local_size + local_rank, groups * local_size
    variables = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": group_rank,
        "GROUP_WORLD_SIZE": groups,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        # Ranks share the cores: with as many threads as cores in each they fight over them.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "GLOO_SOCKET_IFNAME": interface,
    }
    return {name: str(value) for name, value in variables.items()}


def _free_port(address: str = "") -> int:
    with socket.socket() as listener:
        listener.bind((address, 0))
        port: int = listener.getsockname()[1]
        return port
