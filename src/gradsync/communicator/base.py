"""The communicator interface that the engine uses: start a collective, get a handle, wait for it.

Every communicator must follow the rules below. The simplest way to write one is to derive from
:class:`~gradsync.communicator.base_communicator.BaseCommunicator`, which checks arguments, numbers collectives, keeps
the first failure, logs, and runs stages; that leaves five methods that move bytes. ``in_process.py`` is the shortest
example, and ``tests/communicator/test_communicators.py`` holds every communicator to the contract.

**Order.** Every rank starts the same collectives in the same order on a communicator, with the same sizes and dtypes.
That is the caller's duty, not the communicator's. A collective may be started while earlier ones are in flight, and
handles may be waited for in any order, on any thread.

**Memory.** A collective owns its tensors from start to completion: nothing else may write to them, or read an output.
An output may alias the part of the input that it replaces (the share of a reduce-scatter, of an all-gather), and no
other part.

**Completion.** ``wait()`` orders what follows after the collective. On the CPU it blocks the calling thread until the
result is available; on CUDA it makes the current stream wait and returns at once. If the collective failed, every call
raises its error.

**Stages.** When later collectives depend on the results of earlier ones, chain them with :meth:`Handle.then` instead of
waiting in between, so that all of the work overlaps with the caller's::

    first = communicator.reduce_scatter(share, gradients)
    whole = first.then(lambda: (shrink(share, small), communicator.all_gather(everybodys, small))[-1])
    other = communicator.all_reduce(loss)     # in the order of all ranks after what the stage starts
    whole.wait()

A stage's place in the order is where ``then`` was called, and what it starts has that place, too. Ranks reach the end
of ``first`` at different times, but the order of collectives is the same on all of them. Therefore ``then``, too, must
be called in the same order on all ranks. Inside a stage, a collective may be waited for at once. A stage must not wait
for a collective that was started after its own ``then``: that one comes later in the order.

On the CPU a stage runs on a thread of the communicator, or on the thread that waits for it, without recording
gradients. On CUDA it is called at once, on its own stream, which is ordered after the collective and after the caller's
stream, so that the host never waits; tensors that it uses must be kept until the returned handle has been waited for.
An exception in a stage breaks the communicator: the other ranks may already run what the stage would have started.

**Failures are permanent.** A collective that failed, timed out or was interrupted leaves the ranks out of step, and the
next one could deliver the bytes of a different one. So after the first failure, which :attr:`Communicator.failure`
keeps, every new collective immediately raises an error of the same class with the same text, and collectives in flight
either raise it or complete normally. Arguments that cannot be honoured are refused with ConfigurationError before
anything is sent or counted; they break nothing. Errors name this rank, the number of the collective on this
communicator (from 1; ``7.2`` is the second in stage 7) and which collective it was.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from gradsync.base.errors import GradsyncError

__all__ = ["Communicator", "Counts", "Handle", "ReduceOp", "Stage"]

ReduceOp = Literal["sum", "average", "max"]
"""How the tensors of all ranks become one."""

Counts = Sequence[int] | None
"""Elements a rank, in rank order, of shares that differ in size. None: all are equal."""


@runtime_checkable
class Handle(Protocol):
    """A collective in flight, or a stage."""

    def wait(self) -> None:
        """Return when the result may be used, or raise the error. Any number of times, on any thread."""

    def done(self) -> bool:
        """Whether :meth:`wait` would return or raise at once. Never blocks and never raises.

        On CUDA, where it always does, whether the device is done.
        """

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the collective has completed or failed, on the thread that completes it; at once if it
        has.

        On CUDA it is called on the host when the collective has been ordered, with the current stream ordered after it.
        It must be quick and start no collective: only stages have a place in the order.
        """

    def then(self, stage: "Stage") -> "Handle":
        """Call ``stage`` after this collective and before any that is started later on the communicator.

        Collectives that the stage starts on the communicator take the stage's place in the order. The handle is done
        when the stage is done, and the handle that it returned, if any; it raises the error of this collective, of the
        stage, or of the returned handle.
        """

    def describe(self) -> str:
        """Text for errors and logs: ``collective 12 (all_reduce sum of 1000 × torch.float32)``."""


Stage = Callable[[], Handle | None]
"""What may follow a collective: it computes, and may start collectives and return the handle of the last."""


@runtime_checkable
class Communicator(Protocol):
    """A group of ranks and the collectives over it."""

    @property
    def rank(self) -> int:
        """This process's number in the group."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    @property
    def group(self) -> Any:
        """The ``torch.distributed`` process group behind it, whose order of collectives it shares, or None."""

    @property
    def device(self) -> torch.device:
        """The device for small messages about the gradients, as opposed to the gradients themselves."""

    @property
    def failure(self) -> GradsyncError | None:
        """The first failure, after which nothing more can be started."""

    def averages(self, device: torch.device) -> bool:
        """Whether ``op="average"`` costs no more than ``op="sum"`` for tensors on that device.

        If it does cost more, gradients are divided while they are copied into the bucket, which saves a pass.
        """

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of zeros, in memory that the communicator can read directly."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Handle:
        """Combine ``tensor`` over all ranks, in place. All ranks end with the same bits."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> Handle:
        """Overwrite ``tensor`` with that of rank ``source``."""

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, counts: Counts = None) -> Handle:
        """Put the flat ``tensor`` of every rank, in rank order, into the flat ``output``.

        Rank r contributes ``counts[r]`` elements, which may be zero; by default all contribute the same number.
        """

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = "sum", counts: Counts = None
    ) -> Handle:
        """Combine the flat ``tensor`` over all ranks and keep this rank's share in ``output``.

        Shares are in rank order; that of rank r has ``counts[r]`` elements, which may be zero; by default all are
        equal.
        """

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, output_counts: Counts = None, input_counts: Counts = None
    ) -> Handle:
        """Send one part of the flat ``tensor`` to every rank, and put the parts received, in rank order, into flat
        ``output``.

        Rank r gets ``input_counts[r]`` elements and sends ``output_counts[r]``; by default parts are equal. What one
        rank expects from another must be what that one sends.
        """

    def abort(self, reason: str) -> None:
        """Give the communicator up: what runs or is started here later raises CommunicatorLostError with ``reason``.

        If the transport can notify the other ranks, they raise an error that names this one; otherwise they run into
        their timeout. Never blocks; may be called from any thread, any number of times.
        """
