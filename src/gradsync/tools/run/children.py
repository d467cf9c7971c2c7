"""Processes that a script starts by itself: ``torch.multiprocessing.spawn``, ``subprocess``, and anything else.

A spawned process imports the script before it does anything else, and in doing so looks up torch's class. Our settings
travel in what its parent sends ahead of that, a dictionary of settings: unpickling them begins the watch. Any other
Python gets them through the environment; see :mod:`gradsync.tools.run.startup.sitecustomize`.
"""

import atexit
import contextlib
import functools
import json
import multiprocessing.util
import os
import sys
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import torch.multiprocessing

from gradsync.base.environment import read_environment
from gradsync.observe.recording import close_recorders
from gradsync.tools.run.account import write_account
from gradsync.tools.run.running import Running

__all__ = ["Settings", "begin_started", "begin_with_children", "say_if_ranks_are_started"]

KEY = "gradsync_run"
# In the environment: the settings, and where a Python that starts finds what reads them.
VARIABLE = "GRADSYNC_RUN_CHILDREN"
STARTUP = str(Path(__file__).parent / "startup")
# Before torch's own, and those of queues: nothing of theirs is needed here.
PRIORITY = 100


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a process must know to be observed: which classes, and where to write its account."""

    keep: bool
    folder: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin_child, (self.keep, str(self.folder))


# What watches this process: the settings may be exchanged, as by a `gradsync run` inside of another one.
_current: list[tuple[Running, Settings]] = []


def begin_with_children(settings: Settings) -> Running:
    """Watch this process, and those that it starts."""
    os.environ[VARIABLE] = json.dumps({"keep": settings.keep, "folder": str(settings.folder)})
    paths = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each != STARTUP]
    os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *paths])
    if _current:
        _current[:] = [(_current[0][0], settings)]
        return _current[0][0]
    running = Running(keep=settings.keep)
    running.begin()
    _current.append((running, settings))
    prepare = spawn.get_preparation_data

    def with_settings(name: str) -> dict[str, Any]:
        return prepare(name) | {KEY: _current[0][1]}

    spawn.get_preparation_data = with_settings
    return running


def begin_started(text: str) -> None:
    """Watch this process, which a watched one has started with ``text`` in its environment."""
    if _current:
        return
    chosen = json.loads(text)
    settings = Settings(keep=chosen["keep"], folder=Path(chosen["folder"]))
    atexit.register(_end_child, begin_with_children(settings), settings, os.getpid())


def say_if_ranks_are_started() -> None:
    """To be called in ranks: a script that starts some itself, in each of them, is hardly meant to."""
    processes: Any = torch.multiprocessing
    start = processes.spawn

    @functools.wraps(start)
    def spawn_of_a_rank(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **options: Any) -> Any:
        place = read_environment()
        if place.rank == 0 and nprocs > 1:
            print(
                f"gradsync: the script starts {nprocs} processes by torch.multiprocessing.spawn, in each of "
                f"{place.world_size} ranks. If these are to be its ranks: gradsync run --nproc 0",
                file=sys.stderr,
                flush=True,
            )
        return start(fn, args, nprocs, *more, **options)

    processes.spawn = spawn_of_a_rank


def _begin_child(keep: bool, folder: str) -> Settings:
    settings = Settings(keep=keep, folder=Path(folder))
    # Watched by its environment already, it is not watched twice; but what is run at its end is not that of atexit.
    running = begin_with_children(settings)
    multiprocessing.util.Finalize(None, _end_child, (running, settings, os.getpid()), exitpriority=PRIORITY)
    return settings


def _end_child(running: Running, settings: Settings, process: int) -> None:
    """A process that wrapped nothing, as a worker of a loader, has nothing to tell; nor has one that was forked."""
    account = running.account()
    if account.wrappers and os.getpid() == process and _current[0][1] is settings:
        # The folder is gone where rank 0 has not waited.
        with contextlib.suppress(OSError):
            write_account(settings.folder, account)
        close_recorders()
