"""Processes that a script starts by itself: ``torch.multiprocessing.spawn``, and whatever else begins anew.

Such a process imports the script before it does anything else, and looks up torch's class in doing so. What its parent
sends ahead of that, a dictionary of settings, is where our settings travel: unpickling them begins the watch.
"""

import functools
import multiprocessing.util
import os
import sys
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import torch.multiprocessing

from gradsync.accelerator.environment import read_environment
from gradsync.recording import close_recorders
from gradsync.running.account import write_account
from gradsync.running.running import Running

__all__ = ["Settings", "begin_with_children", "say_if_ranks_are_started"]

KEY = "gradsync_run"
# Before torch's own, and those of queues: nothing of theirs is needed here.
PRIORITY = 100


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a process is to know to be watched: which classes, and where its account goes."""

    keep: bool
    folder: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin_child, (self.keep, str(self.folder))


def begin_with_children(settings: Settings) -> Running:
    """Watch this process, and those that it starts anew."""
    running = Running(keep=settings.keep)
    running.begin()
    prepare = spawn.get_preparation_data

    def with_settings(name: str) -> dict[str, Any]:
        return prepare(name) | {KEY: settings}

    spawn.get_preparation_data = with_settings
    return running


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
    running = begin_with_children(settings)
    multiprocessing.util.Finalize(None, _end_child, (running, settings, os.getpid()), exitpriority=PRIORITY)
    return settings


def _end_child(running: Running, settings: Settings, process: int) -> None:
    """A process that wrapped nothing, as a worker of a loader, has nothing to tell; nor has one that was forked."""
    account = running.account()
    if account.wrappers and os.getpid() == process:
        write_account(settings.folder, account)
        close_recorders()
