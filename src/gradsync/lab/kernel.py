"""The system calls that Python 3.11 does not offer: entering a namespace, and mounts of one's own."""

import ctypes
import os
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from gradsync.lab.errors import LabError

__all__ = ["NAMESPACES", "enter_host", "inside"]

R = TypeVar("R")

# Where `ip netns` keeps them.
NAMESPACES = Path("/run/netns")

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


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
