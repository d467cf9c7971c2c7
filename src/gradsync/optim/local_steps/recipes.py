"""Local steps by name: ``local:16`` averages parameters after every 16 steps, ``diloco:32`` has an outer optimizer.

A reduction may follow, as in ``diloco:32:int2``: outer gradients are sent by it.
"""

import functools
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.core.reduction import reduction_by_name

__all__ = ["NAMES", "is_local_steps", "local_steps_by_name"]

# [Note: the outer optimizer's defaults] Successive outer gradients point the same way, so momentum m multiplies the
# step by up to 1 / (1 - m). DiLoCo's published lr 0.7 and momentum 0.9 make that 7, for models that have been trained
# before and for small inner learning rates; a short run from scratch overshoots. With 1.7, runs of hundreds of steps
# come closest to exact means, at 16 and at 32 local steps. docs/local-steps.md has the measurements.
OUTER = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.7, nesterov=True)
_OUTERS = {"local": None, "diloco": OUTER}
NAMES = ("local:STEPS[:REDUCTION]", "diloco:STEPS[:REDUCTION]")


def is_local_steps(name: str) -> bool:
    """Whether ``name`` asks for local steps, rather than for gradients to be sent in each step."""
    return name.partition(":")[0] in _OUTERS


def local_steps_by_name(name: str) -> dict[str, Any]:
    """The arguments of :class:`~gradsync.LocalSteps` that ``name`` stands for."""
    kind, _, arguments = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind not in _OUTERS:
        raise ConfigurationError(f"local steps are one of {', '.join(NAMES)}, got {name!r}")
    steps, _, reduction = arguments.partition(":")
    if not steps.isdecimal() or int(steps) < 1:
        raise ConfigurationError(f"{kind}:STEPS needs a number of steps, got {name!r}")
    return {
        "every": int(steps),
        "outer": _OUTERS[kind],
        "reduction": reduction_by_name(reduction) if reduction else None,
    }
