"""Agreement before every round: no rank starts a collective until it knows that all others start the same one.

Ranks need not have taken the same number of steps. One that has reached the end of its data, or that was asked to
synchronize everything, takes part in the rounds of ranks that still step until none does::

    rank 0    step  step  step  finish                  what they all do
    rank 1    step  finish finish finish       ▶        fragment, fragment, fragment, everything

A rank that failed reports it here, and the others raise an error that names it.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradsync.base.errors import MismatchError, PeerFailedError
from gradsync.communicator import Communicator
from gradsync.communicator.logs import join_names, rank_name

__all__ = ["Agreed", "Intent", "negotiate"]


class Intent(enum.IntEnum):
    """What a rank wants from a round."""

    FRAGMENT = 0
    EVERYTHING = 1
    FINISH = 2
    FAILED = 3


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks do in this round: ``fragments`` are sent. ``whole``: no rank steps, and ranks are equal
    afterwards. ``finished``: and none will step again."""

    fragments: tuple[int, ...]
    whole: bool
    finished: bool


def negotiate(communicator: Communicator, rounds: int, fragment: int, intent: Intent, drift: Sequence[int]) -> Agreed:
    """Exchange how far ranks have come, and agree on what all of them do now. Collective.

    This rank has taken part in this many ``rounds``, ``fragment`` is next, and ``drift`` is how many steps it has taken
    since each fragment was sent.
    """
    numbers = torch.tensor([rounds, fragment, intent, *drift]).to(communicator.device)
    gathered = torch.empty(numbers.numel() * communicator.world_size, dtype=numbers.dtype, device=communicator.device)
    communicator.all_gather(gathered, numbers).wait()
    of_ranks = gathered.view(communicator.world_size, -1).tolist()
    intents = [Intent(row[2]) for row in of_ranks]
    _require_no_failure(communicator, intents)
    _require_same_place([(row[0], row[1]) for row in of_ranks])
    if Intent.FRAGMENT in intents:
        return Agreed(fragments=(fragment,), whole=False, finished=False)
    # What no rank has changed since it was sent is equal everywhere. An outer optimizer with momentum would move it.
    drifted = [any(steps) for steps in zip(*(row[3:] for row in of_ranks), strict=True)]
    return Agreed(
        fragments=tuple(number for number, changed in enumerate(drifted) if changed),
        whole=True,
        finished=set(intents) == {Intent.FINISH},
    )


def _require_no_failure(communicator: Communicator, intents: Sequence[Intent]) -> None:
    failed = [rank for rank, intent in enumerate(intents) if intent is Intent.FAILED]
    if failed:
        names = join_names([rank_name(communicator.group, rank) for rank in failed])
        raise PeerFailedError(
            f"{names} failed between two synchronizations of local steps, so that this one has no result. Parameters "
            "are those of each rank alone. See the error there, and start again from a checkpoint"
        )


def _require_same_place(places: Sequence[tuple[int, int]]) -> None:
    for rank, (rounds, fragment) in enumerate(places):
        if (rounds, fragment) != places[0]:
            raise MismatchError(
                f"ranks 0 and {rank} differ in how far their local steps have come: rank 0 is in round {places[0][0]} "
                f"at fragment {places[0][1]}, rank {rank} in round {rounds} at fragment {fragment}. "
                "Load states that were saved together on all ranks, or on none"
            )
