"""The state of this process's random number generators, as a tree that a checkpoint can hold."""

import contextlib
import random
import sys
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError

__all__ = ["rng_state", "set_rng_state"]


def rng_state() -> dict[str, Any]:
    """The states of Python's, torch's and, where they are in use, NumPy's and the current CUDA device's generator."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # The long form: the short one, a tuple, knows one kind of generator only.
        state["numpy"] = numpy.random.get_state(legacy=False)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Go on where :func:`rng_state` stood. What this process does not have, CUDA or NumPy, is passed over."""
    if not isinstance(state, dict) or not {"python", "torch"} <= state.keys():
        have = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise ConfigurationError(
            f"set_rng_state takes what rng_state() returned, with 'python' and 'torch'; got {have}"
        )
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        with contextlib.suppress(ImportError):
            import numpy

            numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
