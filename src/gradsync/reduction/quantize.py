"""Gradients in 8 bits, in 4, or in one: a quarter of the bytes and less."""

from typing import Any

from gradsync.errors import ConfigurationError
from gradsync.reduction.codings import Blocks, Noise, Signs
from gradsync.reduction.exchanged import Exchanged

__all__ = ["Quantize", "Sign"]

BLOCK = 256
BITS = (8, 4)


class Quantize(Exchanged):
    """Whole numbers of ``bits`` bits; ``block`` neighbours share a scale, and their largest is exact.

    ``stochastic`` rounds up or down at random, so that the mean over many windows is right; by default the error of one
    window is smaller, and :class:`~gradsync.reduction.error_feedback.ErrorFeedback` makes up for it.
    """

    def __init__(self, bits: int = 8, *, block: int = BLOCK, stochastic: bool = False, seed: int = 0) -> None:
        if bits not in BITS:
            raise ConfigurationError(f"Quantize offers {' and '.join(map(str, BITS))} bits, got {bits!r}")
        _check_block(block, "Quantize")
        self.bits, self.block, self.stochastic = bits, block, stochastic
        self._noise = Noise(seed) if stochastic else None
        super().__init__(Blocks(bits, block, self._noise))

    def __repr__(self) -> str:
        rest = ("" if self.block == BLOCK else f", block={self.block}") + (", stochastic=True" * self.stochastic)
        return f"Quantize({self.bits}{rest})"

    def state_dict(self) -> dict[str, Any]:
        return {} if self._noise is None else {"noise": self._noise.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._noise is not None:
            self._noise.load_state_dict(state.get("noise", {}))


class Sign(Exchanged):
    """One bit a number; ``block`` neighbours all come out as large as they are on average.

    By itself it does not converge: wrap it in :class:`~gradsync.reduction.error_feedback.ErrorFeedback`.
    """

    def __init__(self, *, block: int = BLOCK) -> None:
        _check_block(block, "Sign")
        self.block = block
        super().__init__(Signs(block), keeps_zeros=False)

    def __repr__(self) -> str:
        return "Sign()" if self.block == BLOCK else f"Sign(block={self.block})"


def _check_block(block: int, name: str) -> None:
    if not isinstance(block, int) or block < 32 or block % 32:
        raise ConfigurationError(f"{name} needs blocks of a multiple of 32 numbers, got {block!r}")
