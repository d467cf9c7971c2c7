"""A host of a lab, its interface counters, and how to run ranks on hosts: a function in each, or a program."""

import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from gradsync.base.environment import LOOPBACK
from gradsync.base.errors import ConfigurationError
from gradsync.tools.lab.system import LabError, enter_host, inside
from gradsync.tools.launch import Failure, RankPlace, RankProcesses, become, signals_raise

__all__ = [
    "INTERFACE",
    "Counters",
    "Host",
    "free_port",
    "places_here",
    "places_on",
    "read_counters",
    "run_at",
    "run_program",
]

INTERFACE = "eth0"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# Lines shown of a rank that failed.
TAIL_LINES = 40
TAIL_BYTES = 64 * 1024
# What writing the stacks of a rank may take.
TELLING_SECONDS = 0.3
# What a user may choose of the variables of a rank: threads and interface, not who it is.
CHOSEN = ("OMP_NUM_THREADS", GLOO_INTERFACE)


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
    """Bytes through a host's interface since the lab was created, including network headers."""

    sent: int
    received: int


def read_counters(interface: str = INTERFACE) -> Counters:
    """The counters of this process's own network: inside a rank, of its host."""
    # Not /proc/net, which shows the network of the process's first thread.
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return Counters(sent=int(fields[8]), received=int(fields[0]))
    raise ConfigurationError(f"there is no interface {interface} here. A host of a lab has {INTERFACE}")


def places_on(hosts: Sequence[Host], ranks_per_host: int) -> list[RankPlace]:
    """The ranks of a program on the hosts of a lab, host by host as torchrun numbers them."""
    if ranks_per_host < 1:
        raise ConfigurationError(f"a host runs at least 1 rank, got {ranks_per_host}")
    port = inside(hosts[0].namespace, free_port)
    addresses = {host.name: host.address for host in hosts}
    return [
        RankPlace(
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


def places_here(ranks: int) -> list[RankPlace]:
    """The ranks of a program on this machine, which talk over loopback."""
    if ranks < 1:
        raise ConfigurationError(f"a program has at least 1 rank, got {ranks}")
    master, more = (LOOPBACK, free_port(LOOPBACK)), {GLOO_INTERFACE: "lo"}
    return [RankPlace(local=(rank, ranks), master=master, host="this machine", more=more) for rank in range(ranks)]


def free_port(address: str = "") -> int:
    with socket.socket() as listener:
        listener.bind((address, 0))
        port: int = listener.getsockname()[1]
        return port


def run_at(
    places: Sequence[RankPlace],
    action: Callable[[RankPlace], object],
    timeout: float,
    *,
    telling: signal.Signals | None = None,
) -> Failure | None:
    """Run ``action(place)`` in a process at each place. Returns the rank that failed first, if any; none runs any more.

    ``telling`` is the signal on which ranks write their stacks, if they do.
    """
    with signals_raise(), RankProcesses() as ranks:
        for place in places:
            ranks.start(place, partial(action, place))
        try:
            return ranks.wait(timeout)
        except TimeoutError as error:
            where = ""
            if telling is not None:
                ranks.send(telling, pause=TELLING_SECONDS)
                where = ", where they stood is above"
            raise LabError(f"{error}. They were ended{where}; allow more time?") from None


def run_program(places: Sequence[RankPlace], command: Sequence[str], *, env: Mapping[str, str], timeout: float) -> int:
    """Run ``command`` at each place; the exit code is 0, or that of the rank that failed first."""
    path = _found(command, env.get("PATH", os.environ.get("PATH", os.defpath)))
    with ExitStack() as stack:
        # Kept until one fails. Without a name, so that no kill leaves one behind.
        outputs = {place.rank: stack.enter_context(tempfile.TemporaryFile()) for place in places[1:]}

        def work(place: RankPlace) -> None:
            fixed = place.variables.keys() - CHOSEN
            os.environ.update({name: value for name, value in env.items() if name not in fixed})
            output = outputs.get(place.rank)
            become(path, list(command), output, output)

        failure = run_at(places, work, timeout)
        if failure is None:
            return 0
        if failure.place.rank in outputs:
            _show(failure, outputs[failure.place.rank])
    others = "; the others were ended" if len(places) > 1 else ""
    print(f"gradsync: {failure}{others}", file=sys.stderr, flush=True)
    return failure.exit_code


def _found(command: Sequence[str], searched: str) -> str:
    if not command:
        raise ConfigurationError("there is no command to run. Give one after --, as in: gradsync lab run -- hostname")
    path = shutil.which(command[0], path=searched)
    if path is None:
        raise ConfigurationError(f"the command {command[0]} is neither a program in PATH nor a file that can be run")
    return path


def _show(failure: Failure, output: IO[bytes]) -> None:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - TAIL_BYTES))
    for line in output.read().decode(errors="replace").splitlines()[-TAIL_LINES:]:
        print(f"[rank {failure.place.rank}] {line}", file=sys.stderr)
