"""The mean in another dtype: half the bytes with bfloat16 or float16, more precision with float32."""

import torch

from gradsync.bucket import Bucket
from gradsync.communicator import Communicator, Finishing, Handle
from gradsync.errors import ConfigurationError
from gradsync.reduction.base import Reduction

__all__ = ["Cast"]


class Cast(Reduction):
    """Gradients cross the wire, and are summed, in ``dtype``; they are divided before, so float16 stays in range."""

    carries_tail = True

    def __init__(self, dtype: torch.dtype) -> None:
        if not dtype.is_floating_point:
            raise ConfigurationError(f"Cast needs a floating-point dtype such as torch.bfloat16, got {dtype}")
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Cast({self.dtype})"

    def landing_scale(self, bucket: Bucket, communicator: Communicator, divisor: float) -> float:
        return 1.0 / divisor

    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        wire = bucket.wire
        if wire.dtype == self.dtype:
            return communicator.all_reduce(wire)
        cast = wire.to(self.dtype)
        return Finishing(communicator.all_reduce(cast), lambda: wire.copy_(cast))
