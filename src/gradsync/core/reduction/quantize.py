"""Quantized gradients: 8 bits, 4 bits or one bit per number, a quarter of the bytes and less."""

from typing import Any

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator
from gradsync.core.bucket import Bucket
from gradsync.core.reduction.codings import Blocks, Coding, Noise, Signs
from gradsync.core.reduction.exchanged import Exchanged

__all__ = ["Quantize", "Sign"]

BLOCK = 256
BITS = (8, 4)


class Quantize(Exchanged):
    """Integers of ``bits`` bits; ``block`` neighbours share a scale, and their largest is exact.

    ``stochastic`` rounds up or down at random, so that the mean over many windows is right. By default the error of a
    single window is smaller, and :class:`~gradsync.core.reduction.error_feedback.ErrorFeedback` makes up for it.
    """

    def __init__(self, bits: int = 8, *, block: int = BLOCK, stochastic: bool = False, seed: int = 0) -> None:
        if bits not in BITS:
            raise ConfigurationError(f"Quantize offers {' and '.join(map(str, BITS))} bits, got {bits!r}")
        _check_block(block, "Quantize")
        self.bits, self.block, self.stochastic, self.seed = bits, block, stochastic, seed
        self._windows = 0
        super().__init__(Blocks(bits, block))

    def __repr__(self) -> str:
        block = "" if self.block == BLOCK else f", block={self.block}"
        return f"Quantize({self.bits}{block}" + (f", stochastic=True, seed={self.seed})" if self.stochastic else ")")

    def _coding_of(self, bucket: Bucket, communicator: Communicator) -> Coding:
        if not self.stochastic:
            return self.coding
        # If all ranks erred alike, errors would not average out; and buckets come in no reproducible order.
        return Blocks(self.bits, self.block, Noise(self.seed, communicator.rank, self._windows, bucket.index))

    def ended(self, *, well: bool, correction: float | torch.Tensor = 1.0) -> None:
        self._windows += well

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self._windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._windows = int(state.get("windows", 0))


class Sign(Exchanged):
    """One bit per number; ``block`` neighbours all decode to their average magnitude.

    By itself it does not converge: wrap it in :class:`~gradsync.core.reduction.error_feedback.ErrorFeedback`.
    """

    def __init__(self, *, block: int = BLOCK) -> None:
        _check_block(block, "Sign")
        self.block = block
        super().__init__(Signs(block))

    def __repr__(self) -> str:
        return "Sign()" if self.block == BLOCK else f"Sign(block={self.block})"


def _check_block(block: int, name: str) -> None:
    if not isinstance(block, int) or block < 32 or block % 32:
        raise ConfigurationError(f"{name} needs blocks of a multiple of 32 numbers, got {block!r}")
