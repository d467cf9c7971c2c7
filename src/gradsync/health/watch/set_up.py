"""Sets a watch over a process group, once, when the first model is wrapped over it.

Whether there is one follows from what all ranks have told each other: one that wants none, has no sockets left or
cannot reach the hub says so, and then nobody has one. That is a line in the log and no error: the wire goes without.

``GRADSYNC_WATCH`` is ``on``, ``off``, or ``stacks``: then a rank that is warned about says where its Python code is.
"""

import atexit
import contextlib
import json
import logging
import multiprocessing.util
import os
import socket
import sys
import threading
import weakref
from typing import Any

from gradsync.base.errors import ConfigurationError, PeerFailedError
from gradsync.communicator import Communicator, ProcessGroupCommunicator
from gradsync.communicator.agreement import gather_bytes, make_together
from gradsync.communicator.naming import global_rank
from gradsync.communicator.topology import host_identity
from gradsync.health.watch.door import Door, Invitation, enter
from gradsync.health.watch.dump import listen_for_requests, note_model, write_dump
from gradsync.health.watch.exits import exit_call, forget_exit, note_exit
from gradsync.health.watch.post import Plan, Post
from gradsync.health.watch.protocol import HUB
from gradsync.health.watch.standing import Model
from gradsync.health.watch.uncaught import tell_uncaught
from gradsync.health.watch.words import Member, described, farewell

__all__ = [
    "MODES",
    "VARIABLE",
    "leave_watch",
    "look_at",
    "posts",
    "say_goodbye",
    "set_watch",
    "straggling",
    "tell_error",
]

LOGGER = logging.getLogger("gradsync")

VARIABLE = "GRADSYNC_WATCH"
MODES = ("on", "off", "stacks")

# None where the ranks have agreed to do without. Posts hold no group: they end with it.
_posts: "weakref.WeakKeyDictionary[Any, Post | None]" = weakref.WeakKeyDictionary()
# Kept when a group is made anew: a report is of the whole run.
_said: list[str] = []


def set_watch(communicator: Communicator) -> None:
    """Have the ranks of ``communicator`` watch each other, and guard it. Collective.

    A communicator without a process group has ranks that are threads, or a launcher that ends them all together.
    """
    group = communicator.group
    if group is None or communicator.world_size == 1:
        return
    if group not in _posts:
        _posts[group] = _set_up(ProcessGroupCommunicator(group))
    post = _posts[group]
    if post is not None:
        post.guard(communicator)


def look_at(model: Model, communicator: Communicator) -> None:
    """Tell of ``model`` in dumps, and to the other ranks where there is a watch over ``communicator``."""
    note_model(model)
    post = None if communicator.group is None else _posts.get(communicator.group)
    if post is not None:
        post.look_at(model)


def leave_watch(group: Any, words: str) -> None:
    """Watch ``group`` no longer, here: others that wait for this rank are told ``words``. Not collective."""
    post = _posts.pop(group, None)
    if post is not None:
        post.leave(words)


def tell_error(communicator: Communicator, error: BaseException, place: str) -> None:
    """This rank has raised in that ``place`` of its loop, and the other ranks may be waiting for it. They are told at
    once, and forget it when this rank goes on."""
    post = None if communicator.group is None else _posts.get(communicator.group)
    # Of a rank that was lost they know.
    if post is not None and isinstance(error, Exception) and not isinstance(error, PeerFailedError):
        post.tell_error(described(error, place))


def posts() -> list[Post]:
    """Those of this process."""
    return [post for post in _posts.values() if post is not None]


def straggling() -> list[str]:
    """What was said of ranks that others wait for, so far, over whichever group. On the hub, rank 0; nothing
    elsewhere."""
    return list(_said)


def _set_up(wire: ProcessGroupCommunicator) -> Post | None:
    mine = {
        "mode": os.environ.get(VARIABLE, "on"),
        "rank": global_rank(wire.group, wire.rank),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "identity": host_identity().hex(),
    }
    told = [json.loads(each) for each in gather_bytes(wire, json.dumps(mine).encode())]
    wrong = [each for each in told if each["mode"] not in MODES]
    if wrong:
        raise ConfigurationError(
            f"{VARIABLE} must be one of {', '.join(MODES)}, got {wrong[0]['mode']!r} on rank {wrong[0]['rank']}"
        )
    if any(each["mode"] == "off" for each in told):
        return None
    plan = Plan(
        members=tuple(Member.read(each) for each in told),
        me=wire.rank,
        here=tuple(each["identity"] == mine["identity"] for each in told),
        timeout=_timeout(wire),
        shows_stacks=mine["mode"] == "stacks",
    )
    try:
        post = _open(plan, wire)
    except ConfigurationError as error:
        if wire.rank == HUB:
            LOGGER.warning("there is no watch over the ranks, and a lost one may go unnamed: %s", error)
        return None
    # What multiprocessing has forked ends by os._exit, and calls this before.
    multiprocessing.util.Finalize(None, say_goodbye, exitpriority=0)
    tell_uncaught(_script_raised, _thread_raised)
    post.on_dump = lambda: write_dump(posts())
    post.on_words = _said.append
    # The group itself comes first on all ranks: whatever else is over it is guarded as it comes.
    post.guard(wire)
    return post


def _open(plan: Plan, wire: ProcessGroupCommunicator) -> Post:
    """Step by step: ranks agree on how each went before they begin the next, so that nobody waits for one that failed.

    ConfigurationError on all of them if one cannot.
    """
    with contextlib.ExitStack() as undo:
        post = make_together(wire, "listen for the other ranks", lambda: _open_door(plan, wire, undo))
        mine = b"" if post is None else json.dumps(post.invitation).encode()
        invitation: Invitation = json.loads(gather_bytes(wire, mine)[HUB])
        entered = make_together(wire, "reach the watch of rank 0", lambda: post or _enter(plan, wire, invitation, undo))
        # All are in, or not all of them are and nobody stays.
        undo.pop_all()
        return entered


def _open_door(plan: Plan, wire: ProcessGroupCommunicator, undo: contextlib.ExitStack) -> Post | None:
    if plan.me != HUB:
        return None
    others = {number for number in range(len(plan.members)) if number != HUB}
    door = Door(others, others_elsewhere=not all(plan.here))
    undo.callback(door.close)
    post = Post(plan, wire.group, door=door)
    undo.callback(post.leave, "has no watch")
    post.start()
    return post


def _enter(plan: Plan, wire: ProcessGroupCommunicator, invitation: Invitation, undo: contextlib.ExitStack) -> Post:
    line = enter(invitation, plan.me, is_here=plan.here[HUB])
    undo.callback(line.close)
    post = Post(plan, wire.group, line=line)
    undo.callback(post.leave, "has no watch")
    post.start()
    return post


def _timeout(wire: ProcessGroupCommunicator) -> float:
    # Backends that are not torch's own may not say.
    with contextlib.suppress(Exception):
        return wire.timeout
    return 1800.0


@atexit.register
def say_goodbye(error: BaseException | None = None) -> None:
    """At the end of the process, before its wires leave: whoever waits for this rank learns that it is in vain.

    For processes that end by ``os._exit`` after all, which else would look as if they had been killed.
    """
    words = farewell(error)
    for post in posts():
        post.leave(words)


def _script_raised(error: BaseException) -> None:
    """The process is about to end, unless somebody sits at a prompt, or trains in another thread."""
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    goes_on = hasattr(sys, "ps1") or sys.flags.interactive or any(_trained_by(thread) for thread in others)
    if not goes_on:
        say_goodbye(error)
    elif _trained_by(threading.get_ident()):
        _tell_all(described(error))


def _thread_raised(error: BaseException, thread: int) -> None:
    if not _trained_by(thread):
        return
    if isinstance(error, SystemExit):
        # It ends the thread alone, without a word, and the process then ends with 0.
        note_exit(f"the thread that trained called {exit_call(error)}")
        _tell_all(f"called {exit_call(error)}, in a thread, which ended that thread alone")
    else:
        _tell_all(described(error))


def _tell_all(words: str) -> None:
    for post in posts():
        post.tell_error(words)


def _trained_by(thread: int | None) -> bool:
    """Whether that thread has run the last forward of a model."""
    return any(getattr(model, "thread", None) == thread for post in posts() for model in post.sampler.models)


def _forsake_all() -> None:
    for post in posts():
        post.forsake()
    _posts.clear()
    _said.clear()
    forget_exit()


os.register_at_fork(after_in_child=_forsake_all)
# Now, so that a signal that comes before the first model is wrapped does not end the process.
listen_for_requests(posts)
