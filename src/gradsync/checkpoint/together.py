"""A step of work that all ranks do, after which every rank knows the outcome on all of them.

Ranks that write to a disk fail individually: it may be full for one and not for another. Here no rank continues, and
none is left waiting, before all have reported their outcome: if one rank fails, all raise.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from gradsync.base.errors import PeerFailedError
from gradsync.communicator import Communicator
from gradsync.communicator.agreement import gather_bytes
from gradsync.communicator.logs import log_errors

__all__ = ["Undo", "refuse", "together"]

T = TypeVar("T")
Undo = Callable[[], None]


def together(
    communicator: Communicator, what: str, work: Callable[[], tuple[T, Any]], undo: Undo | None = None
) -> tuple[T, list[Any]]:
    """Run ``work`` on every rank. Collective.

    It returns what this rank keeps and what the others shall learn, as JSON; this returns the first, and the second of
    every rank. If it raises anywhere, ``undo`` is called everywhere; then this raises everywhere: the own error where
    there is one, a :class:`PeerFailedError` that names the ranks elsewhere.
    """
    error: Exception | None = None
    try:
        kept, told = work()
        message = {"told": told}
    except Exception as caught:
        error = caught
        message = {"error": f"{type(caught).__name__}: {caught}"}
    answers = _gather(communicator, message)
    failures = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
    if error is not None:
        refuse(communicator, error, undo)
    if failures:
        refuse(communicator, PeerFailedError(f"could not {what}, because of {'; '.join(failures)}"), undo)
    return kept, [answer["told"] for answer in answers]


def refuse(communicator: Communicator, error: Exception, undo: Undo | None = None) -> None:
    """Raise ``error``, each rank its own, when all ranks have called ``undo``. Collective, and always raises."""
    if undo is not None:
        with log_errors("undoing it failed"):
            undo()
        _gather(communicator, None)
    raise error


def _gather(communicator: Communicator, message: Any) -> list[Any]:
    return [json.loads(payload) for payload in gather_bytes(communicator, json.dumps(message).encode())]
