"""Interface of a component that temporarily swaps parameter storage (mixed precision)."""

from collections.abc import Sequence
from typing import Protocol

import torch

__all__ = ["ParameterKeeper"]


class ParameterKeeper(Protocol):
    """Swaps parameter values for the duration of a forward and backward, and restores them."""

    def resume(self) -> None:
        """A backward begins; an earlier one may have ended since its forward."""

    def release(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """These parameters take no further part in the backward; their gradients are about to be gathered."""

    def release_all(self) -> None:
        """The backward has ended."""

    def value_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The parameter's value outside of forwards and backwards, which the optimizer updates."""
