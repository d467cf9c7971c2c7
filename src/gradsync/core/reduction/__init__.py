"""Gradient reductions: one small class per way of reducing a bucket, all behind :class:`Reduction`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.core.reduction.auto import Auto
from gradsync.core.reduction.base import Compressing, Reduction
from gradsync.core.reduction.comm_hook import CommHook, GradBucket
from gradsync.core.reduction.error_feedback import ErrorFeedback
from gradsync.core.reduction.low_rank import LowRank
from gradsync.core.reduction.mean import Mean, ScatteredMean
from gradsync.core.reduction.quantize import Cast, Quantize, Sign
from gradsync.core.reduction.top_k import TopK

__all__ = [
    "Auto",
    "Cast",
    "CommHook",
    "Compressing",
    "ErrorFeedback",
    "GradBucket",
    "LowRank",
    "Mean",
    "Quantize",
    "Reduction",
    "ScatteredMean",
    "Sign",
    "TopK",
    "reduction_by_name",
]

# The candidates of ``auto``.
MILDEST_FIRST = ("bf16", "int8", "int4", "low-rank:4")

# By their names alone. Those that lose so much that training would fail without error feedback come with it.
_PLAIN: dict[str, Callable[[], Reduction]] = {
    "mean": Mean,
    "bf16": lambda: Cast(torch.bfloat16),
    "fp16": lambda: Cast(torch.float16),
    "int8": lambda: Quantize(8),
    "int4": lambda: ErrorFeedback(Quantize(4)),
    "sign": lambda: ErrorFeedback(Sign()),
    "auto": lambda: Auto({name: partial(reduction_by_name, name) for name in MILDEST_FIRST}),
}
# The name of the number, the function that parses it, and the one that makes the reduction.
_WITH_A_NUMBER: dict[str, tuple[str, type, Callable[[Any], Reduction]]] = {
    "low-rank": ("RANK", int, lambda rank: ErrorFeedback(LowRank(rank))),
    "top-k": ("FRACTION", float, lambda fraction: ErrorFeedback(TopK(fraction))),
}
NAMES = (*_PLAIN, *(f"{name}:{number}" for name, (number, _, _) in _WITH_A_NUMBER.items()))


def reduction_by_name(name: str) -> Reduction:
    """Create a reduction. The numbers of ``low-rank:4`` and ``top-k:0.01`` are the rank and the fraction."""
    if not isinstance(name, str):
        raise ConfigurationError(f"a reduction is one of {', '.join(NAMES)}, got {name!r}")
    kind, colon, number = name.partition(":")
    if kind in _PLAIN and not colon:
        return _PLAIN[kind]()
    if kind in _WITH_A_NUMBER:
        expected, read, make = _WITH_A_NUMBER[kind]
        try:
            value = read(number)
        except ValueError:
            raise ConfigurationError(f"a reduction {kind}:{expected} needs a number, got {name!r}") from None
        return make(value)
    raise ConfigurationError(f"a reduction is one of {', '.join(NAMES)}, got {name!r}")
