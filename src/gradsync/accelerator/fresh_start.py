"""Separates what ranks exchange at their rendezvous store from what earlier runs of theirs have left there.

A launcher that restarts ranks after a failure may keep its store, with all keys in it: a rank that arrives first could
take the stale address of a dead peer for the peer's current one. Nothing in the environment is equal on all ranks of
one run and different in the next: each of several nodes counts its own restarts. So the ranks agree on a word that
identifies the run. Each publishes a number of its own; rank 0 replies to exactly that number, and keeps looking,
because the first number it sees may be from an earlier run. ::

    rank 2   joins/2 = n          wait for offers/2/n        came/WORD/2
    rank 0            look … offers/2/n = WORD         look … until all have come
"""

import time
import uuid
from datetime import timedelta
from typing import Any

from gradsync.base.errors import GradsyncError

__all__ = ["run_id"]

ROOT = "gradsync/life"
LOOK_SECONDS = 0.005
DEFAULT_TIMEOUT = timedelta(minutes=30)


def run_id(store: Any, rank: int, world_size: int, timeout: timedelta | None = None) -> str:
    """An id that is equal on all ranks started together, and on no others. Collective, over ``store`` alone."""
    limit = DEFAULT_TIMEOUT if timeout is None else timeout
    return _offer(store, world_size, limit) if rank == 0 else _ask(store, rank, limit)


def _ask(store: Any, rank: int, limit: timedelta) -> str:
    number = uuid.uuid4().hex
    store.set(f"{ROOT}/joins/{rank}", number)
    answer = f"{ROOT}/offers/{rank}/{number}"
    store.wait([answer], limit)
    word: str = store.get(answer).decode()
    store.set(f"{ROOT}/came/{word}/{rank}", "")
    return word


def _offer(store: Any, world_size: int, limit: timedelta) -> str:
    word, deadline = uuid.uuid4().hex, time.monotonic() + limit.total_seconds()
    missing, answered = set(range(1, world_size)), dict[int, bytes]()
    while True:
        missing -= {rank for rank in missing if store.check([f"{ROOT}/came/{word}/{rank}"])}
        if not missing:
            return word
        if time.monotonic() > deadline:
            names = ", ".join(f"rank {rank}" for rank in sorted(missing))
            raise GradsyncError(f"{names} did not come within {limit.total_seconds():g} s to where the ranks meet")
        for rank in missing:
            if store.check([f"{ROOT}/joins/{rank}"]):
                number = store.get(f"{ROOT}/joins/{rank}")
                if answered.get(rank) != number:
                    answered[rank] = number
                    store.set(f"{ROOT}/offers/{rank}/{number.decode()}", word)
        time.sleep(LOOK_SECONDS)
