"""Gradient accumulation windows between two optimizer steps: weights of micro-batches, and checks against tampering."""

from gradsync.core.window.weights import Counting
from gradsync.core.window.window import (
    Reported,
    Window,
    WindowState,
    has_nonzero_gradients,
    has_unattached_gradients,
)

__all__ = [
    "Counting",
    "Reported",
    "Window",
    "WindowState",
    "has_nonzero_gradients",
    "has_unattached_gradients",
]
