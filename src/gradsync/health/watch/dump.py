"""``GRADSYNC_DUMP=FOLDER``: on SIGUSR1 every rank writes its status to a file of its own in that folder.

Signal one rank, and it tells the others over the watch; without a watch each rank writes only when it is signalled
itself. A rank that hangs in a collective runs no Python in its main thread, where signal handlers are called. So a
thread receives the signal: the interpreter writes its number to a socket at once, whatever the main thread is doing.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gradsync.base.files import whole_file
from gradsync.health.watch.agent import Agent
from gradsync.health.watch.status import Model, stack_of

__all__ = ["FORMAT", "VARIABLE", "listen_for_requests", "note_model", "write_dump"]

LOGGER = logging.getLogger("gradsync")

VARIABLE = "GRADSYNC_DUMP"
FORMAT = 1
REQUEST = signal.SIGUSR1

_models: "weakref.WeakSet[Model]" = weakref.WeakSet()
_listens = False


def note_model(model: Model) -> None:
    """Have ``model`` described in dumps."""
    _models.add(model)


def listen_for_requests(posts: Callable[[], list[Agent]]) -> None:
    """If the environment names a folder: write there on request, from now on. Nothing is agreed on with others."""
    global _listens
    if _listens or not os.environ.get(VARIABLE):
        return
    if threading.current_thread() is not threading.main_thread():
        LOGGER.warning("%s is not heeded: a signal is listened for in the main thread only", VARIABLE)
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    if before >= 0:
        signal.set_wakeup_fd(before)
        LOGGER.warning("%s is not heeded: somebody else listens for the signals of this process", VARIABLE)
        return
    _listens = True
    _chain_handler()
    arguments = (ours, theirs, posts)
    threading.Thread(target=_listen, args=arguments, name="gradsync dump", daemon=True).start()


def _chain_handler() -> None:
    """A signal without a handler in Python would end the process; one that was there is called as before."""
    before = signal.getsignal(REQUEST)

    def handle(number: int, frame: Any) -> None:
        if callable(before):
            before(number, frame)

    signal.signal(REQUEST, handle)
    # What the main thread is in goes on.
    signal.siginterrupt(REQUEST, False)


def _listen(ours: socket.socket, theirs: socket.socket, posts: Callable[[], list[Agent]]) -> None:
    # Its other end is held here, too: the interpreter only knows its number.
    with ours, theirs:
        while numbers := ours.recv(64):
            if REQUEST in numbers:
                write_dump(posts())
                for agent in posts():
                    agent.ask_for_dumps()


def write_dump(posts: list[Agent]) -> None:
    """Write this rank's status, if the environment names a folder."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    try:
        path = Path(folder) / f"rank-{_rank()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(json.dumps(_describe(posts), indent=1).encode())
    except OSError as error:
        LOGGER.warning("where this rank stands could not be written: %s", error)


def _rank() -> int:
    with contextlib.suppress(Exception):
        return dist.get_rank()
    return 0


def _describe(posts: list[Agent]) -> dict[str, Any]:
    now = time.monotonic()
    return {
        "format": FORMAT,
        "rank": _rank(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "groups": [
            {
                "ranks": [member.rank for member in agent.plan.members],
                "status": agent.sampler.look(now).as_data(),
                **agent.describe(),
            }
            for agent in posts
        ],
        "models": [_described(model) for model in list(_models)],
        "stacks": _stacks(),
    }


def _described(model: Model) -> str:
    try:
        return model.describe()
    except Exception as error:  # it is changed at this very moment
        return f"not to be had now: {type(error).__name__}: {error}"


def _stacks() -> dict[str, list[str]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {f"{names.get(number, 'thread')} {number}": stack_of(number) for number in list(sys._current_frames())}


def _begin_anew() -> None:
    """In a forked child, whose parent listens: that thread is not here, and signals are the child's own."""
    global _listens
    if _listens:
        _listens = False
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_begin_anew)
