"""The learning rate over a run: linear warm-up, then cosine decay."""

import math
from collections.abc import Callable

__all__ = ["warmup_cosine"]


def warmup_cosine(warmup: int, total: int, *, floor: float = 0.1) -> Callable[[int], float]:
    """The factor for step ``n`` of ``total``: reaches 1 after ``warmup`` steps and ``floor`` at the end."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = (step - warmup) / max(1, total - warmup)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return factor
