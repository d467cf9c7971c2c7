"""Whether processes run, and waiting for what they do."""

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["eventually", "is_running", "wait_until_gone"]


def is_running(pid: int) -> bool:
    """A zombie doesn't count: an orphan's new parent may be slow to collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: Iterable[int]) -> None:
    """By no clock: on a busy machine a process that is killed ends when it gets a core. One that is not, or lives on,
    is shown by the time limit of the test."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(pid)) as process:
            select.select([process], [], [])


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether it becomes true in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
