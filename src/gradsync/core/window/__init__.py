"""What lies between two optimizer steps: which backward counts, what micro-batches weigh, what nobody may touch."""

from gradsync.core.window.weights import Counting, Weights, checked_weight
from gradsync.core.window.window import Window, WindowState
from gradsync.core.window.witness import Witness, has_loose_gradients, has_nonzero_gradients

__all__ = [
    "Counting",
    "Weights",
    "Window",
    "WindowState",
    "Witness",
    "checked_weight",
    "has_loose_gradients",
    "has_nonzero_gradients",
]
