"""A generation: the ranks that take part together, with their own process group, until a rank leaves or joins.

They rendezvous at the store of the generation's rank 0, under the number of the generation. That number is always
unused: it is one more than the highest that any of them has seen.
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradsync.communicator import Communicator, InProcessWorld, choose_communicator
from gradsync.health.elastic.membership import Member, in_order
from gradsync.health.watch import leave_watch

__all__ = ["Generation", "MeetingPlace", "meet"]

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
    members: tuple[Member, ...]
    communicator: Communicator
    store: Any = None

    @property
    def identities(self) -> frozenset[str]:
        return frozenset(member.identity for member in self.members)

    @property
    def newest_step(self) -> int:
        """What the state of number 0 has behind it."""
        return self.members[0].standing.step

    @property
    def lagging(self) -> list[int]:
        """The numbers of those that have not got as far."""
        return [
            number for number, member in enumerate(self.members) if member.standing.step < self.members[0].standing.step
        ]

    def leave(self) -> None:
        """Close the process group here, whatever its state. The others notice if they wait for this rank."""
        group = self.communicator.group
        if group is not None:
            leave_watch(group, f"has left generation {self.number}")
            if dist.is_initialized():
                dist.destroy_process_group()


def meet(
    members: Sequence[Member], identity: str, place: MeetingPlace, *, timeout: float, backend: Backend
) -> Generation:
    """Make the process group of ``members``. Collective among them; ``backend`` chooses it, given their store.

    A member that has died meanwhile is noticed after ``timeout`` seconds at the latest, by an error of torch's.
    """
    ordered = in_order(list(members))
    rank = [member.identity for member in ordered].index(identity)
    number = 1 + max(member.standing.generation for member in ordered)
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


def _store_of(member: Member, limit: timedelta) -> Any:
    host, port = member.standing.meeting_place
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
