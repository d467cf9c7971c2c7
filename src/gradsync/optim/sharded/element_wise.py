"""Checks which optimizers can be sharded (they update each element independently) or deferred (each parameter)."""

import inspect
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError

__all__ = ["require_element_wise", "require_parameter_wise"]

_ELEMENT_WISE = {
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta),
    *(torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
    torch.optim.ASGD,
}
_WHY_NOT = {
    "LBFGS": "it multiplies whole gradients with each other, and evaluates its closure several times",
    "SparseAdam": "it is made for sparse gradients, which are averaged on all ranks",
    "Adafactor": "it keeps sums of the rows and columns of a matrix",
    "Muon": "it orthogonalizes whole matrices",
}


def require_element_wise(optimizer_class: Any, settings: dict[str, Any]) -> None:
    """Raise unless parts of a flattened parameter may be updated separately."""
    if not inspect.isclass(optimizer_class) or not issubclass(optimizer_class, torch.optim.Optimizer):
        raise ConfigurationError(
            f"ShardedOptimizer needs the class of an optimizer, such as torch.optim.AdamW, got {optimizer_class!r}. "
            "It makes the optimizer itself, over the shares"
        )
    name = optimizer_class.__name__
    declared = getattr(optimizer_class, "element_wise", None)
    if declared is False or (declared is None and optimizer_class not in _ELEMENT_WISE):
        reason = _WHY_NOT.get(name) if optimizer_class.__module__.startswith("torch.optim") else None
        raise ConfigurationError(
            f"{name} is not known to update each element by itself"
            + (f": {reason}" if reason else "")
            + ", so parameters cannot be shared out in flat pieces. If it does, say so with a class attribute "
            "element_wise = True; if it does not, use it as a plain optimizer"
        )
    if settings.get("differentiable"):
        raise ConfigurationError("differentiable=True needs whole parameters, and a sharded optimizer has shares")


def require_parameter_wise(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless parameters may be updated one after the other, in several calls of its step."""
    kind = type(optimizer)
    name = kind.__name__
    if kind is torch.optim.LBFGS:
        raise ConfigurationError(
            "LBFGS looks at all gradients at once, and evaluates its closure several times a step, so nothing can be "
            "left to the next forward. Use it as a plain optimizer"
        )
    declared = getattr(kind, "parameter_wise", None) or getattr(kind, "element_wise", None)
    if not declared and getattr(torch.optim, name, None) is not kind:
        raise ConfigurationError(
            f"{name} is not known to update each parameter by its own gradient alone, which a step needs that is made "
            "of one update for each bucket. If it does, and counts its steps in the state of parameters or in its "
            f"groups, say so with {name}.parameter_wise = True. If it looks at all gradients at once, to clip them by "
            "their norm for instance, or counts in an attribute, use it as a plain optimizer"
        )
