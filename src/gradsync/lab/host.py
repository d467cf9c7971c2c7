"""A host of a lab, what its interface has counted, and the ranks that run on hosts."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gradsync.accelerator.environment import LOOPBACK
from gradsync.errors import ConfigurationError
from gradsync.lab.kernel import enter_host, inside
from gradsync.launch import Place

__all__ = ["GLOO_INTERFACE", "INTERFACE", "Counters", "Host", "places_here", "places_on", "read_counters"]

INTERFACE = "eth0"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


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
            local=(local, ranks_per_host),
            node=(host.index, len(hosts)),
            master=(hosts[0].address, port),
            host=host.name,
            more={GLOO_INTERFACE: host.interface},
            enter=partial(enter_host, host.namespace, host.name, addresses),
        )
        for host in hosts
        for local in range(ranks_per_host)
    ]


def places_here(ranks: int) -> list[Place]:
    """The ranks of a program on this machine, which talk over loopback."""
    if ranks < 1:
        raise ConfigurationError(f"a program has at least 1 rank, got {ranks}")
    master, more = (LOOPBACK, _free_port(LOOPBACK)), {GLOO_INTERFACE: "lo"}
    return [Place(local=(rank, ranks), master=master, host="this machine", more=more) for rank in range(ranks)]


def _free_port(address: str = "") -> int:
    with socket.socket() as listener:
        listener.bind((address, 0))
        port: int = listener.getsockname()[1]
        return port
