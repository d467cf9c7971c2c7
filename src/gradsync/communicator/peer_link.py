"""Messages between two ranks of a Gloo group, with errors that name the rank when a message does not arrive.

A collective of ours is an :class:`Exchange`: receives and sends with separate tags, so that several collectives, also
of several communicators over one group, never mix. Tags are taken when a collective is *started*, which every rank does
in the same order, and not when it runs. The collectives of a stage are started when the stage runs, so the stage takes
tags for all of them when it is chained.

[Note: lost sends] A send waits until its receiver says that it is ready. If that message is the last one that arrived
before the connection was reset, Gloo takes the send off its list, fails to write it, and reports the error to all
operations on its lists; this one is no longer on any. Waiting for it then takes until the timeout of the group,
whatever is closed or times out meanwhile. Python cannot end another thread's wait in C++. torch could
(``SendWork::abort``), but does not expose that to Python, so it is called through its symbol in torch's library. Only
objects that are ``SendWork`` beyond doubt are touched: their first word points to that class's vtable. If any of this
is not found, the wait ends at the timeout.
"""

import ctypes
import functools
import re
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gradsync.base.errors import CommunicatorLostError, ConfigurationError
from gradsync.communicator.background import GivenUpError, Numbering
from gradsync.communicator.collective import Collective
from gradsync.communicator.logs import join_names, rank_name
from gradsync.communicator.process_group import is_timeout
from gradsync.communicator.transport_state import find_root_cause

__all__ = ["Exchange", "Message", "PeerLink", "end_wait"]

LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib")
ABORT = "_ZN4c10d16ProcessGroupGloo8SendWork5abortEv"
METHODS = "_ZTVN4c10d16ProcessGroupGloo8SendWorkE"
# A table begins with an offset and the class's name, in front of the methods.
BEFORE_METHODS = 2 * ctypes.sizeof(ctypes.c_void_p)


def end_wait(work: Any) -> bool:
    """Make ``work.wait()`` of a send return False, now or when it is called. Returns False if that cannot be done."""
    known = _methods()
    if known is None or work is None:
        return False
    methods, abort = known
    # Behind what every object has, one of pybind11's has the address of what it stands for.
    address = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
    if not address or ctypes.c_void_p.from_address(address).value != methods:
        return False
    abort(address)
    return True


@functools.cache
def _methods() -> tuple[int, Callable[[int], None]] | None:
    for path in (Path(torch.__file__).parent / "lib" / name for name in LIBRARIES):
        try:
            library = ctypes.CDLL(str(path))
            table = ctypes.addressof(ctypes.c_char.in_dll(library, METHODS))
            abort = library[ABORT]
        except (OSError, ValueError, AttributeError):
            continue
        abort.argtypes, abort.restype = [ctypes.c_void_p], None
        return table + BEFORE_METHODS, abort
    return None


# A user's own dist.send and dist.recv on the group count from 0.
FIRST_TAG = 1 << 30
TAGS = 1 << 30
# Of every stage.
STAGE_TAGS = 1 << 16
# How long a rank that may be gone as well is given to show it, once another one is known to be gone.
SECOND_LOOK = timedelta(milliseconds=20)

# Gloo's message when its connections were closed on this side.
CLOSED = "caused pair closure"

CPU = torch.device("cpu")


class _Tags:
    """The tags of one group. They wrap around after a billion messages, long after the first were used."""

    def __init__(self) -> None:
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, count: int) -> int:
        with self._lock:
            first, self._taken = self._taken, self._taken + count
        return first


class TaggedNumbering(Numbering):
    """Counts the collectives of a stage and holds the tags that they share."""

    __slots__ = ("_first", "_taken")

    def __init__(self, name: str, first: int) -> None:
        super().__init__(name)
        self._first, self._taken = first, 0

    def take(self, count: int) -> int:
        self._taken += count
        if self._taken > STAGE_TAGS:
            raise ConfigurationError(
                f"stage {self.name} has more than {STAGE_TAGS} messages with a peer. Raise part_bytes, or start its "
                "collectives outside of a stage"
            )
        return self._first + self._taken - count


_tags: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Tags]" = weakref.WeakKeyDictionary()


class PeerLink:
    """One rank's end of a Gloo group, for messages to its peers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: Any = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        # Each rank begins with the one after it: not all of them send to rank 0 first.
        self.peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        # The backend itself: torch.distributed's checks and the dispatcher cost as much as a small message.
        self.backend = _gloo_of(group)
        self._tags = _tags.setdefault(group, _Tags())
        # What somebody waits for whose receives have all come.
        self.finishing: Exchange | None = None

    def give_up(self) -> None:
        """Stop waiting for sends: called by another thread when all else is closed. See [Note: lost sends]."""
        exchange = self.finishing
        if exchange is not None:
            exchange.give_up()

    def exchange(self, collective: Collective, messages: int, place: Numbering) -> "Exchange":
        """The messages of ``collective``, at most that many each way with every peer."""
        tags = place if isinstance(place, TaggedNumbering) else self._tags
        return Exchange(self, collective, tags.take(messages))

    def place(self, number: int | str) -> TaggedNumbering:
        """A numbering for the collectives of stage ``number``."""
        return TaggedNumbering(str(number), self._tags.take(STAGE_TAGS))

    def name(self, peer: int) -> str:
        return rank_name(self.group, peer)


class Message:
    """A send or a receive in flight."""

    __slots__ = ("exchange", "peer", "work")

    def __init__(self, exchange: "Exchange", peer: int, work: Any) -> None:
        self.exchange, self.peer, self.work = exchange, peer, work

    def wait(self) -> None:
        # Messages of nothing are not sent, and then there is no work.
        work = self.work
        if work is None:
            return
        try:
            has_ended = work.wait()
        except RuntimeError as error:
            self.work = None
            self.exchange.fail(self.peer, error)
        self.work = None
        if not has_ended:
            raise GivenUpError

    def is_cut_off(self) -> bool:
        """Whether the peer is known to be gone. Asked only when the collective has failed: it ends the message."""
        work, self.work = self.work, None
        if work is None:
            return False
        try:
            work.wait(SECOND_LOOK)
        except RuntimeError as error:
            # One that does not answer in time has Gloo close all of them, here.
            return not is_timeout(error) and CLOSED not in str(error)
        return False


class Exchange:
    """The messages of one collective. ``number`` distinguishes messages with one peer; both sides use the same."""

    def __init__(self, link: PeerLink, collective: Collective, first_tag: int) -> None:
        self.link = link
        self._collective = collective
        self._first_tag = first_tag
        self._sends: list[Message] = []
        self._receives: list[Message] = []

    def receive(self, peer: int, into: torch.Tensor, number: int) -> Message:
        """Receive into ``into``, which nobody may use until the message was waited for."""
        message = self._begin(self.link.backend.recv, peer, into, number)
        self._receives.append(message)
        return message

    def send(self, peer: int, tensor: torch.Tensor, number: int) -> None:
        """Send ``tensor``, which must keep its values until :meth:`finish_sends` or until the peer has answered."""
        self._sends.append(self._begin(self.link.backend.send, peer, tensor, number))

    def finish_sends(self) -> None:
        self.link.finishing = self
        try:
            while self._sends:
                self._sends[-1].wait()
                self._sends.pop()
        finally:
            self.link.finishing = None

    def give_up(self) -> None:
        for message in tuple(self._sends):
            end_wait(message.work)

    def finish(self) -> None:
        """Wait for every message that has not been waited for."""
        for message in self._receives:
            message.wait()
        self.finish_sends()

    def fail(self, peer: int, error: RuntimeError) -> NoReturn:
        """Name ``peer``, a message with whom failed."""
        # What torch refuses is our own fault, and no message of Gloo's.
        if "gloo" not in str(error) and CLOSED not in str(error):
            raise error
        raise CommunicatorLostError(find_root_cause(self.link.group, self._message(peer, error))) from error

    def _begin(self, begin: Any, peer: int, tensor: torch.Tensor, number: int) -> Message:
        if tensor.numel() == 0:
            return Message(self, peer, None)
        try:
            work = begin([tensor], peer, FIRST_TAG + (self._first_tag + number) % TAGS)
        except RuntimeError as error:
            self.fail(peer, error)
        return Message(self, peer, work)

    def _message(self, peer: int, error: RuntimeError) -> str:
        name, what = self.link.name, self._collective.describe()
        reason = re.sub(r"^\[[^]]*\]\s*", "", str(error).partition("\n")[0])
        if is_timeout(error):
            return (
                f"{name(peer)} did not answer {name(self.link.rank)} in {what} ({reason}). It hangs, is slower than "
                "the group's timeout allows, or its link is cut. Look at that rank, or give the group a longer timeout"
            )
        # Who failed first makes others fail, whose end may be the one that is seen first.
        gone = {message.peer for message in (*self._receives, *self._sends) if message.is_cut_off()} - {peer}
        names = join_names([name(other) for other in sorted({peer} | gone)])
        return f"{names} left {name(self.link.rank)} alone in {what} ({reason}). The cause is in what {names} wrote"


def _gloo_of(group: Any) -> Any:
    try:
        backend = group._get_backend(CPU)
    except RuntimeError:
        backend = None
    if backend is None or backend.name() != "gloo":
        found = "none" if backend is None else backend.name()
        raise ConfigurationError(
            f"a group with Gloo for CPU tensors is expected, but its backend for them is {found}. Make one with "
            'torch.distributed.new_group(backend="gloo"), or use ProcessGroupCommunicator'
        )
    return backend
