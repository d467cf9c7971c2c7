"""Logging to stderr by ``GRADSYNC_LOG=debug`` (or ``info``, ``warning``, ``error``), from that level up.

The logger is ``gradsync``; a program may also configure it itself. At ``debug``, every collective logs when it starts
and when it ends; the level is read when a communicator is created.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import DistError

from gradsync.base.errors import ConfigurationError, GradsyncError

__all__ = ["LOGGER", "VARIABLE", "configure_logging", "log_errors"]

LOGGER = logging.getLogger("gradsync")
VARIABLE = "GRADSYNC_LOG"
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
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


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Our own handler class, so that it is recognised and not added twice."""


def configure_logging() -> None:
    """Do what the environment says, if it says anything."""
    name = os.environ.get(VARIABLE, "").strip().lower()
    if not name:
        return
    if name not in LEVELS:
        raise ConfigurationError(f"{VARIABLE} must be one of {', '.join(LEVELS)}, got {os.environ[VARIABLE]!r}")
    LOGGER.setLevel(LEVELS[name])
    if not any(isinstance(handler, _ToStderr) for handler in LOGGER.handlers):
        handler = _ToStderr()
        rank = next((os.environ[variable] for variable in RANK_VARIABLES if variable in os.environ), None)
        who = f"process {os.getpid()}" if rank is None else f"rank {rank}"
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s.%(msecs)03d [{who}] %(levelname)s %(message)s", datefmt="%H:%M:%S")
        )
        LOGGER.addHandler(handler)
