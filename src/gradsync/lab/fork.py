"""Runs a function as ranks that are forked from this process, which saves each of them the import of torch.

    from gradsync.lab.fork import fork_ranks

    fork_ranks(lab, work)                # one rank a host
    fork_ranks(None, work, ranks=4)      # the same on this machine, over loopback

A rank has torchrun's environment and one thread for torch. It must make its process group itself; this process must
have none, and must not have used a GPU, since neither survives a fork.
"""

from collections.abc import Callable

import torch

from gradsync.errors import ConfigurationError
from gradsync.lab.errors import LabError
from gradsync.lab.host import places_here, places_on
from gradsync.lab.lab import Lab
from gradsync.lab.program import run_at
from gradsync.launch import Place

__all__ = ["fork_ranks"]


def fork_ranks(
    lab: Lab | None,
    function: Callable[[], object],
    *,
    ranks_per_host: int = 1,
    ranks: int | None = None,
    timeout: float = 600.0,
) -> None:
    """Call ``function()`` in one forked process a rank, on the hosts of ``lab`` or, without one, on this machine.

    ``ranks`` counts those on this machine. If a rank raises, its traceback goes to stderr, the others are ended, and a
    :class:`LabError` names it. Ranks die with this process, also if it is killed.
    """
    if lab is None:
        places = places_here(ranks_per_host if ranks is None else ranks)
    elif ranks is not None:
        raise ConfigurationError("ranks= is for this machine; on the hosts of a lab say ranks_per_host=")
    else:
        places = places_on(lab.hosts, ranks_per_host)

    def work(place: Place) -> None:
        torch.set_num_threads(1)  # the threads of the parent's pool were not forked; to wait for them would be forever
        function()

    failure = run_at(places, work, timeout)
    if failure is not None:
        raise LabError(f"{failure}. Its traceback is above, and the other ranks were ended")
