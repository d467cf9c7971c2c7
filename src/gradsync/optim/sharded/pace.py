"""Measures how much time the link has left in backward, and chooses the shares to gather then.

Reduce-scatters are paced by backward; gathers can hide behind the next forward, in the order in which it needs them.
With gathers of G seconds and a forward of F, a layer at fraction x of the forward needs the gathers of all layers up to
it, x G, after x F. Where G is longer, the forward waits. The link may have time in backward for some gathers: those of
layers spread evenly over the model, since what is reduced last is needed first. ::

    backward   ─── reduce-scatters ───────────────────▶│ forward
    wire       0  1  2 [2]  3  4  5 [5]  6  7  8 ...  11│ 11 10 9 8 7 6 4 3 1 0        [n]: an early gather

It is measured in a few windows without early gathers. All ranks use the mean, so they choose the same.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gradsync.communicator import Communicator, Handle

__all__ = ["PLANNED_AFTER", "Pace", "Times", "plan_early"]

# The number of windows that are skipped after buckets were rebuilt, and of those that are measured.
SETTLE, MEASURE = 2, 5
PLANNED_AFTER = SETTLE + MEASURE + 1
# Of the time that is left between reduce-scatters: they must not be late, and the last ones not at all.
CAUTION = 0.75
LAST_PART = 0.25


@dataclass(frozen=True, kw_only=True)
class Times:
    """In seconds: a forward; from the first reduce-scatter to the last; all gathers, one behind the other."""

    forward: float
    backward: float
    gathers: float


def plan_early(times: Times, sizes: Sequence[int], *, gathered: float) -> list[int]:
    """Which of the buckets, with gathers of these ``sizes``, come early. ``gathered`` is what gathers send, against
    reduce-scatters."""
    if times.gathers <= times.forward:
        # They are hidden as it is.
        return []
    # Reduce-scatters come with gaps, and each may be faster than all would be, by what queues on the way hold. Gathers
    # follow each other without a gap, so they tell how long both take.
    reducing = times.gathers / gathered * sum(sizes[:-1]) / sum(sizes)
    part = min(CAUTION * (times.backward - reducing), times.gathers - times.forward) / times.gathers
    return _spread(part, sizes[: int(len(sizes) * (1 - LAST_PART))])


def _spread(part: float, sizes: Sequence[int]) -> list[int]:
    """Places of as much as ``part`` of all ``sizes``, evenly spread."""
    chosen, done = [], 0.0
    for place, before in enumerate(itertools.accumulate(sizes)):
        if done + sizes[place] <= part * before:
            chosen.append(place)
            done += sizes[place]
    return chosen


class Pace:
    """Measurements of one rank since its buckets were built."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Measure again: buckets have changed."""
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

    # -- events --------------------------------------------------------------------------------------------------

    def gather_started(self, handle: Handle) -> None:
        """New parameters are being gathered, behind earlier gathers."""
        if self.is_measuring:
            self._gathered.add(handle, self._clock)

    def stepped(self) -> None:
        """A step has ended."""
        self._stepped_at, self._waited = self._clock(), 0.0

    def waited(self, seconds: float) -> None:
        """A forward, or another reader of parameters, has waited for them."""
        self._waited += seconds

    def forward_ended(self) -> None:
        """Buckets are needed for gradients."""
        if self._stepped_at is not None and self.is_measuring:
            self._forwards.append(self._clock() - self._stepped_at - self._waited)
        self._stepped_at = None

    def window_began(self) -> bool:
        """Ranks are negotiating before the first bucket: True if it is time to :meth:`agree`. The same on all ranks."""
        if self._starts:
            self._backwards.append(self._starts[-1] - self._starts[0])
        if self._gathered.seconds is not None:
            self._gathers.append(self._gathered.seconds)
        self._starts, self._gathered = [], _Span()
        self._windows += 1
        return self._windows == PLANNED_AFTER

    def bucket_started(self) -> None:
        """A reduce-scatter has started; it may be the last one, after the end of backward."""
        if self.is_measuring:
            self._starts.append(self._clock())

    def agree(self, communicator: Communicator) -> Times:
        """The measurements, the same on all ranks. Collective."""
        mine = [statistics.median(each) if each else 0.0 for each in (self._forwards, self._backwards, self._gathers)]
        means = torch.tensor(mine, dtype=torch.float64, device=communicator.device)
        communicator.all_reduce(means).wait()
        forward, backward, gathers = (means / communicator.world_size).tolist()
        return Times(forward=forward, backward=backward, gathers=gathers)


class _Span:
    """The time from the start of the first of several collectives to the end of the last."""

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
        """The duration, if all have ended."""
        return None if self._began is None or self._left else self._ended - self._began
