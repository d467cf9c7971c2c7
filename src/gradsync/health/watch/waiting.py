"""Which rank waits for which, from the status of each. Pure logic, used by the watch and by ``explain``.

All ranks start the same collectives in the same order on a communicator. So a rank that waits in the 12th waits for
every rank that has started fewer than 12. A rank that has started the 12th and waits there, too, is not the cause.
"""

from collections.abc import Mapping

from gradsync.health.watch.status import RankStatus, Wait

__all__ = ["at_odds", "holds_up", "longest", "roots"]


def holds_up(status: RankStatus, wait: Wait) -> bool:
    """Whether a rank with that status has yet to reach what another one waits for."""
    return wait.wire >= len(status.started) or status.started[wait.wire] < wait.place


def longest(status: RankStatus) -> Wait | None:
    """The wait that a rank has been in the longest."""
    return max(status.waits, key=lambda wait: wait.seconds, default=None)


def roots(statuses: Mapping[int, RankStatus], patience: float = 0.0) -> dict[int, dict[int, Wait]]:
    """The ranks that hold others up: for each rank that waits for one, in which collective.

    ``patience`` is how many seconds a wait must last to count. A rank that waits itself is held up by somebody else,
    and named only if there is nobody to name but such: each of them is in something that the others are not.
    """
    waiting = {
        rank: wait
        for rank, status in statuses.items()
        if (wait := longest(status)) is not None and wait.seconds >= patience
    }
    found: dict[int, dict[int, Wait]] = {}
    for waiter, wait in waiting.items():
        for rank, status in statuses.items():
            if rank != waiter and holds_up(status, wait):
                found.setdefault(rank, {})[waiter] = wait
    free = {rank: waiters for rank, waiters in found.items() if not statuses[rank].waits}
    return free or found


def at_odds(statuses: Mapping[int, RankStatus], patience: float = 0.0) -> dict[int, tuple[int, Wait, Wait]]:
    """Ranks that wait in a different collective than the lowest rank at the same place: which, its own, and theirs."""
    first: dict[tuple[int, int], tuple[int, Wait]] = {}
    found = {}
    for rank in sorted(statuses):
        for wait in statuses[rank].waits:
            other, its = first.setdefault((wait.wire, wait.place), (rank, wait))
            if _kind(its) != _kind(wait) and min(its.seconds, wait.seconds) >= patience:
                found[rank] = (other, wait, its)
    return found


def _kind(wait: Wait) -> str:
    """What it is, without its number: communicators over one wire count for themselves."""
    return wait.what.partition("(")[2] or wait.what
