"""Who has exchanged what parameters hold while a forward and its backward run, as the engine sees them."""

from collections.abc import Sequence
from typing import Protocol

import torch

__all__ = ["ParameterKeeper"]


class ParameterKeeper(Protocol):
    """Has exchanged what parameters hold for the duration of a forward and backward, and takes it back."""

    def resume(self) -> None:
        """A backward begins; an earlier one may have ended since its forward."""

    def release(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """These parameters take no further part in the backward; their gradients are about to be gathered."""

    def release_all(self) -> None:
        """The backward has ended."""

    def value_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """What the parameter holds outside of forwards and backwards, and the optimizer updates."""
