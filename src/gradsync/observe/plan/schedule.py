"""What is communicated in a step, what it hides behind, and which gathers of new parameters do not wait for the step.

The rule for early gathers is the same for the engine that runs them and for the prediction. Gathers can hide behind the
next forward. If they take longer, there may be time to communicate some of them during backward: those of layers spread
evenly over the model, because what is reduced last is needed first.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gradsync.base.errors import ConfigurationError
from gradsync.observe.plan.network import Operation

__all__ = ["EXACT", "REDUCTIONS", "Overlap", "ReductionCost", "Schedule", "Times", "plan_early"]

Overlap = Literal["backward", "none", "next-forward"]
# Of the time that is left between reduce-scatters: they must not be late, and the last ones not at all.
CAUTION = 0.75
LAST_PART = 0.25


@dataclass(frozen=True, kw_only=True)
class ReductionCost:
    """A way to reduce a bucket of n bytes: collectives on ``share`` · n bytes, one after the other.

    ``encode`` are seconds a byte that the thread of backward spends before them, ``decode`` seconds a byte between and
    after them, in which the wire does nothing for this bucket.
    """

    name: str
    share: float = 1.0
    operations: tuple[Operation, ...] = ("all_reduce",)
    encode: float = 0.0
    decode: float = 0.0

    def __post_init__(self) -> None:
        if not self.share > 0 or self.encode < 0 or self.decode < 0 or not self.operations:
            raise ConfigurationError(
                f"the reduction {self.name} sends a share above 0 of the bytes, by at least one collective, with costs "
                f"of 0 or more; got share={self.share}, encode={self.encode}, decode={self.decode}"
            )


EXACT = ReductionCost(name="mean")

# Scales of a block of 256 numbers are four bytes more. Seconds of coding are those of a core of a CPU server, some GB/s
# in all; a calibration has those of the machine.
_CODED: tuple[Operation, ...] = ("all_to_all", "all_gather")
REDUCTIONS = {
    each.name: each
    for each in (
        EXACT,
        ReductionCost(name="bf16", share=0.5, operations=_CODED, encode=1.5e-10, decode=3e-10),
        ReductionCost(name="fp16", share=0.501, operations=_CODED, encode=4e-10, decode=6e-10),
        ReductionCost(name="int8", share=0.25 + 1 / 256, operations=_CODED, encode=4e-10, decode=6e-10),
        ReductionCost(name="int4", share=0.125 + 1 / 256, operations=_CODED, encode=8e-10, decode=9e-10),
        ReductionCost(name="sign", share=1 / 32 + 1 / 256, operations=_CODED, encode=8e-10, decode=9e-10),
        # Two factors of a matrix of some thousand rows, for rank 4.
        ReductionCost(
            name="low-rank:4", share=0.01, operations=("all_reduce", "all_reduce"), encode=1.2e-9, decode=1.2e-9
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a step is synchronized. ``overlap`` says what a transfer hides behind: backward, as the engine does by
    itself; nothing, as sums after backward do; or the next forward, too, as the sharded optimizer has it.

    ``host`` are seconds of a rank's own for each bucket, in which it does not compute, ``fixed`` the same once a step,
    and ``gather_host`` for each gather of new parameters.
    """

    overlap: Overlap = "backward"
    reduction: ReductionCost = field(default=EXACT)
    host: float = 0.0
    fixed: float = 0.0
    gather_host: float = 0.0


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
