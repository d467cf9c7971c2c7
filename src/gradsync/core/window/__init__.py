"""Gradient accumulation windows between two optimizer steps: weights of micro-batches, and checks against tampering."""

from gradsync.core.window.weights import Counting, Weights, checked_weight
from gradsync.core.window.window import (
    TamperCheck,
    Window,
    WindowState,
    has_nonzero_gradients,
    has_unattached_gradients,
)

__all__ = [
    "Counting",
    "TamperCheck",
    "Weights",
    "Window",
    "WindowState",
    "checked_weight",
    "has_nonzero_gradients",
    "has_unattached_gradients",
]
