"""Base class of reductions that switch between several others, at points where all ranks negotiate."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gradsync.communicator import Communicator, Handle
from gradsync.core.bucket import Bucket, BucketLayout
from gradsync.core.reduction.base import Reduction

__all__ = ["TRIAL", "Changing", "StepWatch", "in_ms"]

# Windows per trial, without the first, whose buckets are new.
TRIAL = 6


@dataclass(kw_only=True)
class StepWatch:
    """Measures how long windows take, and how much of that comes after backward, when nothing hides communication."""

    clock: Callable[[], float] = time.perf_counter
    steps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    began: float | None = None
    flushed: float | None = None

    def window_began(self) -> None:
        now = self.clock()
        if self.began is not None:
            self.steps.append(now - self.began)
        self.began = now

    def backward_ended(self) -> None:
        """The last bucket starts."""
        self.flushed = self.clock()

    def window_ended(self) -> None:
        if self.flushed is not None:
            self.waits.append(self.clock() - self.flushed)
        self.flushed = None

    def forget(self, *, began: bool = False) -> None:
        """Discard all measurements so far; and, if ``began``, that of the running window, too."""
        self.steps, self.waits = [], []
        if began:
            self.began = None

    def read(self, communicator: Communicator) -> tuple[float, float]:
        """The seconds per window, and those spent waiting in it, over all ranks. Collective.

        The slowest rank counts: the others wait for it, not for communication.
        """
        steps, waits = self.steps[-TRIAL:], self.waits[-TRIAL:]
        numbers = [statistics.median(steps), -statistics.median(waits or [0.0])]
        message = torch.tensor(numbers, dtype=torch.float64, device=communicator.device)
        communicator.all_reduce(message, "max").wait()
        step, wait = message.tolist()
        self.forget(began=True)
        return step, -wait


class Changing(Reduction):
    """Delegates to ``current``, whichever reduction that is at the moment."""

    current: Reduction

    @property
    def carries_tail(self) -> bool:
        return self.current.carries_tail

    @property
    def scatters(self) -> bool:
        return self.current.scatters

    @property
    def keeps_layout(self) -> bool:
        return self.current.keeps_layout

    def unit(self, ranks: int) -> int:
        return self.current.unit(ranks)

    def landing_scale(self, bucket: Bucket, communicator: Communicator, divisor: float) -> float:
        return self.current.landing_scale(bucket, communicator, divisor)

    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        return self.current.start(bucket, communicator, divisor)

    def ended(self, *, well: bool, correction: float | torch.Tensor = 1.0) -> None:
        self.current.ended(well=well, correction=correction)

    def rescaled(self, factor: float | torch.Tensor) -> None:
        self.current.rescaled(factor)

    def rebuilt(self, layout: BucketLayout) -> None:
        self.current.rebuilt(layout)


def in_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
