"""What a synchronizer is told when it is made."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from gradsync.bucket import BucketCaps
from gradsync.bucket.tuner import BucketTuner
from gradsync.communicator import Communicator
from gradsync.engine.observer import Observers
from gradsync.engine.policy import SyncPolicy

__all__ = ["ParameterKeeper", "SynchronizerOptions"]


class ParameterKeeper(Protocol):
    """Has exchanged what parameters hold for the duration of a forward and backward, and takes it back."""

    def resume(self) -> None:
        """A backward begins; an earlier one may have ended since its forward."""

    def release(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """These parameters take no further part in the backward; their gradients are about to be gathered."""

    def release_all(self) -> None:
        """The backward has ended."""


@dataclass(frozen=True, kw_only=True)
class SynchronizerOptions:
    """``caps`` are those to begin with, which ``tuner`` may change in the first windows. ``droppable`` says that
    modules announce parameters as absent."""

    communicator: Communicator
    caps: BucketCaps
    policy: SyncPolicy = field(default_factory=SyncPolicy)
    keeper: ParameterKeeper | None = None
    droppable: bool = False
    tuner: BucketTuner | None = None

    def watchers(self) -> Observers | None:
        """Who is to be told of what happens, if anybody."""
        watching = [each for each in (self.policy.observer, self.tuner) if each is not None]
        return Observers(*watching) if watching else None
