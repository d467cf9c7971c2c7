"""Authenticates the other ranks of a host as they connect: a thread checks each connection as soon as it arrives.

See [Note: strangers] in host_peers.py. No connection is left pending: what waits in the kernel's queue keeps others out
of it, and anybody can fill that queue.
"""

import contextlib
import os
import secrets
import select
import socket
import struct
import threading
from typing import NamedTuple

__all__ = ["HELLO", "SECRET_BYTES", "Credentials", "HandshakeServer"]

SECRET_BYTES = 32
HELLO = struct.Struct(f"<q{SECRET_BYTES}s")
_CREDENTIALS = struct.Struct("=iII")
# Of this user, and have not said who they are yet. When there are more, the first of them is let go.
MOST_STRANGERS = 256
LOOK_MILLISECONDS = 20


class Credentials(NamedTuple):
    """The process at the other end of a socket, as the kernel reports it."""

    process: int
    user: int

    @classmethod
    def of(cls, connection: socket.socket) -> "Credentials":
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, user, _ = _CREDENTIALS.unpack(credentials)
        return cls(process, user)

    @property
    def is_unauthenticated(self) -> bool:
        """Whether another user runs it than this one."""
        return self.user != os.geteuid()


class HandshakeServer:
    """A context manager that admits the ``missing`` ranks that know ``secret``. ``peers`` are the admitted ones."""

    def __init__(self, listener: socket.socket, secret: bytes, missing: set[int]) -> None:
        self.missing = missing
        self.peers: dict[int, tuple[socket.socket, Credentials]] = {}
        self._listener, self._secret = listener, secret
        self._unauthenticated: dict[int, socket.socket] = {}
        self._poller = select.poll()
        self._all_came, self._is_shut = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="gradsync host door", daemon=True)

    def __enter__(self) -> "HandshakeServer":
        if self.missing:
            self._poller.register(self._listener, select.POLLIN)
            self._thread.start()
        else:
            self._all_came.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_shut = True
        if self._thread.ident is not None:
            self._thread.join()
        for connection in (*self._unauthenticated.values(), *(peer for peer, _ in self.peers.values())):
            connection.close()

    def wait(self, seconds: float) -> bool:
        """Whether all peers have connected by then."""
        return self._all_came.wait(seconds)

    def take_peers(self) -> dict[int, tuple[socket.socket, Credentials]]:
        """The sockets, by rank. The caller must close them."""
        peers, self.peers = self.peers, {}
        return peers

    def _run(self) -> None:
        while self.missing and not self._is_shut:
            for descriptor, _ in self._poller.poll(LOOK_MILLISECONDS):
                if descriptor == self._listener.fileno():
                    self._welcome()
                elif descriptor in self._unauthenticated:
                    self._ask(self._unauthenticated[descriptor])
        self._all_came.set()

    def _welcome(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again, or there is no descriptor left
            return
        connection.setblocking(False)
        if Credentials.of(connection).is_unauthenticated:
            connection.close()
            return
        self._unauthenticated[connection.fileno()] = connection
        self._poller.register(connection, select.POLLIN)
        if len(self._unauthenticated) > MOST_STRANGERS:
            self._let_go(next(iter(self._unauthenticated.values())))
            return
        self._ask(connection)

    def _ask(self, connection: socket.socket) -> None:
        try:
            hello = connection.recv(HELLO.size)
        except BlockingIOError:
            return
        except OSError:
            hello = b""
        peer = self._known(hello)
        if peer is None:
            self._let_go(connection)
            return
        self._poller.unregister(connection)
        self.peers[peer] = self._unauthenticated.pop(connection.fileno()), Credentials.of(connection)
        self.missing.remove(peer)

    def _known(self, hello: bytes) -> int | None:
        """The missing rank that says this, with the secret; it comes in one piece."""
        if len(hello) == HELLO.size:
            peer, shown = HELLO.unpack(hello)
            if secrets.compare_digest(shown, self._secret) and peer in self.missing:
                return int(peer)
        return None

    def _let_go(self, connection: socket.socket) -> None:
        self._unauthenticated.pop(connection.fileno(), None)
        with contextlib.suppress(KeyError):
            self._poller.unregister(connection)
        connection.close()
