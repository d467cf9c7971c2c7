"""``GRADSYNC_DUMP=FOLDER``: on SIGUSR1 every rank writes its status there; ``explain`` says who waits for whom.

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gradsync.base.errors import ConfigurationError
from gradsync.base.files import from_json, whole_file
from gradsync.communicator.logs import join_names
from gradsync.health.watch.agent import Agent
from gradsync.health.watch.detector import at_odds, longest, roots
from gradsync.health.watch.messages import Member, position_text
from gradsync.health.watch.status import Model, RankStatus, stack_of

__all__ = [
    "FORMAT",
    "VARIABLE",
    "Dump",
    "explain_dumps",
    "find_dumps",
    "include_in_dumps",
    "listen_for_requests",
    "read_dump",
    "write_dump",
]

LOGGER = logging.getLogger("gradsync")

VARIABLE = "GRADSYNC_DUMP"
FORMAT = 1
REQUEST = signal.SIGUSR1

_models: "weakref.WeakSet[Model]" = weakref.WeakSet()
_listens = False


def include_in_dumps(model: Model) -> None:
    """Have ``model`` described in dumps."""
    _models.add(model)


def listen_for_requests(agents: Callable[[], list[Agent]]) -> None:
    """Write dumps on request from now on, if the environment names a folder. Nothing is agreed on with others."""
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
    arguments = (ours, theirs, agents)
    threading.Thread(target=_listen, args=arguments, name="gradsync dump", daemon=True).start()


def _chain_handler() -> None:
    """Handle the signal, which would end the process otherwise, and call the handler that was there, as before."""
    before = signal.getsignal(REQUEST)

    def handle(number: int, frame: Any) -> None:
        if callable(before):
            before(number, frame)

    signal.signal(REQUEST, handle)
    # What the main thread is in goes on.
    signal.siginterrupt(REQUEST, False)


def _listen(ours: socket.socket, theirs: socket.socket, agents: Callable[[], list[Agent]]) -> None:
    # Its other end is held here, too: the interpreter only knows its number.
    with ours, theirs:
        while numbers := ours.recv(64):
            if REQUEST in numbers:
                write_dump(agents())
                for agent in agents():
                    agent.ask_for_dumps()


def write_dump(agents: list[Agent]) -> None:
    """Write this rank's status, if the environment names a folder."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    try:
        path = Path(folder) / f"rank-{_rank()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(json.dumps(_describe(agents), indent=1).encode())
    except OSError as error:
        LOGGER.warning("where this rank stands could not be written: %s", error)


def _rank() -> int:
    with contextlib.suppress(Exception):
        return dist.get_rank()
    return 0


def _describe(agents: list[Agent]) -> dict[str, Any]:
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
                "status": asdict(agent.sampler.sample(now)),
                **agent.describe(),
            }
            for agent in agents
        ],
        "models": [_model_text(model) for model in list(_models)],
        "stacks": _stacks(),
    }


def _model_text(model: Model) -> str:
    try:
        return model.describe()
    except Exception as error:  # it is changed at this very moment
        return f"not to be had now: {type(error).__name__}: {error}"


def _stacks() -> dict[str, list[str]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {f"{names.get(number, 'thread')} {number}": stack_of(number) for number in list(sys._current_frames())}


def _after_fork() -> None:
    """Let go of the parent's thread in a forked child: it is not here, and signals are the child's own."""
    global _listens
    if _listens:
        _listens = False
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_after_fork)


PATTERN = "rank-*.json"
FRAMES_SHOWN = 3
# What was written longer before the newest is of another request.
SAME_REQUEST_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Dump:
    """One rank's dump. ``groups``: the ranks of each of its process groups, and its status there."""

    member: Member
    time: datetime
    groups: tuple[tuple[tuple[int, ...], RankStatus], ...]
    known: str
    stack: tuple[str, ...]


def find_dumps(folder: Path) -> list[Path]:
    return sorted(folder.glob(PATTERN))


def read_dump(path: Path) -> Dump:
    """Read one rank's dump. Raises ConfigurationError for what no rank has written."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise ConfigurationError(f"{path} has format {data['format']}, and {FORMAT} is read here: update gradsync")
        main: list[str] = next((lines for name, lines in data["stacks"].items() if name.startswith("MainThread")), [])
        return Dump(
            member=from_json(Member, data),
            time=datetime.fromisoformat(data["time"]),
            groups=tuple((tuple(each["ranks"]), from_json(RankStatus, each["status"])) for each in data["groups"]),
            known=next((each["known"] for each in data["groups"] if each["known"]), ""),
            stack=tuple(main),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{path} is not what a rank writes on request: {error!r}") from error


def explain_dumps(dumps: Sequence[Dump]) -> list[str]:
    """The status of each rank, and which rank waits for which, in lines."""
    newest = max(dump.time for dump in dumps)
    old = [dump for dump in dumps if (newest - dump.time).total_seconds() > SAME_REQUEST_SECONDS]
    dumps = [dump for dump in dumps if dump not in old]
    by_rank = {dump.member.rank: dump for dump in sorted(dumps, key=lambda dump: dump.member.rank)}
    lines = [f"{dump.member} wrote before, at {dump.time:%H:%M:%S}, and not with the others." for dump in old]
    for ranks in sorted({ranks for dump in dumps for ranks, _ in dump.groups}):
        statuses = {
            rank: status
            for rank, dump in by_rank.items()
            for group, status in dump.groups
            if group == ranks and rank in ranks
        }
        lines += [_place(by_rank[rank], status) for rank, status in statuses.items()]
        lines += ["", *_conclusions(ranks, statuses, by_rank)]
    if not any(dump.groups for dump in dumps):
        lines += [f"{dump.member}: at {_innermost(dump)}" for dump in by_rank.values()]
        lines += ["", "No watch was set up between these ranks, so who waits for whom is not known."]
    # Of those who have written themselves it adds nothing.
    everybody = {rank for dump in dumps for ranks, _ in dump.groups for rank in ranks}
    known = [f"{dump.member} knew: {dump.known}" for dump in by_rank.values() if dump.known]
    return [*lines, *(known if everybody - by_rank.keys() else ())]


def _place(dump: Dump, status: RankStatus) -> str:
    wait = longest(status)
    waits = f", for {wait.seconds:.0f} s" if wait is not None else f", for {status.seconds:.0f} s"
    return f"{dump.member} at {dump.time:%H:%M:%S}: {position_text(status)}{waits}"


def _conclusions(ranks: Sequence[int], statuses: dict[int, RankStatus], by_rank: dict[int, Dump]) -> list[str]:
    lines = []
    missing = [rank for rank in ranks if rank not in statuses]
    if missing:
        names = join_names([f"rank {rank}" for rank in missing])
        lines.append(f"{names} wrote nothing: ended, stopped, or without GRADSYNC_DUMP.")
    for rank, (other, its, theirs) in at_odds(statuses).items():
        lines.append(f"rank {rank} is in {its.what}, where rank {other} is in {theirs.what}.")
    for rank, waiters in roots(statuses).items():
        names = join_names([f"rank {waiter}" for waiter in sorted(waiters)])
        verb = "waits" if len(waiters) == 1 else "wait"
        what = max(waiters.values(), key=lambda wait: wait.seconds).what
        lines.append(f"{names} {verb} for rank {rank} in {what}. rank {rank} is at {_innermost(by_rank[rank])}.")
    waiting = [rank for rank, status in statuses.items() if status.waits]
    if not lines and waiting:
        names = join_names([f"rank {rank}" for rank in waiting])
        lines.append(f"All ranks have come to what {names} waited for: it is under way.")
    if waiting and missing and len(lines) == 1:
        lines.append(f"{join_names([f'rank {rank}' for rank in waiting])} may wait for what wrote nothing.")
    return lines or ["Nobody waits for anybody."]


def _innermost(dump: Dump) -> str:
    return " < ".join(reversed(dump.stack[-FRAMES_SHOWN:])) or "an unknown place"
