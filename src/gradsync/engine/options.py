"""What a synchronizer is told when it is made."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from gradsync.bucket.layout import BucketCaps
from gradsync.bucket.tuner import BucketTuner
from gradsync.communicator import Communicator
from gradsync.engine.observer import Observer, Observers
from gradsync.reduction import Mean, Reduction

__all__ = ["ParameterKeeper", "Schedule", "SynchronizerOptions"]

Schedule = Literal["overlapped", "bucketed", "naive"]


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
    """How gradients travel. ``schedule`` is *overlapped* (buckets start during backward), *bucketed* (after it) or
    *naive* (one collective per parameter, after it). ``droppable`` says that modules announce parameters as absent,
    ``accumulation_dtype`` in what narrow gradients add up, and ``tuner`` may change the caps in the first windows."""

    communicator: Communicator
    caps: BucketCaps
    reduction: Reduction = field(default_factory=Mean)
    schedule: Schedule = "overlapped"
    observer: Observer | None = None
    keeper: ParameterKeeper | None = None
    droppable: bool = False
    accumulation_dtype: torch.dtype | None = None
    tuner: BucketTuner | None = None

    @property
    def watchers(self) -> Observer | None:
        """Who is to be told of what happens, if anybody."""
        tuner = None if self.tuner is None or self.tuner.finished else self.tuner
        if tuner is None or self.observer is None:
            return tuner or self.observer
        return Observers(self.observer, tuner)
