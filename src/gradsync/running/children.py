"""Processes that a script starts by itself: ``torch.multiprocessing.spawn``, and whatever else begins anew.

Such a process imports the script before it does anything else, and looks up torch's class in doing so. What its parent
sends ahead of that, a dictionary of settings, is where our settings travel: unpickling them begins the watch.
"""

import multiprocessing.util
import os
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from gradsync.recording import close_recorders
from gradsync.running.account import write_account
from gradsync.running.running import Running

__all__ = ["Settings", "begin_with_children"]

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
