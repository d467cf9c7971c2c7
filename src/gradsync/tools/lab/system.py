"""The system tools a lab uses: ``ip`` and ``tc``, and the system calls that Python 3.11 does not offer."""

import ctypes
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from gradsync.base.errors import ConfigurationError, GradsyncError

__all__ = ["NAMESPACES", "LabError", "check_fit", "enter_host", "inside", "ip", "tc"]

R = TypeVar("R")

# Where `ip netns` keeps them.
NAMESPACES = Path("/run/netns")
# Debian keeps them where only root's PATH looks.
SEARCHED = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
SECONDS = 60

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
MNT_DETACH = 2

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
    """``ip``, which makes the hosts, or ``tc``, which shapes their links."""

    def __init__(self, name: str, *details: str) -> None:
        self._name = name
        self._details = details

    def __call__(self, *arguments: str, namespace: str | None = None, written: str = "") -> str:
        """One command; its output."""
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
        """Several commands in one process; the first that fails raises."""
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
    """``function()`` in a thread of this process that has the network of a host; everything else is as here."""

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
