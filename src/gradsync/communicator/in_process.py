"""Ranks as threads of one process: for tests, the user's and ours.

A collective is a *round*: every rank contributes its tensor, and the last one to arrive computes the result in rank
order and writes it where each rank wants it. A rank that never arrives is named when the others have waited long
enough; a rank that fails is named at once.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsync.base.errors import CommunicatorLostError, ConfigurationError, GradsyncError, MismatchError
from gradsync.communicator.background import call_back
from gradsync.communicator.base import Handle, ReduceOp
from gradsync.communicator.base_communicator import BaseCommunicator, Shares, Sizes
from gradsync.communicator.checks import collectives_differ
from gradsync.communicator.collective import Collective
from gradsync.communicator.reducing import combine_in_order

__all__ = ["InProcessCommunicator", "InProcessWorld"]

# What everybody has brought, in rank order, to everybody's results.
Combine = Callable[[list[Any]], list[torch.Tensor]]


# Seconds after which a rank runs beside the one whose turn it is.
PATIENCE = 0.02


class _Turns:
    """Decides which rank's thread runs.

    Nearly every operation of torch releases the interpreter's lock. Threads that can all run hand it on each time, and
    three of them take twice as long as they would one after another.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._own = threading.local()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        self._take()
        self._own.is_rank = True
        try:
            yield
        finally:
            self._own.is_rank = False
            self._give()

    @contextlib.contextmanager
    def left(self, *, unless: bool) -> Iterator[None]:
        """A context in which the calling thread waits for another rank, so that another may run."""
        if unless or not getattr(self._own, "is_rank", False):
            yield
            return
        self._give()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        self._own.has_turn = self._turn.acquire(timeout=PATIENCE)

    def _give(self) -> None:
        if self._own.has_turn:
            self._own.has_turn = False
            self._turn.release()


@dataclass(kw_only=True)
class _Round:
    """One collective: which ranks have arrived, with what, and the outcome."""

    inputs: dict[int, Any] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    callbacks: list[Callable[[], None]] = field(default_factory=list)
    is_over: bool = False
    error: Exception | None = None


class InProcessWorld:
    """The rendezvous of ``world_size`` threads."""

    def __init__(self, world_size: int, *, timeout: float = 60.0) -> None:
        if world_size < 1:
            raise ConfigurationError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.timeout = timeout
        self.failure: CommunicatorLostError | None = None
        self._rounds: dict[int | str, _Round] = {}
        self._changed = threading.Condition()
        self._turns = _Turns()

    def communicator(self, rank: int) -> "InProcessCommunicator":
        return InProcessCommunicator(self, rank)

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the calling thread is a rank: one at a time runs, as others would only be in its way.

        This is a courtesy, not a lock: a thread that waits for something other than a collective does not block the
        others for long.
        """
        return self._turns.taken()

    def fail(self, rank: int, cause: BaseException) -> None:
        """Make everyone who waits, now or later, learn that ``rank`` is gone."""
        self.lose(CommunicatorLostError(f"rank {rank} failed: {type(cause).__name__}: {cause}"))

    def lose(self, failure: CommunicatorLostError) -> None:
        """Have every rank that waits, now or later, raise ``failure``. The first one counts."""
        with self._changed:
            if self.failure is None:
                self.failure = failure
            left, self._rounds = list(self._rounds.values()), {}
            self._changed.notify_all()
        for each in left:
            _call_all_back(each)

    def join(
        self, collective: Collective, rank: int, output: torch.Tensor, brought: Any, combine: Combine
    ) -> "_Joined":
        """Contribute what this rank has ``brought``. ``output`` gets the result when all ranks have arrived."""
        with self._changed:
            current = self._rounds.setdefault(collective.number, _Round())
            current.inputs[rank], current.outputs[rank] = brought, output
            current.kinds[rank] = _kind_of(collective)
            is_last = len(current.inputs) == self.world_size
            if is_last:
                self._conclude(current, combine)
                del self._rounds[collective.number]
                self._changed.notify_all()
        if is_last:
            _call_all_back(current)
        return _Joined(self, current, rank, collective)

    def _conclude(self, current: _Round, combine: Combine) -> None:
        ranks = range(self.world_size)
        try:
            if len(set(current.kinds.values())) > 1:
                raise collectives_differ([current.kinds[rank] for rank in ranks])
            with torch.no_grad():
                results = combine([current.inputs[rank] for rank in ranks])
                for rank in ranks:
                    # Communicators write memory, and that does not show in the version of a tensor.
                    current.outputs[rank].data.copy_(results[rank].view_as(current.outputs[rank]))
        except Exception as error:
            # It is everybody's: the rank that came last only happens to be the one that computes.
            current.error = error
        current.is_over = True
        current.inputs.clear()
        current.outputs.clear()


def _call_all_back(current: _Round) -> None:
    callbacks, current.callbacks = current.callbacks, []
    for callback in callbacks:
        call_back(callback)


def _kind_of(collective: Collective) -> str:
    """What must be the same on all ranks. What they exchange may differ in size."""
    return f"all_to_all of {collective.dtype}" if collective.kind == "all_to_all" else collective.what()


class _Joined:
    """One rank's part in a round."""

    __slots__ = ("_collective", "_rank", "_round", "_world")

    def __init__(self, world: InProcessWorld, current: _Round, rank: int, collective: Collective) -> None:
        self._world, self._round, self._rank, self._collective = world, current, rank, collective

    def wait(self) -> None:
        world, current = self._world, self._round
        with world._turns.left(unless=current.is_over), world._changed:
            if world._changed.wait_for(self.done, world.timeout):
                error = current.error if current.is_over else world.failure
                if error is not None:
                    raise error
                return
            missing = sorted(set(range(world.world_size)) - set(current.inputs))
        raise CommunicatorLostError(
            f"rank {self._rank} waited {world.timeout:g} s in {self._collective.describe()} for ranks {missing}. Every "
            "rank must run the same collectives in the same order"
        )

    def done(self) -> bool:
        return self._round.is_over or self._world.failure is not None

    def when_done(self, callback: Callable[[], None]) -> None:
        with self._world._changed:
            if not self.done():
                self._round.callbacks.append(callback)
                return
        call_back(callback)


class InProcessCommunicator(BaseCommunicator):
    """One thread's end of an :class:`InProcessWorld`."""

    survives_mismatch = True

    def __init__(self, world: InProcessWorld, rank: int) -> None:
        if not 0 <= rank < world.world_size:
            raise ConfigurationError(f"rank must be in 0..{world.world_size - 1}, got {rank}")
        super().__init__(rank, world.world_size)
        self.world = world

    @property
    def failure(self) -> GradsyncError | None:
        return self.state.failure or self.world.failure

    def _all_reduce(self, collective: Collective, tensor: torch.Tensor, op: ReduceOp) -> Handle:
        if self.world_size == 1:
            # A rank that is alone has the result already.
            over = _Joined(self.world, _Round(is_over=True), self.rank, collective)
            return self._issue(collective, lambda: over)
        return self._join(collective, tensor, tensor, lambda tensors: [_combined(tensors, op)] * len(tensors))

    def _broadcast(self, collective: Collective, tensor: torch.Tensor, source: int) -> Handle:
        return self._join(collective, tensor, tensor, lambda tensors: [tensors[source].clone()] * len(tensors))

    def _all_gather(self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, shares: Shares) -> Handle:
        return self._join(collective, output, tensor, lambda tensors: [torch.cat(tensors)] * len(tensors))

    def _reduce_scatter(
        self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, shares: Shares
    ) -> Handle:
        sizes = shares or (output.numel(),) * self.world_size
        return self._join(collective, output, tensor, lambda tensors: list(_combined(tensors, op).split(sizes)))

    def _all_to_all(
        self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, arriving: Sizes, leaving: Sizes
    ) -> Handle:
        return self._join(collective, output, (tensor.split(leaving), arriving), _exchange)

    def _join(self, collective: Collective, output: torch.Tensor, brought: Any, combine: Combine) -> Handle:
        return self._issue(collective, lambda: self.world.join(collective, self.rank, output, brought, combine))

    def _tell_others(self, reason: str) -> None:
        self.world.lose(CommunicatorLostError(self._given_up_text(reason)))


def _combined(tensors: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    total = torch.empty_like(tensors[0])
    combine_in_order(tensors, total, op)
    return total


def _exchange(brought: list[tuple[list[torch.Tensor], tuple[int, ...]]]) -> list[torch.Tensor]:
    for receiver, (_, expected) in enumerate(brought):
        sent = tuple(parts[receiver].numel() for parts, _ in brought)
        if sent != expected:
            raise MismatchError(
                f"rank {receiver} expects {list(expected)} elements from all ranks in turn, but they send {list(sent)}"
            )
    return [torch.cat([parts[receiver] for parts, _ in brought]) for receiver in range(len(brought))]
