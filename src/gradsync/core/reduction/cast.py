"""The mean in a different dtype: half the bytes with bfloat16 or float16, more precision with float32."""

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator, Finishing, Handle
from gradsync.core.bucket import Bucket
from gradsync.core.reduction.codings import Rounded
from gradsync.core.reduction.compressing import Compressing, sends_nothing
from gradsync.core.reduction.exchanged import exchange, gaps_of

__all__ = ["Cast"]


class Cast(Compressing):
    """Sends gradients in ``dtype``.

    In a wider dtype they are summed in it, too. In a narrower one they are summed in float32, whatever the number of
    ranks: see :mod:`gradsync.core.reduction.exchanged`. float16, whose numbers end at 65504, gets a scale for every
    thousand of them, so that neither large nor small gradients are lost.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ConfigurationError(f"Cast needs a floating-point dtype such as torch.bfloat16, got {dtype}")
        self.dtype = dtype
        self._coding = Rounded(dtype)

    def __repr__(self) -> str:
        return f"Cast({self.dtype})"

    @property
    def carries_tail(self) -> bool:  # type: ignore[override]
        # A flag that shared its scale with large numbers would vanish.
        return not self._coding.scales

    def unit(self, ranks: int) -> int:
        return self._coding.multiple * ranks if self._coding.scales else 1

    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        wire = bucket.wire if self.carries_tail else bucket.payload.data
        if not self.carries_tail and sends_nothing(bucket, communicator):
            return super().start(bucket, communicator, divisor)
        if wire.dtype == self.dtype or communicator.world_size == 1:
            return communicator.all_reduce(wire)
        if torch.promote_types(wire.dtype, self.dtype) == self.dtype or self._adds_alike(communicator):
            cast = wire.to(self.dtype)
            return Finishing(communicator.all_reduce(cast), lambda: wire.copy_(cast))
        values = wire.float()
        gaps = [] if self.carries_tail else gaps_of(bucket)
        return exchange(self._coding, values, communicator, gaps=gaps).then(lambda: _put(values, wire))

    def _adds_alike(self, communicator: Communicator) -> bool:
        """Whether numbers can be summed in place equally well: with two, the sum is rounded once either way."""
        return communicator.world_size == 2 and not self._coding.scales

    def send(
        self, values: torch.Tensor, bucket: Bucket, communicator: Communicator, lost: torch.Tensor | None = None
    ) -> Handle:
        return exchange(self._coding, values, communicator, lost, gaps=gaps_of(bucket))


def _put(values: torch.Tensor, wire: torch.Tensor) -> None:
    wire.copy_(values)
