"""The labs that exist, read from the system itself.

Nothing is kept in files. A lab consists of its namespaces, whose names encode lab and part::

    gradsync-NAME-switch     holds the bridge; the bridge's alias tells the owner and the subnet
    gradsync-NAME-host0      holds eth0, whose other end is a port of the bridge

So whatever was killed, the next ``up`` or ``down`` finds all that is left. Processes are found through the namespace
they are in. An owner is a process id and its start time, so a reused process id does not count.
"""

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gradsync.tools.lab.system import NAMESPACES, LabError, ip

__all__ = ["BRIDGE", "Owner", "Record", "alone", "host_name", "lab_names", "processes", "remove", "switch_name"]

BRIDGE = "switch"
NAME = re.compile(r"gradsync-(?P<lab>.+)-(?:switch|host\d+)")
RECORD = re.compile(r"gradsync owner=(?:none|(?P<pid>\d+):(?P<started>\d+)) subnet=(?P<subnet>[\d.]+)")
# An abstract socket: no file, and gone with its process.
LOCK = "\0gradsync-lab"
LOCK_SECONDS = 60.0
KILL_SECONDS = 20.0
PAUSE_SECONDS = 0.02


def switch_name(lab: str) -> str:
    """The namespace of a lab's bridge."""
    return f"gradsync-{lab}-switch"


def host_name(lab: str, index: int) -> str:
    """The namespace of a lab's host."""
    return f"gradsync-{lab}-host{index}"


def lab_names() -> list[str]:
    """All labs of this machine, leftovers included."""
    return sorted({match["lab"] for name in _all_namespaces() if (match := NAME.fullmatch(name))})


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process, distinguished by its start time from later ones with the same id."""

    pid: int
    started: int

    @classmethod
    def current(cls) -> "Owner":
        return cls(pid=os.getpid(), started=_start_time(os.getpid()) or 0)

    @property
    def alive(self) -> bool:
        return _start_time(self.pid) == self.started


@dataclass(frozen=True, kw_only=True)
class Record:
    """A lab's description of itself. A lab without an owner stays until it is taken down."""

    owner: Owner | None
    subnet: str

    @property
    def alias(self) -> str:
        owner = "none" if self.owner is None else f"{self.owner.pid}:{self.owner.started}"
        return f"gradsync owner={owner} subnet={self.subnet}"

    @classmethod
    def of(cls, lab: str) -> "Record | None":
        """None if there is no such lab, or only parts of one."""
        if switch_name(lab) not in _all_namespaces():
            return None
        try:
            links = ip.json("link", "show", namespace=switch_name(lab))
        except LabError:
            return None  # a file without its namespace, as a crash of the machine leaves it
        aliases = [link.get("ifalias", "") for link in links if link["ifname"] == BRIDGE]
        match = RECORD.fullmatch(aliases[0]) if aliases else None
        if match is None:
            return None
        owner = Owner(pid=int(match["pid"]), started=int(match["started"])) if match["pid"] else None
        return cls(owner=owner, subnet=match["subnet"])

    @property
    def in_use(self) -> bool:
        return self.owner is None or self.owner.alive


def processes(namespace: str) -> list[int]:
    """The processes whose network is that of a host."""
    return [int(line) for line in ip("netns", "pids", namespace).split()]


def remove(lab: str) -> None:
    """End all processes in a lab and remove all of its parts that exist."""
    names = [name for name in _all_namespaces() if (match := NAME.fullmatch(name)) and match["lab"] == lab]
    for name in names:
        _end_processes(name)
    for name in names:
        # Links and queues go with the namespaces they are in.
        ip("netns", "delete", name)


@contextmanager
def alone() -> Iterator[None]:
    """Only one process at a time creates or removes labs."""
    deadline = time.monotonic() + LOCK_SECONDS
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind(LOCK)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise LabError(
                        f"another process has been making or removing a lab for {LOCK_SECONDS:.0f} s. End it, and "
                        "try again"
                    ) from None
                time.sleep(PAUSE_SECONDS)
        yield


def _end_processes(namespace: str) -> None:
    """Again until none is left: a process may start another before it ends."""
    deadline = time.monotonic() + KILL_SECONDS
    while True:
        try:
            pids = processes(namespace)
        except LabError:
            return  # a file without its namespace
        if os.getpid() in pids:
            raise LabError(f"this process is itself inside {namespace} and cannot remove it. Run the command outside")
        if not pids:
            return
        if time.monotonic() > deadline:
            raise LabError(f"processes {pids} in {namespace} do not end, not even by SIGKILL. Look at them with ps")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)


def _all_namespaces() -> list[str]:
    return sorted(os.listdir(NAMESPACES)) if NAMESPACES.is_dir() else []


def _start_time(pid: int) -> int | None:
    """In the kernel's ticks since boot; None if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold anything.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
