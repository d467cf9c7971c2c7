"""Agreement before every round: no rank starts a collective until it knows that all others start the same one.

Ranks need not have taken the same number of steps. One that has reached the end of its data, or that was told to
synchronize everything, takes part in the rounds of ranks that still step until none does::

    rank 0    step  step  step  finish                  what they all do
    rank 1    step  finish finish finish       ▶        fragment, fragment, fragment, everything

A rank that failed reports it here, and the others raise an error that names it.
"""

import enum
from dataclasses import dataclass

import torch

from gradsync.base.errors import MismatchError, PeerFailedError
from gradsync.communicator import Communicator
from gradsync.communicator.logs import listed, rank_name

__all__ = ["Agreed", "Notice", "Wish", "meet"]


class Wish(enum.IntEnum):
    """What a rank wants from a round."""

    FRAGMENT = 0
    EVERYTHING = 1
    FINISH = 2
    FAILED = 3


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A rank's report: how many rounds it has seen, which fragment is next, its wish, and how many steps it has taken
    since each fragment was sent."""

    round: int
    fragment: int
    wish: Wish
    drift: tuple[int, ...]

    def to_numbers(self) -> list[int]:
        return [self.round, self.fragment, int(self.wish), *self.drift]

    @classmethod
    def from_numbers(cls, numbers: list[int]) -> "Notice":
        return cls(round=numbers[0], fragment=numbers[1], wish=Wish(numbers[2]), drift=tuple(numbers[3:]))


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks do in this round: ``fragments`` are sent. ``whole``: no rank steps, and ranks are equal
    afterwards. ``finished``: and none will step again."""

    fragments: tuple[int, ...]
    whole: bool
    finished: bool


def meet(communicator: Communicator, mine: Notice) -> Agreed:
    """Tell the other ranks how far this one is, and learn what all of them do now. Collective."""
    numbers = torch.tensor(mine.to_numbers()).to(communicator.device)
    gathered = torch.empty(numbers.numel() * communicator.world_size, dtype=numbers.dtype, device=communicator.device)
    communicator.all_gather(gathered, numbers).wait()
    notices = [Notice.from_numbers(row) for row in gathered.view(communicator.world_size, -1).tolist()]
    _require_nobody_failed(communicator, notices)
    _require_same_place(communicator, notices)
    wishes = {notice.wish for notice in notices}
    if Wish.FRAGMENT in wishes:
        return Agreed(fragments=(mine.fragment,), whole=False, finished=False)
    # What no rank has changed since it was sent is equal everywhere. An outer optimizer with momentum would move it.
    drifted = [any(steps) for steps in zip(*(notice.drift for notice in notices), strict=True)]
    return Agreed(
        fragments=tuple(fragment for fragment, changed in enumerate(drifted) if changed),
        whole=True,
        finished=wishes == {Wish.FINISH},
    )


def _require_nobody_failed(communicator: Communicator, notices: list[Notice]) -> None:
    failed = [rank for rank, notice in enumerate(notices) if notice.wish is Wish.FAILED]
    if failed:
        names = listed([rank_name(communicator.group, rank) for rank in failed])
        raise PeerFailedError(
            f"{names} failed between two synchronizations of local steps, so that this one has no result. Parameters "
            "are those of each rank alone. See the error there, and begin anew from a checkpoint"
        )


def _require_same_place(communicator: Communicator, notices: list[Notice]) -> None:
    first = notices[0]
    for rank, notice in enumerate(notices):
        if (notice.round, notice.fragment) != (first.round, first.fragment):
            raise MismatchError(
                f"ranks 0 and {rank} differ in how far their local steps have come: rank 0 is in round {first.round} "
                f"at fragment {first.fragment}, rank {rank} in round {notice.round} at fragment {notice.fragment}. "
                "Load states that were saved together on all ranks, or on none"
            )
