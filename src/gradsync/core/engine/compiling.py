"""Detects whether torch's compiler is at work, without importing it, which takes seconds."""

import sys
from typing import Any

from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

__all__ = ["compiler_here", "has_compiled"]

# The compiler of the functions that are called from here, if any. It must be called in the very frame that asks, one
# that is not compiled itself.
compiler_here: Any = get_eval_frame_callback


def has_compiled(module: nn.Module) -> bool:
    """Whether any part of ``module`` was given to the compiler."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and any(
        isinstance(part, dynamo.OptimizedModule) or part._compiled_call_impl is not None for part in module.modules()
    )
