"""Saves and restores this rank's part of an unfinished window, as plain values."""

from typing import Any

from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.core.window import WindowState

__all__ = ["load_window", "save_window"]


def save_window(synchronizer: Synchronizer) -> dict[str, Any]:
    """Weights and gradients of an unfinished window, and the reduction's state."""
    accumulated = synchronizer.window.state is WindowState.UNSYNCHRONIZED
    synchronizer.engine.pipeline.hear_end()
    gradients = {
        spec.name: parameter.grad.detach().clone()
        for spec, parameter in zip(synchronizer.specs, synchronizer.parameters, strict=True)
        if accumulated and parameter.grad is not None
    }
    return {
        "weights": synchronizer.window.weights.state_dict(),
        "accumulated": accumulated,
        "gradients": gradients,
        "reduction": synchronizer.reduction.state_dict(),
    }


def load_window(synchronizer: Synchronizer, state: dict[str, Any]) -> None:
    """Continue in the window that was saved."""
    engine, window = synchronizer.engine, synchronizer.window
    window.discard()
    for spec, parameter in zip(synchronizer.specs, synchronizer.parameters, strict=True):
        saved = state["gradients"].get(spec.name)
        parameter.grad = None
        if saved is not None:
            engine.store.expect_backward()
            parameter.grad = saved.to(parameter.device)
    for bucket in engine.buckets if state["accumulated"] else ():
        bucket.gather()
        bucket.reopen()
    window.weights.load_state_dict(state["weights"])
    window.reopen(engine.buckets, accumulated=state["accumulated"])
    engine.pipeline.hear_end()
    synchronizer.reduction.load_state_dict(state.get("reduction", {}))
