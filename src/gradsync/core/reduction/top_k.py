"""Top-k sparsification: sends the gradients of largest magnitude, and none of the others."""

import math
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator, Handle
from gradsync.core.bucket import Bucket
from gradsync.core.reduction.base import Compressing
from gradsync.core.reduction.codings import Coding
from gradsync.core.reduction.quantize import Cast, CodedReduction

__all__ = ["TopK"]

# A position is sent as a byte, relative to the start of its block; the count per block is a byte, too.
BLOCK = 255
# Messages are of a multiple of so many bytes, so that those of all ranks can be concatenated.
ALIGNMENT = 4
EXACT = Cast(torch.float32)


class TopK(Compressing):
    """Sends ``fraction`` of a bucket's gradients, the largest, with their positions.

    They are sent as ``values`` would send them: by default as float32, in 2 bits each with
    ``TopK(0.01, Quantize(2))``. What this rounding loses is accounted for like what is not sent.

    Bytes grow with the number of ranks, because their largest are at different positions. By itself it does not
    converge: wrap it in :class:`~gradsync.core.reduction.error_feedback.ErrorFeedback`.
    """

    def __init__(self, fraction: float, values: CodedReduction = EXACT) -> None:
        if not 0.0 < fraction <= 1.0:
            raise ConfigurationError(f"TopK sends a fraction of the gradients, above 0 and at most 1, got {fraction!r}")
        if not isinstance(values, CodedReduction):
            raise ConfigurationError(
                f"TopK sends values as one of Quantize, Cast or Sign does, for instance Quantize(2), got {values!r}"
            )
        self.fraction, self.values = float(fraction), values

    def __repr__(self) -> str:
        return f"TopK({self.fraction!r})" if self.values is EXACT else f"TopK({self.fraction!r}, {self.values!r})"

    def send(
        self, values: torch.Tensor, bucket: Bucket, communicator: Communicator, lost: torch.Tensor | None = None
    ) -> Handle:
        coding = self.values.coding_of(bucket, communicator)
        message = _Message(values.numel(), math.ceil(values.numel() * self.fraction), coding)
        own = message.pack(values)
        if lost is not None:
            lost.copy_(values)
            places, chosen = message.unpack(own)
            lost[places] -= chosen
        everybodys = own.new_empty(communicator.world_size, own.numel())

        def add() -> None:
            values.zero_()
            # In the order of ranks: the same bits everywhere.
            for one in everybodys:
                places, chosen = message.unpack(one)
                values[places] += chosen

        return communicator.all_gather(everybodys.view(-1), own).then(add)

    def window_ended(self, *, succeeded: bool, correction: float | torch.Tensor = 1.0) -> None:
        self.values.window_ended(succeeded=succeeded, correction=correction)

    def state_dict(self) -> dict[str, Any]:
        return self.values.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.load_state_dict(state)


class _Message:
    """The bytes in which ``count`` of ``numel`` numbers are sent.

    They are the encoded values, how many lie in each block, and their positions there.
    """

    def __init__(self, numel: int, count: int, coding: Coding) -> None:
        self._count, self._blocks, self._coding = count, -(-numel // BLOCK), coding
        self._coded = -(-count // coding.multiple) * coding.multiple
        nbytes = coding.nbytes(self._coded)
        self._sizes = (nbytes, self._blocks, count, -(nbytes + self._blocks + count) % ALIGNMENT)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        # NaN counts as the largest of all, and is sent.
        places = values.abs().topk(self._count, sorted=False).indices.sort().values
        per_block = torch.bincount(places // BLOCK, minlength=self._blocks)
        packed = values.new_zeros(sum(self._sizes), dtype=torch.uint8)
        coded, counts, offsets, _ = packed.split(self._sizes)
        # The last block is filled up with values of its kind: zeros would distort the scales of some codings.
        filled = torch.arange(self._coded, device=values.device).remainder_(self._count)
        self._coding.encode(values[places[filled]], coded)
        counts.copy_(per_block)
        offsets.copy_(places % BLOCK)
        return packed

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unpack a message: the positions, and the numbers there as all ranks decode them."""
        coded, counts, offsets, _ = packed.split(self._sizes)
        chosen = packed.new_empty(self._coded, dtype=torch.float32)
        self._coding.decode(coded, chosen)
        starts = torch.arange(0, self._blocks * BLOCK, BLOCK, device=packed.device)
        places = starts.repeat_interleave(counts.long())
        return places + offsets, chosen[: self._count]
