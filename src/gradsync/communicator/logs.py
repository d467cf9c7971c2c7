"""Logging, and how messages name a rank: by its number in the world, which the user and the launcher know.

``GRADSYNC_LOG=debug`` (or ``info``, ``warning``, ``error``) logs to stderr from that level up. The logger is
``gradsync``; a program may also configure it itself. At ``debug``, every collective logs when it starts and when it
ends; the level is read when a communicator is created.
"""

import itertools
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError

from gradsync.base.errors import ConfigurationError, GradsyncError

__all__ = [
    "LOGGER",
    "VARIABLE",
    "configure_logging",
    "global_rank",
    "join_names",
    "log_errors",
    "name_missing_ranks",
    "rank_name",
]

LOGGER = logging.getLogger("gradsync")
VARIABLE = "GRADSYNC_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
# Where launchers say which rank this is: torchrun, Open MPI, MPICH and its kin, srun.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


@contextmanager
def log_errors(doing: str) -> Iterator[None]:
    """Log an error instead of raising it: an earlier error is being handled, and must not be replaced by this one.

    A peer or a link that is gone is what one expects then, and is logged at level debug. Anything else is a bug, in
    gradsync or in what a user has registered, and is logged with its traceback.
    """
    try:
        yield
    except (GradsyncError, DistError, OSError) as error:
        LOGGER.debug("after a failure, %s: %s: %s", doing, type(error).__name__, error)
    except Exception:
        LOGGER.exception("after a failure, %s", doing)


def configure_logging() -> None:
    """Set the level of the log, and log to stderr, if the environment asks for it."""
    name = os.environ.get(VARIABLE, "").strip().lower()
    if not name:
        return
    if name not in LEVELS:
        raise ConfigurationError(f"{VARIABLE} must be one of {', '.join(LEVELS)}, got {os.environ[VARIABLE]!r}")
    LOGGER.setLevel(LEVELS[name])
    if not any(handler.get_name() == VARIABLE for handler in LOGGER.handlers):
        handler = logging.StreamHandler()
        # So that it is recognised and not added twice.
        handler.set_name(VARIABLE)
        rank = next((os.environ[variable] for variable in RANK_VARIABLES if variable in os.environ), None)
        who = f"process {os.getpid()}" if rank is None else f"rank {rank}"
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s.%(msecs)03d [{who}] %(levelname)s %(message)s", datefmt="%H:%M:%S")
        )
        LOGGER.addHandler(handler)


# How many missing ranks a message names.
MAX_NAMED = 5


def global_rank(group: Any, rank: int) -> int:
    """The number in the world of rank ``rank`` of ``group``, which may be None, or gone by now."""
    try:
        return rank if group is None else int(dist.get_global_rank(group, rank))
    except (ValueError, RuntimeError):
        return rank


def rank_name(group: Any, rank: int) -> str:
    """The name of a rank: its number in the world, with that in its group where they differ."""
    known = global_rank(group, rank)
    return f"rank {known}" if known == rank else f"rank {known} ({rank} in its group)"


def join_names(names: list[str]) -> str:
    """The ``names`` as one phrase: ``rank 1, rank 2 and rank 5``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def name_missing_ranks(found: Collection[int], world_size: int) -> str:
    """The names of the ranks that were not ``found``: ``rank 1, rank 2 and rank 5``; of many only the first few.

    Empty if nobody is missing.
    """
    count = world_size - len(set(found))
    if count <= 0:
        return ""
    first = itertools.islice((rank for rank in range(world_size) if rank not in found), MAX_NAMED)
    more = [f"{count - MAX_NAMED:,} others"] if count > MAX_NAMED else []
    return join_names([*(f"rank {rank}" for rank in first), *more])
