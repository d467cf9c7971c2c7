"""Unix sockets between the ranks of one host: they carry memory descriptors, and they close when a process exits.

Every pair of ranks has a Unix socket. It has no name in the file system, so nothing remains of it; the kernel closes it
when a process exits, however that happens, and the other end learns of it at once.
"""

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator

from gradsync.base.errors import WireLostError
from gradsync.communicator.agreement import gather_bytes, make_together
from gradsync.communicator.base import Communicator
from gradsync.communicator.logs import rank_name
from gradsync.communicator.rendezvous import Credentials, Invitation, Rendezvous, enter

__all__ = ["HostPeers"]

# What a rank could not do if a step fails.
_REACH = "reach the other ranks of its host over Unix sockets"
_YES, _NO = b"y", b"n"
# What accompanies a descriptor: the number of bytes behind it, or -1 from a rank that could not make it.
_OFFER = struct.Struct("<q")


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
        """In steps: ranks agree on the outcome of one before they begin the next.

        So a rank that cannot continue, because it has no descriptor left or a different namespace, leaves nobody
        waiting. See [Note: strangers] in rendezvous.py.
        """
        later = set(range(self.rank + 1, self.world_size))
        with contextlib.ExitStack() as opened:
            rendezvous = make_together(
                communicator,
                "make a Unix socket",
                lambda: opened.enter_context(contextlib.closing(Rendezvous(later))),
            )
            told = [Invitation.read(each) for each in gather_bytes(communicator, rendezvous.invitation.pack())]
            make_together(communicator, _REACH, lambda: self._connect(told[: self.rank]))
            self._sockets |= make_together(communicator, _REACH, rendezvous.take)
        self.process_ids = {peer: Credentials.of(each).process for peer, each in self._sockets.items()}

    def _connect(self, invitations: list[Invitation]) -> None:
        """To all ranks before this one."""
        for peer, invitation in enumerate(invitations):
            self._sockets[peer] = enter(invitation, self.rank, self.name(peer), is_here=True)

    def share(self, descriptor: int | None, nbytes: int) -> dict[int, int] | None:
        """Send ``descriptor`` to every peer, and return theirs, by rank. Collective.

        None if some rank came with None. OSError if this one has no room for theirs, which the others learn when all
        :meth:`agree`. Whoever calls closes what it gets.
        """
        for peer, connection in self._sockets.items():
            with self._naming(peer):
                if descriptor is None:
                    connection.sendall(_OFFER.pack(-1))
                else:
                    socket.send_fds(connection, [_OFFER.pack(nbytes)], [descriptor])
        received: dict[int, int] = {}
        complete, has_room = descriptor is not None, True
        for peer, connection in self._sockets.items():
            with self._naming(peer):
                message, descriptors, _, _ = socket.recv_fds(connection, _OFFER.size, 1)
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
            with self._naming(peer):
                connection.sendall(_YES if went_well else _NO)
        for peer, connection in self._sockets.items():
            with self._naming(peer):
                answer = connection.recv(1)
            if not answer:
                raise self.failed(peer, "while memory was shared")
            answers.append(answer == _YES)
        return all(answers)

    @contextlib.contextmanager
    def _naming(self, peer: int) -> Iterator[None]:
        """An error of the socket names ``peer``."""
        try:
            yield
        except OSError as error:
            raise self.failed(peer, f"while memory was shared ({error})") from error

    def name(self, rank: int) -> str:
        return rank_name(self._group, rank)

    def failed(self, peer: int, where: str, reason: str = "") -> WireLostError:
        """``reason`` is what the peer has left, if it had the time."""
        who = f"{self.name(peer)} (process {self.process_ids[peer]})"
        noticed = f"{self.name(self.rank)} noticed {where}"
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
