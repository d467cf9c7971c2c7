"""Memory shared by all ranks of a host, and the sockets over which they share it.

Every pair of ranks has a Unix socket. It has no name in the file system, so nothing remains of it; the kernel closes it
when a process exits, however that happens, and the other end learns of it at once.

Each rank creates a segment of memory, and maps the segments of all others. The memory has no name (``memfd_create``):
descriptors travel over the sockets and are closed once mapped. So nothing needs unlinking, nothing remains after any
crash, and the size of ``/dev/shm``, which containers keep small, does not matter. The kernel frees the memory with the
last process that maps it.
"""

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gradsync.base.errors import CommunicatorLostError
from gradsync.communicator.agreement import gather_bytes, make_together
from gradsync.communicator.base import Communicator
from gradsync.communicator.logs import rank_name
from gradsync.communicator.rendezvous import Credentials, Invitation, Rendezvous, enter

__all__ = ["Heap", "HostPeers", "Location", "Segment"]

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
        """Connect to the other ranks step by step: ranks agree on the outcome of a step before they begin the next.

        So a rank that cannot continue, because it has no descriptor left or a different namespace, leaves nobody
        waiting. See [Note: authentication] in rendezvous.py.
        """
        later = set(range(self.rank + 1, self.world_size))
        with contextlib.ExitStack() as opened:
            rendezvous = make_together(
                communicator, "make a Unix socket", lambda: opened.enter_context(contextlib.closing(Rendezvous(later)))
            )
            invitations = [Invitation.read(each) for each in gather_bytes(communicator, rendezvous.invitation.pack())]
            make_together(communicator, _REACH, lambda: self._connect(invitations[: self.rank]))
            make_together(communicator, _REACH, lambda: self._sockets.update(rendezvous.take()))
        self.process_ids = {peer: Credentials.of(each).process for peer, each in self._sockets.items()}

    def _connect(self, invitations: list[Invitation]) -> None:
        """Connect to all ranks before this one."""
        for peer, invitation in enumerate(invitations):
            self._sockets[peer] = enter(invitation, self.rank, self.name(peer), is_here=True)

    def share(self, descriptor: int | None, nbytes: int) -> dict[int, int] | None:
        """Send ``descriptor`` to every peer, and return theirs, by rank. Collective.

        None if some rank came with None. OSError if this one has no room for theirs, which the others learn when all
        :meth:`agree`. The caller must close them.
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

    def failed(self, peer: int, where: str, reason: str = "") -> CommunicatorLostError:
        """The error for a peer that has failed. ``reason`` is what the peer has left, if it had the time."""
        who = f"{self.name(peer)} (process {self.process_ids[peer]})"
        noticed = f"{self.name(self.rank)} noticed {where}"
        if reason:
            return CommunicatorLostError(f"{who} has given up; {noticed}. It said: {reason}")
        return CommunicatorLostError(
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


# Small tensors share a segment: a mapping for each would cost a descriptor exchange and a page.
SLAB_BYTES = 1024 * 1024
ALIGNMENT = 64

_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FAILED = ctypes.c_void_p(-1).value
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Segment:
    """One block of memory per rank, all of the same size."""

    def __init__(self, number: int, maps: Sequence[Any], rank: int) -> None:
        self.number = number
        self.pieces = [torch.frombuffer(memory, dtype=torch.uint8) for memory in maps]
        self.own = maps[rank]
        self.used = 0
        self.leases = 0
        # What the communicator has made of a place here, so that it need not do so every time.
        self.known: dict[tuple[int, int, torch.dtype], list[tuple[torch.Tensor, ...]]] = {}

    @property
    def nbytes(self) -> int:
        return self.pieces[0].numel()


# Where a tensor lies: the segment, and the bytes before it there.
Location = tuple[Segment, int]


class Heap:
    """The shared memory of one communicator. Every rank allocates the same sizes in the same order."""

    def __init__(self, peers: HostPeers) -> None:
        self._peers = peers
        self._made = 0
        self._segments: dict[int, Segment] = {}
        # Where the rank's own pieces begin, sorted, and whose they are.
        self._index: tuple[list[int], list[Segment]] = ([], [])
        # Tensors end on any thread, and in the middle of anything.
        self._lock = threading.RLock()
        self._slab: Segment | None = None
        # None is left, on some rank. Why, on that one.
        self._full = False
        self.shortage = ""

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Zeros that all ranks of the host see, as bytes. Collective.

        None on all ranks when one of them has no memory left, or no room for that of the others: there ``shortage``
        says why.
        """
        rounded = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        segment = self._make(rounded) if rounded > SLAB_BYTES // 4 else self._roomy_slab(rounded)
        if segment is None:
            return None
        offset, segment.used = segment.used, segment.used + rounded
        return self._lease(segment, offset, nbytes)

    def _roomy_slab(self, nbytes: int) -> Segment | None:
        """The slab, or a new one if that is full.

        Only what was allocated counts, never what was let go of: when a tensor goes is each rank's own affair, and
        ranks that came to different conclusions would wait for each other for ever.
        """
        slab = self._slab
        if slab is None or slab.used + nbytes > slab.nbytes:
            self._slab = self._make(SLAB_BYTES)
            with self._lock:
                if slab is not None and slab.leases == 0:
                    self._forget(slab)
        return self._slab

    def _lease(self, segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
        """A tensor over a part of this rank's piece. With the last of them the segment goes."""
        lease = _array(max(nbytes, 1)).from_buffer(segment.own, offset)
        with self._lock:
            segment.leases += 1
        weakref.finalize(lease, Heap._end_lease, weakref.ref(self), segment.number).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8, count=nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def _end_lease(heap_reference: "weakref.ref[Heap]", number: int) -> None:
        heap = heap_reference()
        if heap is None:
            return
        with heap._lock:
            segment = heap._segments.get(number)
            if segment is None:
                return
            segment.leases -= 1
            if segment.leases == 0 and segment is not heap._slab:
                heap._forget(segment)

    def _forget(self, segment: Segment) -> None:
        self._segments.pop(segment.number, None)
        self._list_segments()
        segment.known.clear()

    def _list_segments(self) -> None:
        own = self._peers.rank
        ordered = sorted(self._segments.values(), key=lambda segment: segment.pieces[own].data_ptr())
        self._index = ([segment.pieces[own].data_ptr() for segment in ordered], ordered)

    def _make(self, nbytes: int) -> Segment | None:
        maps = None if self._full else self._map_everybodys(nbytes)
        if maps is None:
            self._full = True
            return None
        self._made += 1
        segment = Segment(self._made, maps, self._peers.rank)
        with self._lock:
            self._segments[segment.number] = segment
            self._list_segments()
        return segment

    def _map_everybodys(self, nbytes: int) -> list[Any] | None:
        """Map the memory of all ranks. None on all if one cannot: each does its part of every exchange anyway."""
        with contextlib.ExitStack() as opened:
            descriptor: int | None = None
            maps: list[Any] = []
            try:
                descriptor = _make_memory(nbytes, opened)
            except OSError as error:
                self._note_shortage(nbytes, error)
            try:
                theirs = self._peers.share(descriptor, nbytes)
                if theirs is not None and descriptor is not None:
                    for each in theirs.values():
                        opened.callback(os.close, each)
                    descriptors = theirs | {self._peers.rank: descriptor}
                    maps += [_map(descriptors[rank], nbytes) for rank in range(self._peers.world_size)]
            except (OSError, MemoryError) as error:
                self._note_shortage(nbytes, error)
            return maps if self._peers.agree(bool(maps)) else None

    def _note_shortage(self, nbytes: int, error: OSError | MemoryError) -> None:
        why = getattr(error, "strerror", None) or type(error).__name__
        self.shortage = f"cannot share {nbytes} bytes of memory with the other ranks of its host ({why})"

    def find(self, tensor: torch.Tensor) -> Location | None:
        """The place of ``tensor`` in this memory, or None if it is elsewhere."""
        address = tensor.data_ptr()
        starts, segments = self._index
        number = bisect.bisect_right(starts, address) - 1
        if number < 0:
            return None
        start, segment = starts[number], segments[number]
        return (segment, address - start) if address + tensor.nbytes <= start + segment.nbytes else None

    def segment(self, number: int) -> Segment:
        return self._segments[number]


def _make_memory(nbytes: int, opened: contextlib.ExitStack) -> int:
    descriptor = os.memfd_create("gradsync", os.MFD_CLOEXEC)
    opened.callback(os.close, descriptor)
    # Now, and not by a bus error when it is written.
    os.posix_fallocate(descriptor, 0, nbytes)
    return descriptor


def _array(nbytes: int) -> Any:
    """A type of ctypes array. Of its own, because instances of ctypes' own array types cannot be watched."""
    return type("Bytes", (ctypes.Array,), {"_type_": ctypes.c_char, "_length_": nbytes})


def _map(descriptor: int, nbytes: int) -> Any:
    """The memory behind ``descriptor``, as a ctypes array. Python's own ``mmap`` would keep a descriptor open."""
    address = _LIBC.mmap(None, nbytes, _READ_AND_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = _array(nbytes).from_address(address)
    # Not at exit: threads may still be at work on it, and the kernel does the rest.
    weakref.finalize(memory, _LIBC.munmap, address, nbytes).atexit = False
    return memory
