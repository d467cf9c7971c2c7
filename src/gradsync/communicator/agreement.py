"""Checks that ranks agree: compares what must be equal, or the outcome of a step, and names the first difference.

While everything agrees, only fixed-size digests are sent. Texts are gathered only when digests differ; they are JSON,
never pickle.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from gradsync.base.errors import ConfigurationError, MismatchError, PeerFailedError
from gradsync.communicator.base import Communicator
from gradsync.communicator.logs import log_errors, rank_name

__all__ = [
    "agree_on_absent",
    "gather_bytes",
    "gather_json",
    "make_together",
    "refuse",
    "require_agreement",
    "require_same_library",
    "together",
]

T = TypeVar("T")
Undo = Callable[[], None]

Described = Sequence[tuple[str, Any]]

# "grad". More parameters than a model has, and few enough for an int of torch's.
GREETING = 0x67726164

SAME_MODEL = "Build the same model with the same settings on every rank, from the same code and configuration"


def require_same_library(communicator: Communicator) -> None:
    """Raise :class:`MismatchError` if a rank wraps its model in torch's class, and this one in gradsync's. Collective.

    torch's class begins with an all-gather of one number, that of its parameters. So does this, with a number that no
    model has, and which torch's class refuses on the other ranks as a different model.
    """
    numbers = _gather_equal(communicator, torch.tensor([GREETING], dtype=torch.int64, device="cpu"))
    others = [rank for rank, number in enumerate(numbers) if number != GREETING]
    if others:
        mine, theirs = (rank_name(communicator.group, rank) for rank in (communicator.rank, others[0]))
        raise MismatchError(
            f"{mine} wraps its model in gradsync's DistributedDataParallel, and {theirs} in torch's or in another "
            "library's: use the same class on all ranks. gradsync run reaches processes that a script starts by itself "
            "through PYTHONPATH, unless their Python is told to ignore it (-I, -E, -S)"
        )


def require_agreement(
    communicator: Communicator, subject: str, described: Described, *, remedy: str = SAME_MODEL
) -> None:
    """Raise :class:`MismatchError` on every rank unless all ranks pass the same ``described``."""
    text = json.dumps(list(described), sort_keys=True).encode()
    digest = hashlib.sha256(text).digest()[:8]
    digests = _gather_equal(communicator, torch.tensor(list(digest), dtype=torch.uint8, device="cpu"))
    if all(other == digests[0] for other in digests):
        return
    texts = [json.loads(payload) for payload in gather_bytes(communicator, text)]
    for rank, theirs in enumerate(texts):
        difference = _first_difference(texts[0], theirs)
        if difference is not None:
            raise MismatchError(f"ranks 0 and {rank} differ in {subject}: {_render(difference, rank)}. {remedy}")
    raise MismatchError(f"ranks differ in {subject}")


def agree_on_absent(communicator: Communicator, absent: Iterable[int], count: int) -> frozenset[int]:
    """Which of ``count`` parameters all ranks report as absent. Collective."""
    present = torch.ones(count, dtype=torch.int32, device="cpu")
    present[list(absent)] = 0
    shared = present.to(communicator.device)
    communicator.all_reduce(shared, "max").wait()
    return frozenset(index for index, flag in enumerate(shared.tolist()) if not flag)


def make_together(communicator: Communicator, what: str, make: Callable[[], T]) -> T:
    """The result of ``make``, if it succeeds on all ranks; otherwise ConfigurationError on all of them. Collective.

    ``make`` may fail on a single rank, so it must not wait for another rank, which may have failed in it. ``what``
    completes "rank 1 could not …"; a ConfigurationError is passed on as it is.
    """
    made: list[T] = []
    reason = b""
    try:
        made.append(make())
    except ConfigurationError as error:
        reason = str(error).encode()
    except (OSError, RuntimeError, MemoryError) as error:
        name = rank_name(communicator.group, communicator.rank)
        reason = f"{name} could not {what}: {str(error) or type(error).__name__}".encode()
    reasons = [each for each in gather_bytes(communicator, reason) if each]
    if reasons:
        raise ConfigurationError(reasons[0].decode())
    return made[0]


def together(
    communicator: Communicator, what: str, work: Callable[[], tuple[T, Any]], undo: Undo | None = None
) -> tuple[T, list[Any]]:
    """Run ``work`` on every rank. Collective.

    It returns what this rank keeps and what it shares with the others, as JSON; this returns the first, and what every
    rank shares. If it raises anywhere, ``undo`` is called everywhere; then this raises everywhere: the own error where
    there is one, a :class:`PeerFailedError` that names the ranks elsewhere.
    """
    error: Exception | None = None
    try:
        kept, shared = work()
        message = {"shared": shared}
    except Exception as caught:
        error = caught
        message = {"error": f"{type(caught).__name__}: {caught}"}
    answers = gather_json(communicator, message)
    failures = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
    if error is not None:
        refuse(communicator, error, undo)
    if failures:
        refuse(communicator, PeerFailedError(f"could not {what}, because of {'; '.join(failures)}"), undo)
    return kept, [answer["shared"] for answer in answers]


def refuse(communicator: Communicator, error: Exception, undo: Undo | None = None) -> None:
    """Raise ``error``, each rank its own, when all ranks have called ``undo``. Collective, and always raises."""
    if undo is not None:
        with log_errors("undoing it failed"):
            undo()
        gather_json(communicator, None)
    raise error


def gather_json(communicator: Communicator, message: Any) -> list[Any]:
    """Every rank's ``message``, which JSON can say, in rank order."""
    return [json.loads(payload) for payload in gather_bytes(communicator, json.dumps(message).encode())]


def gather_bytes(communicator: Communicator, payload: bytes) -> list[bytes]:
    """Every rank's ``payload``, in rank order. They may differ in length."""
    lengths = [int(length) for length in _gather_equal(communicator, torch.tensor([len(payload)], device="cpu"))]
    if not any(lengths):
        return [b""] * communicator.world_size
    padded = torch.zeros(max([1, *lengths]), dtype=torch.uint8, device="cpu")
    if payload:
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    gathered = torch.empty(padded.numel() * communicator.world_size, dtype=torch.uint8, device=communicator.device)
    communicator.all_gather(gathered, padded.to(communicator.device)).wait()
    rows = gathered.cpu().view(communicator.world_size, -1)
    return [bytes(row[:length].tolist()) for row, length in zip(rows, lengths, strict=True)]


def _gather_equal(communicator: Communicator, row: torch.Tensor) -> list[Any]:
    gathered = torch.empty(row.numel() * communicator.world_size, dtype=row.dtype, device=communicator.device)
    communicator.all_gather(gathered, row.to(communicator.device)).wait()
    rows = gathered.cpu().view(communicator.world_size, -1).tolist()
    return [row[0] for row in rows] if row.numel() == 1 else rows


def _first_difference(ours: list[Any], theirs: list[Any]) -> tuple[str, str, Any, Any] | None:
    for mine, other in zip(ours, theirs, strict=False):
        if mine == other:
            continue
        if mine[0] != other[0] or not isinstance(mine[1], dict):
            name = mine[0] if mine[0] == other[0] else "name"
            values = (mine[1], other[1]) if mine[0] == other[0] else (mine[0], other[0])
            return ("", name, *values)
        for key in mine[1]:
            if mine[1][key] != other[1].get(key):
                return (mine[0], key, mine[1][key], other[1].get(key))
    if len(ours) != len(theirs):
        longer = ours if len(ours) > len(theirs) else theirs
        extra = longer[min(len(ours), len(theirs))][0]
        return ("number of entries", f"the first only one of them has is {extra!r}", len(ours), len(theirs))
    return None


def _render(difference: tuple[str, str, Any, Any], rank: int) -> str:
    where, what, ours, theirs = difference
    subject = f"{where}, {what}" if where else what
    return f"{subject}: rank 0 has {ours!r}, rank {rank} has {theirs!r}"
