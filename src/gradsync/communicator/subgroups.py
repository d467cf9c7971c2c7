"""New process groups from an existing one, with its backend and its timeout."""

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from gradsync.communicator.agreement import make_together
from gradsync.communicator.base import Communicator
from gradsync.communicator.process_group import ProcessGroupCommunicator
from gradsync.communicator.root_cause import Circle

__all__ = ["CommunicatorFactory", "make_subgroups"]

# Of a group of Gloo's, beside one for each of its ranks; with some to spare.
DESCRIPTORS = 8

CommunicatorFactory: TypeAlias = Callable[[dist.ProcessGroup], Communicator]


def make_subgroups(circle: Circle, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """One group for each of ``parts``, out of that of ``circle`` and into that circle; the one of this rank, if any.

    Parts are numbers in the group of the circle, and do not overlap. Every rank of it calls this with the same parts.
    Processes outside need not. Where one of the ranks is short of descriptors, all raise ConfigurationError.
    """
    group = circle.group
    _require_descriptors(group, sum(map(len, parts)) + len(parts) * DESCRIPTORS)
    is_whole_world = dist.get_world_size(group) == dist.get_world_size()
    if not is_whole_world:
        _level_group_counts(group)
    rank, mine = dist.get_rank(group), None
    for part in parts:
        # Of groups of the whole world torch wants to hear on all processes, of others on their members only.
        if is_whole_world or rank in part:
            made = _new_group(group, part, only_members_call=not is_whole_world)
            mine = made if rank in part else mine
    if mine is not None:
        circle.take_in(mine)
    return mine


def _require_descriptors(group: dist.ProcessGroup, count: int) -> None:
    """A rank that runs out of them while it makes a group leaves the others waiting for it: so ranks ask before."""

    def try_it() -> None:
        with contextlib.ExitStack() as opened:
            for _ in range(count):
                opened.enter_context(open(os.devnull, "rb", buffering=0))

    make_together(ProcessGroupCommunicator(group), f"open {count} descriptors for new process groups", try_it)


def _new_group(group: dist.ProcessGroup, part: Sequence[int], *, only_members_call: bool) -> dist.ProcessGroup:
    name = dist.get_backend(group)
    made: dist.ProcessGroup = dist.new_group(
        [dist.get_global_rank(group, member) for member in part],
        # A group that was made without a name for its backend knows them by device only.
        backend=dist.get_backend_config(group) if name == "undefined" else name,
        timeout=_timeout_of(group),
        use_local_synchronization=only_members_call,
    )
    return made


def _timeout_of(group: Any) -> timedelta | None:
    backend = group._get_backend(group._device_types[0])
    # Backends that are not torch's own may have no options; torch's default is theirs then.
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _level_group_counts(group: dist.ProcessGroup) -> None:
    """Give every rank as many process groups as the rank with the most, by adding groups.

    torch names a group that only its members make by the number of groups they have. Where that differs, so do the
    names, and the members would wait for each other until the timeout.
    """
    wire = ProcessGroupCommunicator(group)
    count = len(dist.distributed_c10d._world.pg_names)
    most = torch.tensor([count], device=wire.device)
    wire.all_reduce(most, "max").wait()
    for _ in range(int(most) - count):
        _new_group(group, [wire.rank], only_members_call=True)
