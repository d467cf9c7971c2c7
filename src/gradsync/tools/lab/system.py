"""Labs as the system knows them: the tools ``ip`` and ``tc``, system calls that Python lacks, and the labs that exist.

Nothing is kept in files. A lab consists of its namespaces, whose names encode lab and part::

    gradsync-NAME-switch     holds the bridge; the bridge's alias tells the owner and the subnet
    gradsync-NAME-host0      holds eth0, whose other end is a port of the bridge

So whatever was killed, the next ``up`` or ``down`` finds all that is left. Processes are found through the namespace
they are in. An owner is a process id and its start time, so a reused process id does not count.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gradsync.base.errors import ConfigurationError, GradsyncError

__all__ = [
    *("BRIDGE", "NAMESPACES", "LabError", "LabOwner", "LabRecord", "alone", "check_fit", "enter_host", "host_name"),
    *("inside", "ip", "lab_names", "processes", "remove", "switch_name", "tc"),
]

R = TypeVar("R")

# Where `ip netns` keeps them.
NAMESPACES = Path("/run/netns")
# Debian keeps them where only root's PATH looks.
SEARCHED = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
SECONDS = 60

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
MNT_DETACH = 2

BRIDGE = "switch"
NAME = re.compile(r"gradsync-(?P<lab>.+)-(?:switch|host\d+)")
RECORD = re.compile(
    r"gradsync owner=(?:none|(?P<pid>\d+):(?P<started>\d+)) subnet=(?P<subnet>[\d.]+) "
    r"delay=(?P<delay>\S+) loss=(?P<loss>\S+)"
)
# An abstract socket: no file, and gone with its process.
LOCK = "\0gradsync-lab"
LOCK_SECONDS = 60.0
KILL_SECONDS = 20.0
PAUSE_SECONDS = 0.02

_libc = ctypes.CDLL(None, use_errno=True)


class LabError(GradsyncError):
    """A lab could not be made, found or removed, or a rank in it failed. The message names the rank and its host."""


def check_fit() -> None:
    """Raise unless this process may make a lab: it needs root, ``ip`` and ``tc``."""
    missing = [program for program in ("ip", "tc") if shutil.which(program, path=SEARCHED) is None]
    if missing:
        raise ConfigurationError(
            f"a lab needs the program {' and '.join(missing)}, which is not installed: apt install iproute2"
        )
    if os.geteuid() != 0:
        raise ConfigurationError(
            f"a lab needs root, because it makes network namespaces; this is user {os.geteuid()}. Use sudo, or a "
            "container with the capabilities NET_ADMIN and SYS_ADMIN"
        )


class Program:
    """A program to run: ``ip``, which makes the hosts, or ``tc``, which shapes their links."""

    def __init__(self, name: str, *details: str) -> None:
        self._name = name
        self._details = details

    def __call__(self, *arguments: str, namespace: str | None = None, written: str = "") -> str:
        """Run one command, and return its output."""
        command = [self._name, *([] if namespace is None else ["-netns", namespace]), *arguments]
        path = shutil.which(self._name, path=SEARCHED) or self._name
        try:
            answer = subprocess.run(
                [path, *command[1:]], input=written, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LabError(f"{' '.join(command)} did not work: {error}") from error
        if answer.returncode != 0:
            raise LabError(
                f"{' '.join(command)} failed: {answer.stderr.strip() or 'it does not say why'}. A lab needs the "
                "capabilities NET_ADMIN and SYS_ADMIN, and a kernel with network namespaces, veth, bridge and tbf"
            )
        return answer.stdout

    def lines(self, namespace: str, lines: Iterable[str]) -> None:
        """Run several commands in one process; the first that fails raises."""
        self("-batch", "-", namespace=namespace, written="\n".join(lines))

    def json(self, *arguments: str, namespace: str) -> list[dict[str, Any]]:
        """What a ``… show`` tells, as data."""
        answer: list[dict[str, Any]] = json.loads(
            self("-json", *self._details, *arguments, namespace=namespace) or "[]"
        )
        return answer


ip, tc = Program("ip", "-details"), Program("tc")


def enter_host(namespace: str, name: str, addresses: Mapping[str, str]) -> None:
    """Move this process, which has one thread, to a host.

    It has the host's network and name, a ``/sys`` that shows that network, and an ``/etc/hosts`` with ``addresses``.
    The mounts are this process's own and end with it.
    """
    _enter_network(namespace)
    _call("unshare", CLONE_NEWNS | CLONE_NEWUTS)
    # Without this the mounts below would show outside.
    _call("mount", b"none", b"/", None, MS_REC | MS_SLAVE, None)
    _call("umount2", b"/sys", MNT_DETACH)
    # A file in memory needs a place to be for a moment, and /sys is free.
    _call("mount", b"gradsync", b"/sys", b"tmpfs", 0, None)
    lines = {"localhost": "127.0.0.1", **addresses}.items()
    # Sockets of IPv6, as torch makes them, know the same hosts by the second kind of address.
    Path("/sys/hosts").write_text("".join(f"{address} {host}\n::ffff:{address} {host}\n" for host, address in lines))
    _call("mount", b"/sys/hosts", b"/etc/hosts", None, MS_BIND, None)
    _call("umount2", b"/sys", MNT_DETACH)
    _call("mount", b"gradsync", b"/sys", b"sysfs", 0, None)
    socket.sethostname(name)


def inside(namespace: str, function: Callable[[], R]) -> R:
    """Run ``function()`` in a thread of this process that has the network of a host; everything else is as here."""

    def work() -> R:
        _enter_network(namespace)
        return function()

    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(work).result()


def _enter_network(namespace: str) -> None:
    try:
        descriptor = os.open(NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise LabError(f"the host {namespace} is gone ({error.strerror}). Was its lab taken down?") from error
    try:
        _call("setns", descriptor, CLONE_NEWNET)
    finally:
        os.close(descriptor)


def _call(name: str, *arguments: int | bytes | None) -> None:
    # Flags and pointers are as long as the machine's words; a bare int would be passed as 32 bits.
    words = [ctypes.c_ulong(value) if isinstance(value, int) and name == "mount" else value for value in arguments]
    if getattr(_libc, name)(*words) != 0:
        number = ctypes.get_errno()
        raise LabError(f"{name} failed: {os.strerror(number)}. A lab needs root")


# -- the labs that exist ---------------------------------------------------------------------------------------------


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
class LabOwner:
    """A process, distinguished by its start time from later ones with the same id."""

    pid: int
    started: int

    @classmethod
    def current(cls) -> "LabOwner":
        return cls(pid=os.getpid(), started=_start_time(os.getpid()) or 0)

    @property
    def alive(self) -> bool:
        return _start_time(self.pid) == self.started


@dataclass(frozen=True, kw_only=True)
class LabRecord:
    """A lab's description of itself. A lab without an owner stays until it is taken down."""

    owner: LabOwner | None
    subnet: str
    delay: float = 0.0
    loss: float = 0.0

    @property
    def alias(self) -> str:
        owner = "none" if self.owner is None else f"{self.owner.pid}:{self.owner.started}"
        return f"gradsync owner={owner} subnet={self.subnet} delay={self.delay} loss={self.loss}"

    @classmethod
    def of(cls, lab: str) -> "LabRecord | None":
        """The record of a lab; None if there is no such lab, or only parts of one."""
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
        owner = LabOwner(pid=int(match["pid"]), started=int(match["started"])) if match["pid"] else None
        return cls(owner=owner, subnet=match["subnet"], delay=float(match["delay"]), loss=float(match["loss"]))

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
    """A context that one process at a time enters, to create or remove labs."""
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
    """End the processes of a host, again until none is left: one may start another before it ends."""
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
    """The start of a process in the kernel's ticks since boot; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold anything.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
