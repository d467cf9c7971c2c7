"""Gradient reductions: one small class per way of reducing a bucket, all behind :class:`Reduction`."""

from collections.abc import Callable
from functools import partial

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.core.reduction.auto import Auto
from gradsync.core.reduction.base import Compressing, Reduction
from gradsync.core.reduction.comm_hook import CommHook, GradBucket
from gradsync.core.reduction.error_feedback import ErrorFeedback
from gradsync.core.reduction.low_rank import LowRank
from gradsync.core.reduction.mean import Mean, ScatteredMean
from gradsync.core.reduction.quantize import Cast, CodedReduction, Quantize, Sign
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

# The formats in which numbers are sent, by name.
_FORMATS: dict[str, Callable[[], CodedReduction]] = {
    "bf16": lambda: Cast(torch.bfloat16),
    "fp16": lambda: Cast(torch.float16),
    "int8": lambda: Quantize(8),
    "int4": lambda: Quantize(4),
    "int2": lambda: Quantize(2),
    "sign": Sign,
}
# They lose so much that training would fail without error feedback, so they come with it.
_WITH_FEEDBACK = ("int4", "int2", "sign")


def _auto() -> Auto:
    return Auto({name: partial(reduction_by_name, name) for name in MILDEST_FIRST})


def _low_rank(rank: str) -> Reduction:
    return ErrorFeedback(LowRank(int(rank)))


def _top_k(arguments: str) -> Reduction:
    fraction, _, values = arguments.partition(":")
    return ErrorFeedback(TopK(float(fraction), *([_FORMATS[values]()] if values else [])))


# With what follows their names, and the functions that read it.
_WITH_ARGUMENTS: dict[str, tuple[str, Callable[[str], Reduction]]] = {
    "low-rank": ("RANK", _low_rank),
    "top-k": ("FRACTION[:FORMAT]", _top_k),
}
NAMES = ("mean", *_FORMATS, "auto", *(f"{name}:{arguments}" for name, (arguments, _) in _WITH_ARGUMENTS.items()))


def reduction_by_name(name: str) -> Reduction:
    """Create a reduction. The numbers of ``low-rank:4`` and ``top-k:0.01`` are the rank and the fraction;
    ``top-k:0.01:int2`` sends the values it selects in 2 bits each."""
    kind, colon, arguments = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind in _WITH_ARGUMENTS:
        expected, make = _WITH_ARGUMENTS[kind]
        try:
            return make(arguments)
        except ConfigurationError:
            raise
        except KeyError as unknown:
            formats = ", ".join(_FORMATS)
            raise ConfigurationError(f"{kind} sends values as {formats}, got {unknown} in {name!r}") from None
        except ValueError:
            raise ConfigurationError(f"a reduction {kind}:{expected} needs a number, got {name!r}") from None
    if not colon and kind in _FORMATS:
        coded = _FORMATS[kind]()
        return ErrorFeedback(coded) if kind in _WITH_FEEDBACK else coded
    if not colon and kind in ("mean", "auto"):
        return Mean() if kind == "mean" else _auto()
    raise ConfigurationError(f"a reduction is one of {', '.join(NAMES)}, got {name!r}")
