"""How messages name a rank: by its number in the world, which is the number that the user and the launcher know."""

import itertools
from collections.abc import Collection
from typing import Any

import torch.distributed as dist

__all__ = ["absent", "global_rank", "listed", "rank_name"]

# Of ranks that are missing.
NAMED = 5


def global_rank(group: Any, rank: int) -> int:
    """The number in the world of what is number ``rank`` in ``group``, which may be None, or gone by now."""
    try:
        return rank if group is None else int(dist.get_global_rank(group, rank))
    except (ValueError, RuntimeError):
        return rank


def rank_name(group: Any, rank: int) -> str:
    """Its number in the world, with that in its group where they differ."""
    known = global_rank(group, rank)
    return f"rank {known}" if known == rank else f"rank {known} ({rank} in its group)"


def listed(names: list[str]) -> str:
    """``rank 1, rank 2 and rank 5``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def absent(found: Collection[int], world_size: int) -> str:
    """``rank 1, rank 2 and rank 5``: who is not among those that were ``found``; of many only the first are named.
    Empty if nobody is missing."""
    count = world_size - len(set(found))
    if count <= 0:
        return ""
    first = itertools.islice((rank for rank in range(world_size) if rank not in found), NAMED)
    more = [f"{count - NAMED:,} others"] if count > NAMED else []
    return listed([*(f"rank {rank}" for rank in first), *more])
