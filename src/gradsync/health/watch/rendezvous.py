"""The rendezvous at which the hub admits the other ranks while a watch is set up; it closes when all have joined.

Ranks on the hub's own host connect through a Unix socket without a name in the file system, and must run as the same
user. Only if there are other hosts does the hub also listen on network addresses: those through which the process group
may reach this host, never all addresses of the machine.
"""

import contextlib
import fcntl
import ipaddress
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

from gradsync.communicator.handshake import Credentials
from gradsync.health.watch.protocol import SECRET_BYTES, Handshake, Line, ProtocolError, join

__all__ = ["Invitation", "Rendezvous", "enter", "own_addresses"]

Invitation = dict[str, Any]

# A peer that has not authenticated by then is dropped, as is the oldest of too many.
STRANGER_SECONDS = 2.0
MOST_STRANGERS = 64
BACKLOG = 128
AT_A_TIME = 32
JOIN_SECONDS = 5.0
RETRY_SECONDS = 0.05
NAME_BYTES = 16
# The interfaces that users choose for their group.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_DISCARD_PORT = 9


class Rendezvous:
    """The hub's listening sockets, and the connections that have not been admitted yet."""

    def __init__(self, missing: set[int], *, others_elsewhere: bool) -> None:
        self.missing = missing
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._name = b"\0gradsync-watch-" + secrets.token_hex(NAME_BYTES).encode()
        self.listeners: list[socket.socket] = []
        self.unauthenticated: dict[Handshake, float] = {}
        try:
            self._listen(socket.AF_UNIX, self._name)
            if others_elsewhere:
                self._listen_at_addresses()
        except BaseException:
            self.close()
            raise

    def invitation(self) -> Invitation:
        """What the other ranks must know, and nobody else may."""
        addresses = [each.getsockname()[:2] for each in self.listeners if each.family != socket.AF_UNIX]
        return {"secret": self._secret.hex(), "name": self._name.hex(), "addresses": addresses}

    def welcome(self, listener: socket.socket) -> Iterator[Handshake]:
        """Those who have connected, and are not of another user: a few at a time, as others want to be heard, too."""
        for _ in range(AT_A_TIME):
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if listener.family == socket.AF_UNIX and Credentials.of(connection).is_unauthenticated:
                connection.close()
                continue
            _send_at_once(connection)
            handshake = Handshake(Line(connection), self._secret, self.missing)
            self.unauthenticated[handshake] = time.monotonic() + STRANGER_SECONDS
            yield handshake

    def overdue(self, now: float) -> list[Handshake]:
        """Connections that have been pending too long, or are too many."""
        late = [handshake for handshake, until in self.unauthenticated.items() if until <= now]
        return late or list(self.unauthenticated)[: max(0, len(self.unauthenticated) - MOST_STRANGERS)]

    def send_away(self, handshake: Handshake) -> None:
        if self.unauthenticated.pop(handshake, None) is not None:
            handshake.line.close()

    def close(self) -> None:
        for handshake in list(self.unauthenticated):
            self.send_away(handshake)
        for listener in self.listeners:
            listener.close()
        self.listeners = []

    def _listen(self, family: int, address: Any) -> None:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self.listeners.append(listener)

    def _listen_at_addresses(self) -> None:
        before = len(self.listeners)
        for family, address in own_addresses():
            # One of them may be none that can be bound here.
            with contextlib.suppress(OSError):
                self._listen(family, (address, 0))
        if len(self.listeners) == before:
            raise OSError("no address of this host is known by which other hosts reach it; set GLOO_SOCKET_IFNAME")


def own_addresses() -> list[tuple[int, str]]:
    """The addresses through which the group may reach this host: of the interface chosen for it; otherwise those of the
    host's name, and of the route to the master.

    Other hosts cannot use a loopback address, unless they are hosts by name only.
    """
    chosen = list(dict.fromkeys(_of_interfaces()))
    found = chosen or list(dict.fromkeys([*_of_the_name(), *_of_the_way_to_the_master()]))
    return [each for each in found if not ipaddress.ip_address(each[1]).is_loopback] or found


def _of_interfaces() -> Iterator[tuple[int, str]]:
    names = [name for variable in INTERFACE_VARIABLES for name in os.environ.get(variable, "").split(",")]
    for name in filter(None, names):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            answer = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, struct.pack("256s", name.lstrip("=^").encode()[:15]))
            yield socket.AF_INET, socket.inet_ntoa(answer[20:24])


def _of_the_name() -> Iterator[tuple[int, str]]:
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            # One that is good on a single link needs the name of the link as well.
            if not ipaddress.ip_address(address[0]).is_link_local:
                yield family, str(address[0])


def _of_the_way_to_the_master() -> Iterator[tuple[int, str]]:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        # Nothing is sent: the kernel only says which way it would take.
        asked.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), _DISCARD_PORT))
        yield socket.AF_INET, str(asked.getsockname()[0])


def enter(invitation: Invitation, member: int, *, is_here: bool) -> Line:
    """A line to the hub, from another rank: by the Unix socket if it ``is_here``, on this host, too."""
    deadline = time.monotonic() + JOIN_SECONDS
    secret, told = bytes.fromhex(invitation["secret"]), OSError("the hub has no address")
    while True:
        for family, address in _ways(invitation, is_here=is_here):
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.settimeout(JOIN_SECONDS / 2)
            try:
                connection.connect(address)
                _send_at_once(connection)
                if family == socket.AF_UNIX and Credentials.of(connection).is_unauthenticated:
                    raise PermissionError("another user listens there")
                return join(connection, member, secret, JOIN_SECONDS / 2)
            except (OSError, ProtocolError) as error:
                connection.close()
                told = error if isinstance(error, OSError) else ConnectionError(str(error))
            except BaseException:
                connection.close()
                raise
        if time.monotonic() > deadline:
            raise told
        time.sleep(RETRY_SECONDS)


def _send_at_once(connection: socket.socket) -> None:
    """News of a rank must not wait for more to say."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _ways(invitation: Invitation, *, is_here: bool) -> list[tuple[int, Any]]:
    if is_here:
        return [(socket.AF_UNIX, bytes.fromhex(invitation["name"]))]
    return [
        (socket.AF_INET6 if ":" in address else socket.AF_INET, (address, port))
        for address, port in invitation["addresses"]
    ]
