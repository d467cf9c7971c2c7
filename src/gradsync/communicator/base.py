"""The wire, as the engine sees it: start a collective, get a handle, wait for it.

``wait()`` orders what follows after the collective. On the CPU it blocks the calling thread until the result is
there; on CUDA it makes the current stream wait and returns at once.

Every rank starts the same collectives in the same order on a communicator. That is the engine's duty, not the
communicator's.
"""

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import torch

__all__ = ["Communicator", "Handle", "ReduceOp", "when_done"]

ReduceOp = Literal["sum", "average", "max"]


@runtime_checkable
class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result may be used. Called once, on the thread that started the collective."""


def when_done(handle: Handle, callback: Callable[[], None]) -> None:
    """Call ``callback`` when the collective ends, on whatever thread ends it. Handles that cannot tell never do.

    On CUDA it is called on the host when the collective is ordered, with the current stream ordered after it.
    """
    if (get_future := getattr(handle, "get_future", None)) is not None:
        get_future().then(lambda _: callback())
    elif (own := getattr(handle, "when_done", None)) is not None:
        own(callback)


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
    def device(self) -> torch.device:
        """Where small messages about the gradients, as opposed to gradients, may lie."""

    def averages(self, device: torch.device) -> bool:
        """Whether ``op="average"`` costs nothing over ``op="sum"`` for tensors there.

        Where it does not, gradients are divided while they land in the bucket, which is a pass saved.
        """

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of zeros in memory that the wire can read directly."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Handle:
        """Combine ``tensor`` over all ranks, in place. All ranks end with the same bits."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> Handle:
        """Overwrite ``tensor`` with that of rank ``source``."""

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        """Put the flat ``tensor`` of every rank, in rank order, into the flat ``output``."""

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        """Sum the flat ``tensor`` over all ranks and keep this rank's share in ``output``."""
