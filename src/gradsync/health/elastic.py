"""Elastic training: ranks come and go. torchft decides who takes part, and the ranks regroup after each change.

Every rank reports its status to torchft's lighthouse, and all ranks that ask at the same time get the same answer. Only
the lighthouse decides. Every rank derives the rest (numbers, the leader, whose state is used) by itself, so it must
follow from the lighthouse's answer and from nothing else.

A *generation* is the ranks that take part together, with their own process group, until a rank leaves or joins. They
rendezvous at the store of the generation's rank 0, under the number of the generation. That number is always unused: it
is one more than the highest that any of them has seen.
"""

import contextlib
import dataclasses
import importlib
import os
import platform
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch.distributed as dist

from gradsync.base.errors import ConfigurationError, GradsyncError
from gradsync.base.files import from_json
from gradsync.communicator import Communicator, InProcessWorld, choose_communicator
from gradsync.health.watch import leave_watch

__all__ = [
    "LIGHTHOUSE",
    "Elastic",
    "ElasticMember",
    "Generation",
    "Lighthouse",
    "LighthouseMembership",
    "MeetingPlace",
    "MemberStatus",
    "Membership",
    "in_order",
    "meet",
    "require_torchft",
]

# A rank that has been silent for that long does not count as alive. The others wait that long after a loss.
HEARTBEAT_SECONDS = 2.0
TICK_MILLISECONDS = 50
# Read by torchft's Rust part, which by default logs every request.
LOG_LEVEL = "RUST_LOG"


def require_torchft() -> Any:
    """The module ``torchft.coordination``; ConfigurationError, which says how to install it, if it is missing."""
    os.environ.setdefault(LOG_LEVEL, "warn")
    try:
        return importlib.import_module("torchft.coordination")
    except ImportError as error:
        raise ConfigurationError(
            f"elastic ranks need torchft, which says who takes part: pip install 'gradsync[elastic]' ({error}). It "
            f"comes ready for Linux on x86_64; on {platform.machine()} pip may have to build it, with Rust. Without "
            "it, `gradsync train --max-restarts 3` starts all ranks again after a failure, from the newest checkpoint"
        ) from error


class Lighthouse:
    """A server of torchft's that decides who takes part; it runs for as long as this object is held.

    ``host`` is the address it listens on, and where other ranks find it. The others wait ``join_seconds`` for a rank
    that is alive but does not join; then they continue without it.
    """

    def __init__(self, host: str, *, min_ranks: int, join_seconds: float) -> None:
        bind = f"[{host}]:0" if ":" in host else f"{host}:0"
        self._server: Any = require_torchft().LighthouseServer(
            bind=bind,
            min_replicas=min_ranks,
            join_timeout_ms=int(1000 * join_seconds),
            quorum_tick_ms=TICK_MILLISECONDS,
            heartbeat_timeout_ms=int(1000 * HEARTBEAT_SECONDS),
        )
        # It names itself by the machine's name, which need not lead to the address it listens on.
        port = urlsplit(self._server.address()).port
        self.address = f"http://{bind.removesuffix(':0')}:{port}"

    def close(self) -> None:
        """Stop the service: no rank finds it any more."""
        self._server.shutdown()


BEAT_SECONDS = 0.2
CONNECT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class MemberStatus:
    """What a rank reports about itself.

    step
        how many windows its state has completed.
    generation
        the last one it was in, or tried to form; 0 before the first.
    since
        its first one, or 0.
    waited
        seconds since it first asked.
    meeting_place
        host and port of its store.
    launched
        its rank as the launcher counts, which orders ranks that join together.
    """

    step: int
    generation: int
    since: int
    waited: float
    meeting_place: tuple[str, int]
    launched: int
    host: str
    process: int

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> "MemberStatus":
        """Read a status from what :func:`dataclasses.asdict` and JSON have made of it."""
        try:
            return from_json(cls, dict(data))
        except ValueError as error:
            raise GradsyncError(
                f"a rank that asks to take part says {dict(data)!r}, which is not what this version of gradsync "
                f"says ({error}). Use the same version on all machines"
            ) from error


@dataclass(frozen=True, kw_only=True)
class ElasticMember:
    """A rank that takes part in a generation."""

    identity: str
    status: MemberStatus

    def __str__(self) -> str:
        return f"process {self.status.process} on {self.status.host}"


class Membership(Protocol):
    """This rank's connection to the service that decides who takes part."""

    identity: str

    def ask(self, status: MemberStatus, timeout: float) -> list[ElasticMember]:
        """Ask who takes part, this rank among them. Waits for others; those who ask together get the same answer.

        TimeoutError if there is no answer in time.
        """

    def own_address(self) -> str:
        """The address through which the others reach this machine."""

    def close(self) -> None:
        """Stop taking part."""


def in_order(members: list[ElasticMember]) -> list[ElasticMember]:
    """The members as they are numbered: those that know most first, among them those that have been there longest.

    So number 0 has what all others need, and does not change as long as it lives.
    """

    def order(member: ElasticMember) -> tuple[Any, ...]:
        status = member.status
        return -status.step, status.since == 0, status.since, status.launched, member.identity

    return sorted(members, key=order)


class LighthouseMembership:
    """Membership through torchft's lighthouse. A thread reports that this process is alive, also while it computes."""

    def __init__(self, address: str) -> None:
        self._coordination = require_torchft()
        self._url = urlsplit(address)
        if self._url.scheme != "http" or not self._url.hostname or not self._url.port:
            raise ConfigurationError(f"a lighthouse has an address as http://HOST:PORT, got {address!r}")
        # Different in every run, so that a rank that comes back is not mistaken for the one that was lost.
        self.identity = uuid.uuid4().hex
        self._asking = self._client(address)
        self._beating = self._client(address)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def _client(self, address: str) -> Any:
        try:
            return self._coordination.LighthouseClient(address, timedelta(seconds=CONNECT_SECONDS))
        except Exception as error:
            raise ConfigurationError(f"there is no lighthouse at {address}: {error}") from error

    def ask(self, status: MemberStatus, timeout: float) -> list[ElasticMember]:
        if self._thread is None:
            # Not before: the lighthouse lets the others wait for every live rank, and this rank may have to get ready.
            self._thread = threading.Thread(target=self._beat, name="gradsync lighthouse", daemon=True)
            self._thread.start()
        try:
            quorum = self._asking.quorum(
                self.identity,
                timedelta(seconds=timeout),
                step=status.step,
                world_size=1,
                data=dataclasses.asdict(status),
            )
        except TimeoutError:
            raise
        except Exception as error:
            raise TimeoutError(f"the lighthouse at {self._url.netloc} gave no answer: {error}") from error
        return [
            ElasticMember(identity=each.replica_id, status=MemberStatus.read(each.data or {}))
            for each in quorum.participants
        ]

    def own_address(self) -> str:
        # Nothing is sent: this asks which way a packet to the lighthouse would take.
        host, port = str(self._url.hostname), int(self._url.port or 0)
        family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])

    def close(self) -> None:
        self._closed.set()

    def _beat(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            # A lighthouse that is away may come back; who asks it learns that it has not.
            with contextlib.suppress(Exception):
                self._beating.heartbeat(self.identity, timedelta(seconds=1))
            self._closed.wait(max(0.0, BEAT_SECONDS - (time.monotonic() - began)))


# By this name torchft's own programs find their lighthouse, too.
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Settings for ``Accelerator(elastic=…)``: ranks may be lost, and new ones may join.

    ranks
        how many ranks there should be at the beginning; by default the number that the launcher started.
    min_ranks
        the fewest ranks that train; fewer wait for new ones.
    timeout
        seconds. A rank that does not join a collective for that long is dropped; it may come back as a new rank.
    look_every
        seconds between two checks for new ranks.
    patience
        seconds that the first ranks wait for all ``ranks`` before they begin without the rest.
    lighthouse
        the address of torchft's lighthouse, ``http://host:port``; by default the value of ``TORCHFT_LIGHTHOUSE``.
    """

    ranks: int | None = None
    min_ranks: int = 1
    timeout: float = 10.0
    look_every: float = 2.0
    patience: float = 60.0
    lighthouse: str | None = None
    # How to ask who takes part, where that is not torchft's lighthouse.
    join: "Callable[[Elastic], Membership]" = field(default=lambda settings: settings.join_lighthouse(), repr=False)

    def __post_init__(self) -> None:
        for name in ("min_ranks", "ranks"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"elastic: {name} must be a whole number of at least 1, got {value!r}")
        if self.ranks is not None and self.min_ranks > self.ranks:
            raise ConfigurationError(
                f"elastic: min_ranks is {self.min_ranks}, but there are to be only {self.ranks} ranks at the beginning"
            )
        for name in ("timeout", "look_every", "patience"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"elastic: {name} must be more than 0 seconds, got {getattr(self, name)!r}")

    def join_lighthouse(self) -> Membership:
        """Join through the lighthouse that these settings, or the environment, name."""
        address = self.lighthouse or os.environ.get(LIGHTHOUSE)
        if not address:
            raise ConfigurationError(
                f"elastic ranks ask a lighthouse of torchft who takes part, and {LIGHTHOUSE} does not say where it is. "
                "Start the ranks with `gradsync train --elastic`, or start one (`torchft_lighthouse --min_replicas 1`) "
                f"and set {LIGHTHOUSE}=http://HOST:PORT for all of them"
            )
        return LighthouseMembership(address)


# Given the store of the ranks that meet, and how many they are.
Backend = Callable[[Any, int], str]


class MeetingPlace:
    """This rank's store, for generations in which it is number 0. Machines that reach ``host`` can connect to it."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            host, self.address[1], is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The ranks that take part, and this rank's place among them. ``store`` is theirs; a rank alone needs none."""

    number: int
    members: tuple[ElasticMember, ...]
    communicator: Communicator
    store: Any = None

    @property
    def identities(self) -> frozenset[str]:
        return frozenset(member.identity for member in self.members)

    @property
    def newest_step(self) -> int:
        """How many windows the state of number 0 has completed."""
        return self.members[0].status.step

    @property
    def lagging(self) -> list[int]:
        """The numbers of the members whose states have completed fewer windows."""
        return [
            number for number, member in enumerate(self.members) if member.status.step < self.members[0].status.step
        ]

    def leave(self) -> None:
        """Close the process group here, whatever its state. The others notice if they wait for this rank."""
        group = self.communicator.group
        if group is not None:
            leave_watch(group, f"has left generation {self.number}")
            if dist.is_initialized():
                dist.destroy_process_group()


def meet(
    members: Sequence[ElasticMember], identity: str, place: MeetingPlace, *, timeout: float, backend: Backend
) -> Generation:
    """Make the process group of ``members``. Collective among them; ``backend`` chooses it, given their store.

    A member that has died meanwhile is noticed after ``timeout`` seconds at the latest, by an error of torch's.
    """
    ordered = in_order(list(members))
    rank = [member.identity for member in ordered].index(identity)
    number = 1 + max(member.status.generation for member in ordered)
    if len(ordered) == 1:
        return Generation(number=number, members=tuple(ordered), communicator=InProcessWorld(1).communicator(0))
    limit = timedelta(seconds=timeout)
    store = place.store if rank == 0 else _store_of(ordered[0], limit)
    store = dist.PrefixStore(f"gradsync/generation/{number}", store)  # type: ignore[attr-defined]
    store.set_timeout(limit)
    dist.init_process_group(
        backend(store, len(ordered)), store=store, rank=rank, world_size=len(ordered), timeout=limit
    )
    return Generation(number=number, members=tuple(ordered), communicator=choose_communicator(), store=store)


def _store_of(member: ElasticMember, limit: timedelta) -> Any:
    host, port = member.status.meeting_place
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
