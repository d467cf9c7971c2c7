"""Membership: every rank reports its status, and all ranks that ask at the same time get the same answer.

Only the lighthouse decides. Every rank derives the rest (numbers, the leader, whose state is used) by itself, so it
must follow from the lighthouse's answer and from nothing else.
"""

import contextlib
import dataclasses
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

from gradsync.base.errors import ConfigurationError, GradsyncError
from gradsync.base.json_data import from_json
from gradsync.health.elastic.lighthouse import require_torchft

__all__ = ["LighthouseMembership", "Member", "MemberStatus", "Membership", "in_order"]

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
    def read(cls, told: Mapping[str, Any]) -> "MemberStatus":
        """What :func:`dataclasses.asdict` and JSON have made of one."""
        try:
            return from_json(cls, dict(told))
        except ValueError as error:
            raise GradsyncError(
                f"a rank that asks to take part says {dict(told)!r}, which is not what this version of gradsync "
                f"says ({error}). Use the same version on all machines"
            ) from error


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank that takes part."""

    identity: str
    standing: MemberStatus

    def __str__(self) -> str:
        return f"process {self.standing.process} on {self.standing.host}"


class Membership(Protocol):
    """This rank's connection to the service that decides who takes part."""

    identity: str

    def ask(self, standing: MemberStatus, timeout: float) -> list[Member]:
        """All who take part, this rank among them; those who ask together get the same. Waits for others.

        TimeoutError if there is no answer in time.
        """

    def own_address(self) -> str:
        """The address through which the others reach this machine."""

    def close(self) -> None:
        """Stop taking part."""


def in_order(members: list[Member]) -> list[Member]:
    """As they are numbered: those that know most first, among them those that have been there longest.

    So number 0 has what all others need, and does not change as long as it lives.
    """
    return sorted(members, key=lambda each: (-each.standing.step, *_seniority(each.standing), each.identity))


def _seniority(standing: MemberStatus) -> tuple[bool, int, int]:
    return (standing.since == 0, standing.since, standing.launched)


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

    def ask(self, standing: MemberStatus, timeout: float) -> list[Member]:
        if self._thread is None:
            # Not before: the lighthouse lets the others wait for whoever lives, and this rank may have to get ready.
            self._thread = threading.Thread(target=self._beat, name="gradsync lighthouse", daemon=True)
            self._thread.start()
        try:
            quorum = self._asking.quorum(
                self.identity,
                timedelta(seconds=timeout),
                step=standing.step,
                world_size=1,
                data=dataclasses.asdict(standing),
            )
        except TimeoutError:
            raise
        except Exception as error:
            raise TimeoutError(f"the lighthouse at {self._url.netloc} gave no answer: {error}") from error
        return [
            Member(identity=each.replica_id, standing=MemberStatus.read(each.data or {}))
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
