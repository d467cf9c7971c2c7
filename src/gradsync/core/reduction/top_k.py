"""Top-k sparsification: sends the gradients of largest magnitude, and none of the others."""

import math

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator, Handle
from gradsync.core.bucket import Bucket
from gradsync.core.reduction.base import Compressing

__all__ = ["TopK"]

# A position is sent as a byte, relative to the start of its block; the count per block is a byte, too.
BLOCK = 255
VALUE_BYTES = torch.float32.itemsize


class TopK(Compressing):
    """Sends ``fraction`` of a bucket's gradients, the largest, as float32, with their positions.

    Bytes grow with the number of ranks, because their largest are at different positions. By itself it does not
    converge: wrap it in
    :class:`~gradsync.core.reduction.error_feedback.ErrorFeedback`.
    """

    def __init__(self, fraction: float) -> None:
        if not 0.0 < fraction <= 1.0:
            raise ConfigurationError(f"TopK sends a fraction of the gradients, above 0 and at most 1, got {fraction!r}")
        self.fraction = float(fraction)

    def __repr__(self) -> str:
        return f"TopK({self.fraction!r})"

    def send(
        self, values: torch.Tensor, bucket: Bucket, communicator: Communicator, lost: torch.Tensor | None = None
    ) -> Handle:
        message = _Message(values.numel(), math.ceil(values.numel() * self.fraction))
        own = message.pack(values)
        if lost is not None:
            lost.copy_(values)
            lost[message.unpack(own)[0]] = 0.0
        everybodys = own.new_empty(communicator.world_size, own.numel())

        def add() -> None:
            values.zero_()
            # In the order of ranks: the same bits everywhere.
            for one in everybodys:
                places, chosen = message.unpack(one)
                values[places] += chosen

        return communicator.all_gather(everybodys.view(-1), own).then(add)


class _Message:
    """The bytes in which ``count`` of ``numel`` numbers are sent.

    They are values, how many lie in each block, and their positions there.
    """

    def __init__(self, numel: int, count: int) -> None:
        self._count, self._blocks = count, -(-numel // BLOCK)
        # A multiple of four, so that the messages of all ranks can be concatenated.
        self._sizes = (count * VALUE_BYTES, self._blocks, count, -(self._blocks + count) % VALUE_BYTES)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        # NaN counts as the largest of all, and is sent.
        places = values.abs().topk(self._count, sorted=False).indices.sort().values
        per_block = torch.bincount(places // BLOCK, minlength=self._blocks)
        packed = values.new_zeros(sum(self._sizes), dtype=torch.uint8)
        chosen, counts, offsets = self._parts(packed)
        chosen.copy_(values[places])
        counts.copy_(per_block)
        offsets.copy_(places % BLOCK)
        return packed

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unpack a message: the positions, and the numbers there."""
        chosen, counts, offsets = self._parts(packed)
        starts = torch.arange(0, self._blocks * BLOCK, BLOCK, device=packed.device)
        places = starts.repeat_interleave(counts.long())
        return places + offsets, chosen

    def _parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chosen, counts, offsets, _ = packed.split(self._sizes)
        return chosen.view(torch.float32), counts, offsets
