"""Validates a state before it is loaded, while nothing has been changed yet."""

from collections.abc import Mapping
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.optim.local_steps.settings import Settings

__all__ = ["check_state"]

KEYS = ("ranks", "step", "rounds", "next", "drift", "anchors", "outer", "reduction")


# The state of an outer optimizer, and its anchors by name.
Kept = tuple[torch.optim.Optimizer, Mapping[str, torch.Tensor]]


def check_state(state: dict[str, Any], settings: Settings, outer: Kept | None) -> None:
    """Raise ConfigurationError unless the state was saved by local steps like these."""
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise ConfigurationError(f"no state of LocalSteps: {missing[0]!r} is missing. Pass what state_dict() gave")
    if len(state["drift"]) != settings.fragments or state["step"] >= settings.every:
        raise ConfigurationError(
            f"the state was saved at step {state['step']} of a cycle with {len(state['drift'])} fragments, and does "
            f"not fit every={settings.every}, fragments={settings.fragments}. Use the settings of then, or do "
            "without it"
        )
    if (outer is None) != (state["outer"] is None):
        theirs, ours = ("without", "has one") if state["outer"] is None else ("with", "has none")
        raise ConfigurationError(
            f"the state was saved {theirs} an outer optimizer, and this LocalSteps {ours}. Use the outer and the "
            "reduction of then, or do without it"
        )
    if outer is not None:
        optimizer, anchors = outer
        _check_anchors(state["anchors"], anchors)
        _check_groups(state["outer"], optimizer)


def _check_anchors(saved: Mapping[str, torch.Tensor], anchors: Mapping[str, torch.Tensor]) -> None:
    unknown = sorted(set(saved) ^ set(anchors))
    if unknown:
        where = "the state has and the model has not" if unknown[0] in saved else "the model has and the state has not"
        raise ConfigurationError(
            f"the state belongs to another model: {where} a trained parameter {unknown[0]!r}. Load it with the model "
            "that it was saved with"
        )
    for name, anchor in anchors.items():
        if tuple(saved[name].shape) != tuple(anchor.shape):
            raise ConfigurationError(
                f"the state belongs to another model: {name!r} has shape {tuple(saved[name].shape)} in it and "
                f"{tuple(anchor.shape)} here. Load it with the model that it was saved with"
            )


def _check_groups(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if theirs != ours:
        raise ConfigurationError(
            f"the saved outer optimizer has groups of {theirs} parameters, and this one of {ours}. Make it as it was"
        )
