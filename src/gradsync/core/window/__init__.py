"""What lies between two optimizer steps: which backward counts, what micro-batches weigh, what nobody may touch."""

from gradsync.core.window.tamper_check import TamperCheck, has_loose_gradients, has_nonzero_gradients
from gradsync.core.window.weights import Counting, Weights, checked_weight
from gradsync.core.window.window import Window, WindowState

__all__ = [
    "Counting",
    "TamperCheck",
    "Weights",
    "Window",
    "WindowState",
    "checked_weight",
    "has_loose_gradients",
    "has_nonzero_gradients",
]
