"""Rendezvous: ranks connect to one that listens, and both ends prove that they belong to the same job.

A rank that listens sends the others an invitation over their group: where it listens, and a secret, which never crosses
the connection itself. Each end proves that it knows the secret, with a code over a nonce that the other drew::

    listener   nonce a                             every connection gets a nonce
    rank       its number, nonce b, code(a, 2)     and answers with its own, and a code over both
    listener   code(b, "listener")                 now they are connected

[Note: authentication] During the rendezvous any process can connect: the name of a Unix socket is public. A rank proves
itself with three things: on a Unix socket the user it runs as, which the kernel vouches for; the secret; and a rank
number that is still missing. A peer that lacks any of them is dropped at once, and so is one that says nothing for too
long. A thread answers each connection as soon as it arrives: what waits in the kernel's queue keeps others out of it,
and anybody can fill that queue. It listens on the Unix socket and on addresses through which the process group may
reach this host, never on all addresses of the machine.
"""

import contextlib
import fcntl
import hmac
import ipaddress
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["ANSWER", "Credentials", "Invitation", "Rendezvous", "code", "enter", "own_addresses"]

SECRET_BYTES = 32
NONCE_BYTES = 16
CODE_BYTES = 32
ANSWER = struct.Struct(f"<q{NONCE_BYTES}s{CODE_BYTES}s")
LISTENER = "listener"
_CREDENTIALS = struct.Struct("=iII")
# A peer that has not authenticated by then is dropped, as is the oldest of too many.
AUTHENTICATION_SECONDS = 2.0
MOST_PENDING = 64
LOOK_MILLISECONDS = 20
# How long a rank tries to get in.
JOIN_SECONDS = 5.0
RETRY_SECONDS = 0.01
NAME_BYTES = 16
# The interfaces that users choose for their group.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_DISCARD_PORT = 9


class Credentials(NamedTuple):
    """The process at the other end of a Unix socket, as the kernel reports it."""

    process: int
    user: int

    @classmethod
    def of(cls, connection: socket.socket) -> "Credentials":
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, user, _ = _CREDENTIALS.unpack(credentials)
        return cls(process, user)


class Invitation(NamedTuple):
    """What a rank that listens sends to the other ranks only."""

    secret: bytes
    name: bytes
    addresses: tuple[tuple[str, int], ...] = ()

    def pack(self) -> bytes:
        return json.dumps([self.secret.hex(), self.name.hex(), self.addresses]).encode()

    @classmethod
    def read(cls, packed: bytes) -> "Invitation":
        secret, name, addresses = json.loads(packed)
        return cls(bytes.fromhex(secret), bytes.fromhex(name), tuple((host, port) for host, port in addresses))

    def ways(self, *, is_here: bool) -> list[tuple[int, Any]]:
        """The sockets to connect to: the Unix socket on the same host, else the addresses."""
        if is_here:
            return [(socket.AF_UNIX, self.name)]
        return [(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, port)) for host, port in self.addresses]


class _PendingPeer:
    """A connection that has not been authenticated."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.until = time.monotonic() + AUTHENTICATION_SECONDS
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._received = b""
        connection.send(self.nonce)

    def answer(self) -> tuple[int, bytes, bytes] | None:
        """Number, nonce and code, once they have come. OSError if it hangs up."""
        with contextlib.suppress(BlockingIOError):
            data = self.connection.recv(ANSWER.size - len(self._received))
            if not data:
                raise ConnectionError
            self._received += data
        return ANSWER.unpack(self._received) if len(self._received) == ANSWER.size else None


class Rendezvous:
    """Listens for the ``missing`` ranks, on a thread of its own, until all have come or it is closed.

    With ``others_elsewhere``, ranks on other hosts may come, too.
    """

    def __init__(self, missing: set[int], *, others_elsewhere: bool = False) -> None:
        self.missing = missing
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._name = b"\0gradsync-" + secrets.token_hex(NAME_BYTES).encode()
        self._listeners: dict[int, socket.socket] = {}
        self._pending: dict[int, _PendingPeer] = {}
        self._joined: dict[int, socket.socket] = {}
        self._poller = select.poll()
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="gradsync rendezvous", daemon=True)
        try:
            if missing:
                self._listen(socket.AF_UNIX, self._name)
                if others_elsewhere:
                    self._listen_at_addresses()
                self._thread.start()
            addresses = [each.getsockname()[:2] for each in self._listeners.values() if each.family != socket.AF_UNIX]
            self.invitation = Invitation(self._secret, self._name, tuple(addresses))
        except BaseException:
            self.close()
            raise

    def take(self) -> dict[int, socket.socket]:
        """The connections, by rank, once all ranks have come. The caller must close them."""
        if self._thread.is_alive():
            self._thread.join(JOIN_SECONDS)
        if self.missing:
            raise ConnectionError(f"{len(self.missing)} ranks did not come")
        joined, self._joined = self._joined, {}
        return joined

    def close(self) -> None:
        self._is_closed = True
        if self._thread.is_alive():
            self._thread.join()
        self._close_all()
        for connection in self._joined.values():
            connection.close()

    def _listen(self, family: int, address: Any) -> None:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(address)
            # As many as there may be: anybody can wait in it.
            listener.listen(socket.SOMAXCONN)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._listeners[listener.fileno()] = listener
        self._poller.register(listener, select.POLLIN)

    def _listen_at_addresses(self) -> None:
        before = len(self._listeners)
        for family, address in own_addresses():
            # One of them may be none that can be bound here.
            with contextlib.suppress(OSError):
                self._listen(family, (address, 0))
        if len(self._listeners) == before:
            raise OSError("no address of this host is known by which other hosts reach it; set GLOO_SOCKET_IFNAME")

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while self.missing and not self._is_closed:
                for descriptor, _ in self._poller.poll(LOOK_MILLISECONDS):
                    if descriptor in self._listeners:
                        self._accept(self._listeners[descriptor])
                    elif descriptor in self._pending:
                        self._authenticate(self._pending[descriptor])
                self._drop_overdue()
        finally:
            self._close_all()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it has gone again, or there is no descriptor left
            return
        try:
            if listener.family == socket.AF_UNIX and Credentials.of(connection).user != os.geteuid():
                raise PermissionError
            _send_at_once(connection)
            peer = _PendingPeer(connection)
        except OSError:
            connection.close()
            return
        self._pending[connection.fileno()] = peer
        self._poller.register(connection, select.POLLIN)

    def _authenticate(self, peer: _PendingPeer) -> None:
        try:
            answer = peer.answer()
            if answer is None:
                return
            rank, nonce, proof = answer
            if rank not in self.missing or not hmac.compare_digest(proof, code(self._secret, peer.nonce, rank)):
                raise PermissionError
            peer.connection.send(code(self._secret, nonce, LISTENER))
        except OSError:
            self._drop(peer)
            return
        self._poller.unregister(peer.connection)
        del self._pending[peer.connection.fileno()]
        self._joined[rank] = peer.connection
        self.missing.remove(rank)

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        for count, peer in zip(range(len(self._pending), 0, -1), list(self._pending.values()), strict=True):
            if peer.until > now and count <= MOST_PENDING:
                return
            self._drop(peer)

    def _drop(self, peer: _PendingPeer) -> None:
        self._poller.unregister(peer.connection)
        del self._pending[peer.connection.fileno()]
        peer.connection.close()

    def _close_all(self) -> None:
        for peer in self._pending.values():
            peer.connection.close()
        for listener in self._listeners.values():
            listener.close()
        self._pending, self._listeners = {}, {}


def code(secret: bytes, nonce: bytes, name: object) -> bytes:
    """A code that only a process that knows ``secret`` can compute."""
    return hmac.digest(secret, nonce + str(name).encode(), "sha256")


def enter(invitation: Invitation, rank: int, who: str, *, is_here: bool) -> socket.socket:
    """Connect to ``who`` listens, as ``rank``: by the Unix socket if it ``is_here``, on this host, too."""
    deadline = time.monotonic() + JOIN_SECONDS
    failure = OSError(f"{who} has no address")
    while True:
        for family, address in invitation.ways(is_here=is_here):
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                connection.settimeout(JOIN_SECONDS / 2)
                # A full queue is an error at once. Others may fill it for a moment, until they are dropped.
                connection.connect(address)
                _send_at_once(connection)
                if family == socket.AF_UNIX and (user := Credentials.of(connection).user) != os.geteuid():
                    raise PermissionError(f"{who} runs as user {user}, and this one as {os.geteuid()}")
                _prove(connection, invitation.secret, rank, who)
                return connection
            except OSError as error:
                connection.close()
                failure = error
            except BaseException:
                connection.close()
                raise
        # What listens under the name of that socket will not change.
        if time.monotonic() > deadline or (is_here and isinstance(failure, PermissionError)):
            raise failure
        time.sleep(RETRY_SECONDS)


def _prove(connection: socket.socket, secret: bytes, rank: int, who: str) -> None:
    """Show who this rank is, and see that the other end is the one that has invited it."""
    theirs = _receive(connection, NONCE_BYTES, who)
    mine = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ANSWER.pack(rank, mine, code(secret, theirs, rank)))
    if not hmac.compare_digest(_receive(connection, CODE_BYTES, who), code(secret, mine, LISTENER)):
        raise ConnectionError(f"what listens there is not {who}")


def _receive(connection: socket.socket, size: int, who: str) -> bytes:
    """Receive that many bytes and no more: what follows is not part of the handshake."""
    received = b""
    while len(received) < size:
        data = connection.recv(size - len(received))
        if not data:
            raise ConnectionError(f"{who} has hung up")
        received += data
    return received


def _send_at_once(connection: socket.socket) -> None:
    """Have short messages sent at once instead of waiting to be sent with others."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


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
