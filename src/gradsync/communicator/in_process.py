"""Ranks that are threads of one process: for tests, the user's and ours.

A collective is a *round*: every rank lays its tensor down, the last one to come computes the result for all, in rank
order, and everybody takes it from there. A rank that never comes is named when the others have waited long enough; a
rank that fails is named at once.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gradsync.communicator.base import Handle, ReduceOp
from gradsync.errors import ConfigurationError, MismatchError, PeerFailedError

__all__ = ["InProcessCommunicator", "InProcessWorld"]

Combine = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@dataclass(kw_only=True)
class _Round:
    """One collective: who has come, with what, and the outcome."""

    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    results: list[torch.Tensor] | None = None
    error: Exception | None = None
    left: int = 0


class InProcessWorld:
    """The meeting place of ``world_size`` threads."""

    def __init__(self, world_size: int, *, timeout: float = 60.0) -> None:
        if world_size < 1:
            raise ConfigurationError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.timeout = timeout
        self._rounds: dict[int, _Round] = {}
        self._failure: PeerFailedError | None = None
        self._changed = threading.Condition()

    def communicator(self, rank: int) -> "InProcessCommunicator":
        return InProcessCommunicator(self, rank)

    def fail(self, rank: int, cause: BaseException) -> None:
        """Tell everybody who waits, now or later, that ``rank`` is gone."""
        with self._changed:
            if self._failure is None:
                self._failure = PeerFailedError(f"rank {rank} failed: {type(cause).__name__}: {cause}")
            self._changed.notify_all()

    def join(self, number: int, rank: int, kind: str, tensor: torch.Tensor, combine: Combine) -> None:
        with self._changed:
            current = self._rounds.setdefault(number, _Round())
            current.inputs[rank] = tensor
            current.kinds[rank] = kind
            if len(current.inputs) == self.world_size:
                self._conclude(current, combine)
                self._changed.notify_all()

    def result(self, number: int, rank: int) -> torch.Tensor:
        with self._changed:
            current = self._rounds[number]
            done = self._changed.wait_for(
                lambda: current.results is not None or current.error or self._failure, self.timeout
            )
            if current.results is None:
                if current.error is not None:
                    raise current.error
                if self._failure is not None:
                    raise self._failure
                missing = sorted(set(range(self.world_size)) - set(current.inputs))
                assert not done
                raise PeerFailedError(
                    f"rank {rank} waited {self.timeout:g} s in collective {number} ({current.kinds[rank]}) for "
                    f"ranks {missing}. Every rank must run the same collectives in the same order"
                )
            outcome = current.results[rank]
            current.left += 1
            if current.left == self.world_size:
                del self._rounds[number]
            return outcome

    def _conclude(self, current: _Round, combine: Combine) -> None:
        if len(set(current.kinds.values())) > 1:
            kinds = ", ".join(f"rank {rank}: {kind}" for rank, kind in sorted(current.kinds.items()))
            current.error = MismatchError(f"ranks started different collectives: {kinds}")
            return
        try:
            with torch.no_grad():
                current.results = combine([current.inputs[rank] for rank in range(self.world_size)])
        except Exception as error:
            # It is everybody's: the rank that came last only happens to be the one that computes.
            current.error = error


class _TakeResult:
    """Copies a round's outcome to where the caller wants it."""

    def __init__(self, world: InProcessWorld, number: int, rank: int, output: torch.Tensor) -> None:
        self._world, self._number, self._rank, self._output = world, number, rank, output

    def wait(self) -> None:
        result = self._world.result(self._number, self._rank)
        with torch.no_grad():
            self._output.copy_(result)


class InProcessCommunicator:
    """One thread's end of an :class:`InProcessWorld`."""

    def __init__(self, world: InProcessWorld, rank: int) -> None:
        if not 0 <= rank < world.world_size:
            raise ConfigurationError(f"rank must be in 0..{world.world_size - 1}, got {rank}")
        self.world = world
        self._rank = rank
        self._rounds_started = 0

    def __repr__(self) -> str:
        return f"InProcessCommunicator(rank {self.rank} of {self.world_size})"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self.world.world_size

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def averages(self, device: torch.device) -> bool:
        return False

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Handle:
        def combine(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            total = tensors[0].clone()
            for other in tensors[1:]:
                total = torch.maximum(total, other) if op == "max" else total.add_(other)
            if op == "average":
                total.div_(len(tensors))
            return [total] * len(tensors)

        return self._start(f"all_reduce {op}", tensor, tensor, combine)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Handle:
        def combine(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [tensors[source].clone()] * len(tensors)

        return self._start(f"broadcast from {source}", tensor, tensor, combine)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        def combine(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [torch.cat(tensors)] * len(tensors)

        return self._start("all_gather", output, tensor, combine)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        def combine(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            total = tensors[0].clone()
            for other in tensors[1:]:
                total.add_(other)
            return list(total.chunk(len(tensors)))

        return self._start("reduce_scatter", output, tensor, combine)

    def _start(self, kind: str, output: torch.Tensor, tensor: torch.Tensor, combine: Combine) -> Handle:
        number = self._rounds_started
        self._rounds_started += 1
        described = f"{kind} of {tensor.numel()} × {tensor.dtype}"
        self.world.join(number, self.rank, described, tensor, combine)
        return _TakeResult(self.world, number, self.rank, output)
