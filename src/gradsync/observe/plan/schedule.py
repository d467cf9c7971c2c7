"""What is communicated in a step, and what it hides behind."""

from dataclasses import dataclass, field
from typing import Literal

from gradsync.base.errors import ConfigurationError
from gradsync.observe.plan.network import Operation

__all__ = ["EXACT", "REDUCTIONS", "Overlap", "ReductionCost", "Schedule"]

Overlap = Literal["backward", "none", "next-forward"]


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
