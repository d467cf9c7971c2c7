"""Unix sockets between the ranks of one host: they carry memory descriptors, and they close when a process exits.

Every pair of ranks has a Unix socket. It has no name in the file system, so nothing remains of it; the kernel closes it
when a process exits, however that happens, and the other end learns of it at once.

[Note: strangers] During the rendezvous, any process on the host can connect: the name of a socket is public. A rank
proves itself with three things: the user it runs as, which the kernel vouches for; a secret that only the ranks have,
exchanged over their group; and a rank number that is still missing. A peer that lacks any of them is dropped at once.
"""

import contextlib
import errno
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from gradsync.base.errors import WireLostError
from gradsync.communicator.agreement import gather_bytes, make_together
from gradsync.communicator.base import Communicator
from gradsync.communicator.handshake import HELLO, SECRET_BYTES, Credentials, HandshakeServer
from gradsync.communicator.logs import listed, rank_name

__all__ = ["HostPeers"]

NAME_BYTES = 16
# How long a rank waits for a place in another one's queue, and for those who have said who they are to be heard.
PATIENCE_SECONDS = 5.0
RETRY_SECONDS = 1e-3
# What a rank could not do if a step fails.
_REACH = "reach the other ranks of its host over Unix sockets"
_YES, _NO = b"y", b"n"
# What accompanies a descriptor: the number of bytes behind it, or -1 from a rank that could not make it.
_OFFER = struct.Struct("<q")


class Invitation(NamedTuple):
    """What a rank sends to the other ranks only: the name of its socket, and the secret to present there."""

    name: bytes
    secret: bytes

    @property
    def address(self) -> bytes:
        return b"\0gradsync-" + self.name.hex().encode()

    @classmethod
    def read(cls, told: bytes) -> "Invitation":
        return cls(told[:NAME_BYTES], told[NAME_BYTES:])


_all: "weakref.WeakSet[HostPeers]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child (a worker of a DataLoader) must not keep sockets open whose rank has ended."""
    for peers in list(_all):
        peers.drop()


os.register_at_fork(after_in_child=_close_in_child)


class HostPeers:
    """This rank's sockets to the other ranks of ``communicator``, all of which must be on this host. Creation is
    collective.

    ``timeout``: how many seconds a rank waits for one that is alive but does not connect. If the sockets cannot be
    created on some rank, all ranks raise ConfigurationError.
    """

    def __init__(self, communicator: Communicator, timeout: float) -> None:
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self._group = communicator.group
        self._sockets: dict[int, socket.socket] = {}
        self.process_ids: dict[int, int] = {}
        try:
            self._meet(communicator)
        except BaseException:
            self.close()
            raise
        self.set_timeout(timeout)
        _all.add(self)

    def set_timeout(self, seconds: float) -> None:
        for connection in self._sockets.values():
            connection.settimeout(seconds)

    def _meet(self, communicator: Communicator) -> None:
        """In steps, none of which waits for a peer: ranks agree on the outcome of one before they begin the next.

        So a rank that cannot continue, because it has no descriptor left or a different namespace, leaves nobody
        waiting.
        """
        with contextlib.ExitStack() as opened:
            door, mine = make_together(communicator, "make a Unix socket", lambda: self._open_door(opened))
            told = [Invitation.read(each) for each in gather_bytes(communicator, mine.name + mine.secret)]
            make_together(communicator, _REACH, lambda: self._connect(told[: self.rank]))
            make_together(communicator, _REACH, lambda: self._accept(door))

    def _open_door(self, opened: contextlib.ExitStack) -> tuple[HandshakeServer, Invitation]:
        listener, invitation = _listen(opened)
        missing = set(range(self.rank + 1, self.world_size))
        return opened.enter_context(HandshakeServer(listener, invitation.secret, missing)), invitation

    def _connect(self, invitations: list[Invitation]) -> None:
        """To all ranks before this one, who need not take it for that."""
        for peer, invitation in enumerate(invitations):
            connection = self._sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)
            _connect(connection, invitation.address)
            caller = Credentials.of(connection)
            if caller.is_unauthenticated:
                raise PermissionError(f"{self.name(peer)} runs as user {caller.user}, and this one as {os.geteuid()}")
            connection.sendall(HELLO.pack(self.rank, invitation.secret))
            self.process_ids[peer] = caller.process

    def _accept(self, door: HandshakeServer) -> None:
        """Accept all ranks after this one, which have connected and authenticated by now. See [Note: strangers]."""
        if not door.wait(PATIENCE_SECONDS) or door.missing:
            names = listed([self.name(peer) for peer in sorted(door.missing)])
            raise ConnectionError(f"{names} did not come, or not as the user of this one")
        for peer, (connection, caller) in door.take_peers().items():
            self._sockets[peer] = connection
            self.process_ids[peer] = caller.process

    def share(self, descriptor: int | None, nbytes: int) -> dict[int, int] | None:
        """Send ``descriptor`` to every peer, and return theirs, by rank. Collective.

        None if some rank came with None. OSError if this one has no room for theirs, which the others learn when all
        :meth:`agree`. Whoever calls closes what it gets.
        """
        for peer in self._sockets:
            self._offer(peer, descriptor, nbytes)
        received: dict[int, int] = {}
        complete, has_room = descriptor is not None, True
        for peer, connection in self._sockets.items():
            try:
                message, descriptors, _, _ = socket.recv_fds(connection, _OFFER.size, 1)
            except OSError as error:
                raise self.failed(peer, f"while memory was shared ({error})") from error
            if not message:
                raise self.failed(peer, "while memory was shared")
            offered = _OFFER.unpack(message)[0]
            if descriptors:
                received[peer] = descriptors[0]
            elif offered >= 0:
                # A process that may not have another descriptor gets the message without it.
                has_room = False
            complete = complete and offered == nbytes
        if complete and has_room:
            return received
        for theirs in received.values():
            os.close(theirs)
        if not has_room:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return None

    def agree(self, went_well: bool) -> bool:
        """Whether it went well on all ranks. Collective."""
        answers = [went_well]
        for peer, connection in self._sockets.items():
            try:
                connection.sendall(_YES if went_well else _NO)
            except OSError as error:
                raise self.failed(peer, f"while memory was shared ({error})") from error
        for peer, connection in self._sockets.items():
            try:
                answer = connection.recv(1)
            except OSError as error:
                raise self.failed(peer, f"while memory was shared ({error})") from error
            if not answer:
                raise self.failed(peer, "while memory was shared")
            answers.append(answer == _YES)
        return all(answers)

    def _offer(self, peer: int, descriptor: int | None, nbytes: int) -> None:
        try:
            if descriptor is None:
                self._sockets[peer].sendall(_OFFER.pack(-1))
            else:
                socket.send_fds(self._sockets[peer], [_OFFER.pack(nbytes)], [descriptor])
        except OSError as error:
            raise self.failed(peer, f"while memory was shared ({error})") from error

    def name(self, rank: int) -> str:
        return rank_name(self._group, rank)

    def failed(self, peer: int, where: str, reason: str = "") -> WireLostError:
        """``reason`` is what the peer has left, if it had the time."""
        who, noticed = (
            f"{self.name(peer)} (process {self.process_ids[peer]})",
            f"{self.name(self.rank)} noticed {where}",
        )
        if reason:
            return WireLostError(f"{who} has given up; {noticed}. It said: {reason}")
        return WireLostError(
            f"{who} has ended or no longer takes part; {noticed}. See the output of that rank for the cause, and start "
            "all ranks again"
        )

    def watch(self, ended: Callable[[int], None]) -> None:
        """Call ``ended``, on a separate thread, with the number of every peer whose process exits."""
        sockets = dict(self._sockets)
        threading.Thread(target=_watch, args=(sockets, ended), name="gradsync-watch", daemon=True).start()

    def drop(self) -> None:
        """Close this process's ends without notifying anybody."""
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


def _listen(opened: contextlib.ExitStack) -> tuple[socket.socket, Invitation]:
    listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    invitation = Invitation(secrets.token_bytes(NAME_BYTES), secrets.token_bytes(SECRET_BYTES))
    listener.bind(invitation.address)
    # As many as there may be: anybody can wait in it.
    listener.listen(socket.SOMAXCONN)
    listener.setblocking(False)
    return listener, invitation


def _connect(connection: socket.socket, address: bytes) -> None:
    """Strangers may fill the queue there for a moment, until they are let go."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            connection.connect(address)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)
