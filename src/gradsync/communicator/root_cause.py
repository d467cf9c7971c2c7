"""Finds out which rank failed first: ranks pass that on outside the communicator, through the rendezvous store.

A rank that fails disconnects its peers, which fail and disconnect theirs in turn: a rank that sees a connection close
does not know where the failure began. So the first rank that fails leaves a message in the store before it closes
anything, and the others find it there. Nobody waits for a store that does not answer. The store may outlive its groups:
when a group is created again, messages of earlier ones are deleted.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["BEFORE", "FailureDomain", "clear_root_cause", "find_root_cause"]

# What a failure may take longer for that. A store answers in less than a thousandth of it, if it does.
PATIENCE_SECONDS = 0.5
KEY = "gradsync/failed"
# Between a rank's own message and that of the first rank to fail.
BEFORE = ". Before that, "


class FailureDomain:
    """The groups of one communicator, which was created over ``group``: if one of them fails, all do."""

    def __init__(self, group: Any) -> None:
        self.group = group
        # Made on all ranks alike, so that it has the same number everywhere.
        _made[group] = self.number = _made.get(group, 0) + 1
        _delete(group, self.key)

    @property
    def key(self) -> str:
        return f"{KEY}/{self.number}"

    def add(self, group: Any) -> None:
        _failure_domains[group] = self


_made: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
_failure_domains: "weakref.WeakKeyDictionary[Any, FailureDomain]" = weakref.WeakKeyDictionary()
# Groups whose store has not answered: with one whose rank is stopped, each question would cost the whole patience.
_unanswered: "weakref.WeakSet[Any]" = weakref.WeakSet()


def find_root_cause(group: Any, message: str) -> str:
    """The ``message``, followed by that of the first rank of ``group`` that failed, unless this is the first."""
    domain = _failure_domains.get(group)
    root, key = (group, KEY) if domain is None else (domain.group, domain.key)

    def ask() -> bytes:
        answer: bytes = _store_of(root).compare_set(key, "", message)
        return answer

    answer = None if root in _unanswered else _within(PATIENCE_SECONDS, ask)
    if answer is None:
        _unanswered.add(root)
    first = (answer or b"").decode(errors="replace")
    return message if first in ("", message) or first in message else f"{message}{BEFORE}{first}"


def clear_root_cause(group: Any) -> None:
    """Delete messages of earlier groups, when the first communicator over ``group`` is created."""
    if group not in _failure_domains:
        _delete(group, KEY)


def _delete(group: Any, key: str) -> None:
    """Delete the message under ``key``, on rank 0 only.

    One rank is enough: the others cannot get far enough to fail before rank 0 has been here.
    """

    def ask() -> bytes:
        _store_of(group).delete_key(key)
        return b""

    if dist.get_rank(group) == 0 and dist.get_world_size(group) > 1:
        _within(PATIENCE_SECONDS, ask)


def _store_of(group: Any) -> Any:
    return dist.distributed_c10d._get_process_group_store(group)


def _within(seconds: float, ask: Callable[[], bytes]) -> bytes | None:
    answers: list[bytes] = []

    def run() -> None:
        # Whatever is wrong with the store: the failure is another one.
        try:
            answers.append(ask())
        except Exception:
            return

    try:
        thread = threading.Thread(target=run, name="gradsync root cause", daemon=True)
        thread.start()
        thread.join(seconds)
    except RuntimeError:  # no thread left, or the interpreter ends
        return None
    return answers[0] if answers else None
