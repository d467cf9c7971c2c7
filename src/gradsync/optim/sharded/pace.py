"""How long the wire has time in backward, and which shares are to be gathered then.

Reduce-scatters are paced by backward; gathers have the next forward to hide behind, in the order in which it needs
them. With gathers of G seconds and a forward of F, a layer at the fraction x of the forward needs the gathers of all
layers up to it, x G, after x F. Where G is longer, the forward waits. The wire may have time in backward to do some of
them before: of layers that are spread evenly over the model, since what is reduced last is needed first. ::

    backward   ─── reduce-scatters ───────────────────▶│ forward
    wire       0  1  2 [2]  3  4  5 [5]  6  7  8 ...  11│ 11 10 9 8 7 6 4 3 1 0        [n]: an early gather

It is measured in a few windows without early gathers, and the same on all ranks: they take the mean.
"""

import statistics
import time
from collections.abc import Callable

import torch

from gradsync.communicator import Communicator, Handle
from gradsync.observe.plan.early import Times, plan_early

__all__ = ["PLANNED_AFTER", "Pace", "Times", "plan_early"]

# Windows that are not measured after buckets were laid out, and those that are.
SETTLE, MEASURE = 2, 5
PLANNED_AFTER = SETTLE + MEASURE + 1


class Pace:
    """What one rank has measured since its buckets were laid out."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Measure anew: buckets are others."""
        self._windows = 0
        self._forwards: list[float] = []
        self._backwards: list[float] = []
        self._gathers: list[float] = []
        self._stepped_at: float | None = None
        self._waited = 0.0
        self._starts: list[float] = []
        self._gathered = _Span()

    @property
    def is_measuring(self) -> bool:
        return SETTLE < self._windows <= SETTLE + MEASURE

    # -- what happens ----------------------------------------------------------------------------------------------

    def gather_started(self, handle: Handle) -> None:
        """New parameters are on their way, behind those before."""
        if self.is_measuring:
            self._gathered.add(handle, self._clock)

    def stepped(self) -> None:
        """A step has ended."""
        self._stepped_at, self._waited = self._clock(), 0.0

    def waited(self, seconds: float) -> None:
        """A forward, or who else needed parameters, has waited for them."""
        self._waited += seconds

    def forward_ended(self) -> None:
        """Buckets are wanted for gradients."""
        if self._stepped_at is not None and self.is_measuring:
            self._forwards.append(self._clock() - self._stepped_at - self._waited)
        self._stepped_at = None

    def window_began(self) -> bool:
        """Ranks have met before the first bucket: True if it is time to :meth:`agree`. On all ranks alike."""
        if self._starts:
            self._backwards.append(self._starts[-1] - self._starts[0])
        if self._gathered.seconds is not None:
            self._gathers.append(self._gathered.seconds)
        self._starts, self._gathered = [], _Span()
        self._windows += 1
        return self._windows == PLANNED_AFTER

    def bucket_started(self) -> None:
        """A reduce-scatter has started; the last of them when backward has ended."""
        if self.is_measuring:
            self._starts.append(self._clock())

    def agree(self, communicator: Communicator) -> Times:
        """What was measured, the same on all ranks. Collective."""
        mine = [statistics.median(each) if each else 0.0 for each in (self._forwards, self._backwards, self._gathers)]
        means = torch.tensor(mine, dtype=torch.float64, device=communicator.device)
        communicator.all_reduce(means).wait()
        forward, backward, gathers = (means / communicator.world_size).tolist()
        return Times(forward=forward, backward=backward, gathers=gathers)


class _Span:
    """From the start of the first to the end of the last of several collectives."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._ended = 0.0
        self._left = 0

    def add(self, handle: Handle, clock: Callable[[], float]) -> None:
        self._began = clock() if self._began is None else self._began
        self._left += 1
        handle.when_done(lambda: self._end(clock()))

    def _end(self, now: float) -> None:
        self._ended, self._left = max(self._ended, now), self._left - 1

    @property
    def seconds(self) -> float | None:
        """If all have ended."""
        return None if self._began is None or self._left else self._ended - self._began
