"""Run a function as N ranks inside one process: unit tests of training code without a launcher.

    from gradsync.testing import run_ranks

    def train():
        model = gradsync.DistributedDataParallel(make_model())   # finds its communicator by itself
        ...
        return [parameter.detach().clone() for parameter in model.parameters()]

    first, second = run_ranks(train, 2)

Ranks are threads. Each has its own ambient communicator, which gradsync's wrappers and functions use when they are
given neither a process group nor a communicator. Results match those of real processes: the contract tests run on both.
"""

import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from gradsync.base.errors import PeerFailedError
from gradsync.communicator import Communicator, InProcessWorld, ambient_communicator, choose_communicator

__all__ = ["communicator", "run_ranks"]

P = ParamSpec("P")
R = TypeVar("R")


def run_ranks(function: Callable[P, R], world_size: int, *args: P.args, **kwargs: P.kwargs) -> list[R]:
    """Call ``function(*args, **kwargs)`` on ``world_size`` ranks at once; return the results in rank order.

    If a rank raises, the ranks that wait for it are told, and the first error is raised here with a note that names
    the rank. torch's random numbers are shared by all threads: seed a ``torch.Generator`` per rank instead of calling
    ``torch.manual_seed``.
    """
    world = InProcessWorld(world_size)
    results: list[Any] = [None] * world_size
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            with world.turn(), ambient_communicator(world.communicator(rank)):
                results[rank] = function(*args, **kwargs)
        except BaseException as error:
            errors[rank] = error
            world.fail(rank, error)

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # A rank that failed because another had failed only repeats the other's message.
        culprits = [rank for rank, error in errors.items() if not isinstance(error, PeerFailedError)] or list(errors)
        error = errors[min(culprits)]
        error.add_note(f"raised on rank {min(culprits)} of {world_size} (in-process ranks)")
        raise error
    return results


def communicator() -> Communicator:
    """This rank's communicator, inside :func:`run_ranks`."""
    return choose_communicator()
