"""How long the wire has time in backward, and which shares are to be gathered then.

With gathers of G seconds and a forward of F, a layer at the fraction x of the forward needs the gathers of all layers
up to it, x G, after x F. Where G is longer, the forward waits. The wire may have time in backward to do some of them
before: of layers that are spread evenly over the model, since what is reduced last is needed first. ::

    backward   ─── reduce-scatters ───────────────▶│ forward
    wire       2  1  0 [0]  5  4  3 [3]  8  7  6 [6]│ 8 7 5 4 2 1        [n]: an early gather

It is measured in a few windows without early gathers, and the same on all ranks: they take the mean.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from gradsync.communicator import Communicator, Handle

__all__ = ["Pace", "spread"]

# Windows that are not measured after buckets were laid out, and those that are.
SETTLE, MEASURE = 2, 5


class Pace:
    """What one rank has measured since its buckets were laid out."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Measure anew: buckets are others."""
        self._windows = 0
        self._forwards: list[float] = []
        self._free: list[float] = []
        self._reducing: list[float] = []
        self._stepped_at: float | None = None
        self._waited = 0.0
        self._starts: list[float] = []
        self._ends: list[float] = []

    @property
    def is_measuring(self) -> bool:
        return SETTLE < self._windows <= SETTLE + MEASURE

    # -- what happens ----------------------------------------------------------------------------------------------

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
        self._end_window()
        self._windows += 1
        return self._windows == SETTLE + MEASURE + 1

    def bucket_started(self, handle: Handle) -> None:
        """A reduce-scatter has started."""
        if self.is_measuring:
            self._starts.append(self._clock())
            ends = self._ends
            handle.when_done(lambda: ends.append(self._clock()))

    def _end_window(self) -> None:
        starts, ends = self._starts, self._ends
        self._starts, self._ends = [], []
        if starts and len(starts) == len(ends):
            # The wire does one after the other.
            spans = [
                (max(start, before), end) for start, before, end in zip(starts, [starts[0], *ends], ends, strict=False)
            ]
            busy = sum(max(0.0, min(end, starts[-1]) - begin) for begin, end in spans)
            self._free.append(max(0.0, starts[-1] - starts[0] - busy))
            self._reducing.append(sum(end - begin for begin, end in spans))

    # -- what follows ----------------------------------------------------------------------------------------------

    def agree(self, communicator: Communicator, *, gathered: float) -> float:
        """The part of the gathers that should come early, in bytes. Collective.

        ``gathered`` is what gathers send, against reduce-scatters.
        """
        mine = [statistics.median(each) if each else 0.0 for each in (self._forwards, self._free, self._reducing)]
        means = torch.tensor([*mine], dtype=torch.float64, device=communicator.device)
        communicator.all_reduce(means).wait()
        forward, free, reducing = (means / communicator.world_size).tolist()
        gathers = reducing * gathered
        if gathers <= forward:
            # They are hidden as it is.
            return 0.0
        return float(min(free / gathers, 1 - forward / gathers))


def spread(part: float, sizes: Sequence[int]) -> list[int]:
    """Places of as much as ``part`` of all ``sizes``, evenly spread. Never the last, which is needed first."""
    chosen, done = [], 0.0
    for place, before in enumerate(itertools.accumulate(sizes[:-1])):
        if done + sizes[place] <= part * before:
            chosen.append(place)
            done += sizes[place]
    return chosen
