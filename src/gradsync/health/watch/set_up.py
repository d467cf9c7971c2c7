"""Sets up a watch over a process group, once, when the first model is wrapped over it.

All ranks must agree to have one. If any rank does not want a watch, has no sockets left or cannot reach the hub, it
says so, and no rank has one. That is a line in the log and not an error: the communicator works without.

``GRADSYNC_WATCH`` is ``on``, ``off``, or ``stacks``: with ``stacks``, a rank that is warned about prints where its
Python code is.
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
from gradsync.base.files import from_json
from gradsync.communicator import Communicator, ProcessGroupCommunicator
from gradsync.communicator.agreement import gather_bytes, make_together
from gradsync.communicator.logs import global_rank
from gradsync.communicator.rendezvous import Invitation, Rendezvous, enter
from gradsync.communicator.topology import host_identity
from gradsync.health.watch.agent import Agent, Plan
from gradsync.health.watch.dump import include_in_dumps, listen_for_requests, write_dump
from gradsync.health.watch.exit_causes import exit_call, forget_exit, record_exit, report_uncaught
from gradsync.health.watch.messages import Member, error_text, exit_message
from gradsync.health.watch.protocol import HUB, Line
from gradsync.health.watch.status import Model

__all__ = [
    "MODES",
    "VARIABLE",
    "agents",
    "leave_watch",
    "say_goodbye",
    "set_watch",
    "slowness_warnings",
    "tell_error",
    "watch_model",
]

LOGGER = logging.getLogger("gradsync")

VARIABLE = "GRADSYNC_WATCH"
MODES = ("on", "off", "stacks")

# None where the ranks have agreed to do without. Agents hold no group: they end with it.
_agents: "weakref.WeakKeyDictionary[Any, Agent | None]" = weakref.WeakKeyDictionary()
# Kept when a group is created again: a report covers the whole run.
_warnings: list[str] = []


def set_watch(communicator: Communicator) -> None:
    """Set up the watch over the ranks of ``communicator``, and guard it. Collective.

    A communicator without a process group has ranks that are threads, or a launcher that ends all of them together.
    """
    group = communicator.group
    if group is None or communicator.world_size == 1:
        return
    if group not in _agents:
        _agents[group] = _set_up(ProcessGroupCommunicator(group))
    agent = _agents[group]
    if agent is not None:
        agent.guard(communicator)


def watch_model(model: Model, communicator: Communicator) -> None:
    """Include ``model`` in dumps, and in reports to the other ranks if there is a watch over ``communicator``."""
    include_in_dumps(model)
    agent = None if communicator.group is None else _agents.get(communicator.group)
    if agent is not None:
        agent.sampler.add(model)


def leave_watch(group: Any, message: str) -> None:
    """Stop watching ``group``, on this rank: others that wait for this rank get ``message``. Not collective."""
    agent = _agents.pop(group, None)
    if agent is not None:
        agent.leave(message)


def tell_error(communicator: Communicator, error: BaseException, place: str) -> None:
    """Tell the other ranks, which may be waiting for this one, that it has raised in that ``place`` of its loop.

    They learn it at once, and forget it when this rank goes on.
    """
    agent = None if communicator.group is None else _agents.get(communicator.group)
    # They know of a rank that was lost.
    if agent is not None and isinstance(error, Exception) and not isinstance(error, PeerFailedError):
        agent.report_error(error_text(error, place))


def agents() -> list[Agent]:
    """The agents of this process."""
    return [agent for agent in _agents.values() if agent is not None]


def slowness_warnings() -> list[str]:
    """The warnings about slow ranks and slow communication so far, over all groups.

    They are on the hub, rank 0; elsewhere there are none.
    """
    return list(_warnings)


def _set_up(communicator: ProcessGroupCommunicator) -> Agent | None:
    mine = {
        "mode": os.environ.get(VARIABLE, "on"),
        "rank": global_rank(communicator.group, communicator.rank),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "identity": host_identity().hex(),
    }
    ranks = [json.loads(each) for each in gather_bytes(communicator, json.dumps(mine).encode())]
    wrong = [each for each in ranks if each["mode"] not in MODES]
    if wrong:
        raise ConfigurationError(
            f"{VARIABLE} must be one of {', '.join(MODES)}, got {wrong[0]['mode']!r} on rank {wrong[0]['rank']}"
        )
    if any(each["mode"] == "off" for each in ranks):
        return None
    plan = Plan(
        members=tuple(from_json(Member, each) for each in ranks),
        me=communicator.rank,
        here=tuple(each["identity"] == mine["identity"] for each in ranks),
        timeout=_timeout(communicator),
        shows_stacks=mine["mode"] == "stacks",
    )
    try:
        agent = _open(plan, communicator)
    except ConfigurationError as error:
        if communicator.rank == HUB:
            LOGGER.warning("there is no watch over the ranks, and a lost one may go unnamed: %s", error)
        return None
    # What multiprocessing has forked ends by os._exit, and calls this before.
    multiprocessing.util.Finalize(None, say_goodbye, exitpriority=0)
    report_uncaught(_script_raised, _thread_raised)
    # The group itself comes first on all ranks; communicators over it follow in the order of their creation.
    agent.guard(communicator)
    return agent


def _open(plan: Plan, communicator: ProcessGroupCommunicator) -> Agent:
    """Open the watch step by step: ranks agree on how each step went, so that nobody waits for one that failed.

    ConfigurationError on all of them if one cannot.
    """
    others = {number for number in range(len(plan.members)) if number != HUB} if plan.me == HUB else set[int]()
    with contextlib.ExitStack() as undo:
        rendezvous = make_together(
            communicator,
            "listen for the other ranks",
            lambda: undo.enter_context(contextlib.closing(Rendezvous(others, others_elsewhere=not all(plan.here)))),
        )
        invitation = Invitation.read(gather_bytes(communicator, rendezvous.invitation.pack())[HUB])
        lines = make_together(communicator, "reach the watch of rank 0", lambda: _enter(plan, invitation, undo))

        def start() -> Agent:
            joined = rendezvous.take()
            for each in joined.values():
                undo.callback(each.close)
            lines.update((number, Line(each)) for number, each in joined.items())
            agent = Agent(
                plan,
                communicator.group,
                lines,
                write_dump=lambda: write_dump(agents()),
                on_warning=_warnings.append,
            )
            undo.callback(agent.leave, "has no watch")
            agent.start()
            return agent

        agent = make_together(communicator, "start its watch", start)
        # All have one, or not all of them have and nobody keeps it.
        undo.pop_all()
        return agent


def _enter(plan: Plan, invitation: Invitation, undo: contextlib.ExitStack) -> dict[int, Line]:
    if plan.me == HUB:
        return {}
    connection = enter(invitation, plan.me, f"rank {plan.members[HUB].rank}", is_here=plan.here[HUB])
    undo.callback(connection.close)
    return {HUB: Line(connection)}


def _timeout(communicator: ProcessGroupCommunicator) -> float:
    # Backends that are not torch's own may not say.
    with contextlib.suppress(Exception):
        return communicator.timeout
    return 1800.0


@atexit.register
def say_goodbye(error: BaseException | None = None) -> None:
    """Tell ranks that wait for this one that it is in vain: at process exit, before its communicators leave.

    Also for processes that end by ``os._exit`` after all, which otherwise would look as if they had been killed.
    """
    message = exit_message(error)
    for agent in agents():
        agent.leave(message)


def _script_raised(error: BaseException) -> None:
    """Say goodbye because of an error that ends the script; unless somebody sits at a prompt, or a thread trains on."""
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    goes_on = hasattr(sys, "ps1") or sys.flags.interactive or any(_trained_by(thread) for thread in others)
    if not goes_on:
        say_goodbye(error)
    elif _trained_by(threading.get_ident()):
        _report_to_all(error_text(error))


def _thread_raised(error: BaseException, thread: int) -> None:
    if not _trained_by(thread):
        return
    if isinstance(error, SystemExit):
        # It ends the thread alone, silently, and the process then ends with 0.
        record_exit(f"the thread that trained called {exit_call(error)}")
        _report_to_all(f"called {exit_call(error)}, in a thread, which ended that thread alone")
    else:
        _report_to_all(error_text(error))


def _report_to_all(message: str) -> None:
    for agent in agents():
        agent.report_error(message)


def _trained_by(thread: int | None) -> bool:
    """Whether that thread has run the last forward of a model."""
    return any(getattr(model, "thread", None) == thread for agent in agents() for model in agent.sampler.models)


def _after_fork() -> None:
    for agent in agents():
        agent.after_fork()
    _agents.clear()
    _warnings.clear()
    forget_exit()


os.register_at_fork(after_in_child=_after_fork)
# Now, so that a signal that comes before the first model is wrapped does not end the process.
listen_for_requests(agents)
