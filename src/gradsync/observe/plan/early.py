"""Which gathers of new parameters do not wait for the step: one rule for the engine that runs them and for the
prediction.

Gathers can hide behind the next forward. If they take longer, there may be time to communicate some of them during
backward: those of layers spread evenly over the model, because what is reduced last is needed first.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Times", "plan_early"]

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
