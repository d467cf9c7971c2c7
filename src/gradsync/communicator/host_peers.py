"""Sockets between the ranks of one host: they carry descriptors of memory, and they close when a process ends.

Every pair of ranks has a Unix socket of its own. It has no name in the file system, so nothing is left of it; the
kernel closes it when a process ends, however that happens, and the other end learns of it at once.
"""

import contextlib
import os
import secrets
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable

import torch

from gradsync.communicator.base import Communicator
from gradsync.errors import ConfigurationError, PeerFailedError

__all__ = ["HostPeers"]

TOKEN_BYTES = 16
CONNECT_SECONDS = 60.0
# From a rank that has no socket: everybody must know before anybody waits for it.
NO_TOKEN = bytes(TOKEN_BYTES)
# What accompanies a descriptor: the number of bytes behind it, or -1 from a rank that could not make it.
_OFFER = struct.Struct("<q")
_HELLO = struct.Struct(f"<q{TOKEN_BYTES}s")
_CREDENTIALS = struct.Struct("3i")


_all: "weakref.WeakSet[HostPeers]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child (a worker of a DataLoader) must not keep sockets open whose rank has ended."""
    for peers in list(_all):
        peers.drop()


os.register_at_fork(after_in_child=_close_in_child)


class HostPeers:
    """This rank's sockets to the other ranks of ``communicator``, all of which are on this host. Collective.

    ``timeout`` is how many seconds a rank waits for another one that lives but does not come.
    """

    def __init__(self, communicator: Communicator, timeout: float) -> None:
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self._sockets: dict[int, socket.socket] = {}
        self.process_ids: dict[int, int] = {}
        listener, token = _listen(self.world_size)
        tokens = _exchange(communicator, token)
        if NO_TOKEN in tokens:
            raise ConfigurationError(
                f"rank {tokens.index(NO_TOKEN)} cannot make a Unix socket, so ranks of this host cannot share memory"
            )
        assert listener is not None
        try:
            for peer in range(self.rank):
                self._add(peer, self._connect(tokens[peer]))
            for _ in range(self.rank + 1, self.world_size):
                self._add(*self._accept(listener, token))
        except OSError as error:
            self.close()
            raise ConfigurationError(
                f"rank {self.rank} cannot reach the other ranks of its host over Unix sockets: {error}. Ranks that "
                "share memory must run in one network namespace"
            ) from error
        finally:
            listener.close()
        for connection in self._sockets.values():
            connection.settimeout(timeout)
        _all.add(self)

    def _connect(self, token: bytes) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(_address(token))
        connection.sendall(_HELLO.pack(self.rank, token))
        return connection

    def _accept(self, listener: socket.socket, token: bytes) -> tuple[int, socket.socket]:
        """The next rank that connects. Anybody on the host can try, and whoever does not know the token is let go."""
        while True:
            connection, _ = listener.accept()
            connection.settimeout(CONNECT_SECONDS)
            with contextlib.suppress(OSError):
                hello = _receive(connection, _HELLO.size)
                if len(hello) == _HELLO.size:
                    peer, shown = _HELLO.unpack(hello)
                    if secrets.compare_digest(shown, token):
                        return peer, connection
            connection.close()

    def _add(self, peer: int, connection: socket.socket) -> None:
        self._sockets[peer] = connection
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.process_ids[peer] = _CREDENTIALS.unpack(credentials)[0]

    def share(self, descriptor: int | None, nbytes: int) -> dict[int, int] | None:
        """Give every peer ``descriptor``, and take theirs, by rank. Collective.

        None on all ranks if any rank came with None. Whoever calls closes what it gets.
        """
        for peer in self._sockets:
            self._offer(peer, descriptor, nbytes)
        received: dict[int, int] = {}
        complete = descriptor is not None
        for peer, connection in self._sockets.items():
            try:
                message, descriptors, _, _ = socket.recv_fds(connection, _OFFER.size, 1)
            except OSError as error:
                raise self.failed(peer, f"while memory was shared ({error})") from error
            if not message:
                raise self.failed(peer, "while memory was shared")
            if descriptors:
                received[peer] = descriptors[0]
            complete = complete and _OFFER.unpack(message)[0] == nbytes
        if complete:
            return received
        for theirs in received.values():
            os.close(theirs)
        return None

    def _offer(self, peer: int, descriptor: int | None, nbytes: int) -> None:
        try:
            if descriptor is None:
                self._sockets[peer].sendall(_OFFER.pack(-1))
            else:
                socket.send_fds(self._sockets[peer], [_OFFER.pack(nbytes)], [descriptor])
        except OSError as error:
            raise self.failed(peer, f"while memory was shared ({error})") from error

    def failed(self, peer: int, where: str) -> PeerFailedError:
        return PeerFailedError(
            f"rank {peer} (process {self.process_ids[peer]}) has ended or no longer takes part; rank {self.rank} "
            f"noticed {where}. See the output of that rank for the cause, and start all ranks again"
        )

    def watch(self, ended: Callable[[int], None]) -> None:
        """Have ``ended`` called, on a thread of its own, with the number of every peer whose process ends."""
        sockets = dict(self._sockets)
        threading.Thread(target=_watch, args=(sockets, ended), name="gradsync-watch", daemon=True).start()

    def drop(self) -> None:
        """Close this process's ends and tell nobody."""
        for connection in self._sockets.values():
            connection.close()

    def close(self) -> None:
        for connection in self._sockets.values():
            # A shutdown wakes the thread that watches, here and at the other end.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _watch(sockets: dict[int, socket.socket], ended: Callable[[int], None]) -> None:
    poller = select.poll()
    peers = {}
    for peer, connection in sockets.items():
        descriptor = connection.fileno()
        if descriptor >= 0:
            # Not for data, which others read: only for the end.
            poller.register(descriptor, select.POLLRDHUP)
            peers[descriptor] = peer
    while peers:
        for descriptor, _ in poller.poll():
            poller.unregister(descriptor)
            ended(peers.pop(descriptor))


def _listen(backlog: int) -> tuple[socket.socket | None, bytes]:
    token = secrets.token_bytes(TOKEN_BYTES)
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(_address(token))
    except OSError:
        return None, NO_TOKEN
    listener.listen(backlog)
    listener.settimeout(CONNECT_SECONDS)
    return listener, token


def _address(token: bytes) -> bytes:
    return b"\0gradsync-" + token.hex().encode()


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count and (part := connection.recv(count - len(received))):
        received += part
    return received


def _exchange(communicator: Communicator, token: bytes) -> list[bytes]:
    mine = torch.frombuffer(bytearray(token), dtype=torch.uint8).to(communicator.device)
    everybodys = torch.zeros(communicator.world_size * TOKEN_BYTES, dtype=torch.uint8, device=communicator.device)
    communicator.all_gather(everybodys, mine).wait()
    flat = bytes(everybodys.cpu().tolist())
    return [flat[start : start + TOKEN_BYTES] for start in range(0, len(flat), TOKEN_BYTES)]
