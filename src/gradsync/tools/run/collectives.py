"""Counts the collectives that a script starts through torch.distributed, by name.

Only the names in ``torch.distributed`` itself are replaced, which scripts and libraries look up. torch's own functions
call each other below them, so ``all_gather_object`` is one call here and not the three it makes.
"""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["count_collectives"]

NAMES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list"),
)


def count_collectives(counts: Counter[str]) -> None:
    """From now on. What gradsync itself starts is told by its wrappers."""
    for name in NAMES:
        function = getattr(dist, name, None)
        if function is not None:
            setattr(dist, name, _counted(name, function, counts))


def _counted(name: str, function: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        # The compiler puts its own operation in the place of the function it knows, and counts nothing.
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] != "gradsync":
            counts[name] += 1
        return function(*args, **kwargs)

    return counted
