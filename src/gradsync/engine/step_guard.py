"""Looks at optimizer steps: no step on unsynchronized gradients, and no rank is left out of a synchronization.

One pre-hook for all of torch's optimizers asks every synchronizer whose parameters the optimizer has, from the moment
the synchronizer is made until it is detached or gone.
"""

import weakref
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

__all__ = ["StepListener", "guard_steps", "unguard_steps"]


class StepListener(Protocol):
    """A synchronizer, as the guard sees it."""

    def owns(self, parameter: Any) -> bool:
        """Whether the parameter's gradient is synchronized by this listener."""

    def before_step(self, *, by_closure: bool) -> None:
        """An optimizer is about to use the gradients; ``by_closure``: to have them computed first, inside its step."""


# By identity. A dictionary, because copying its values is one step under the interpreter's lock: ranks may be threads.
_listeners: "dict[int, weakref.ref[StepListener]]" = {}
_installed = False


def guard_steps(listener: StepListener) -> None:
    """Have ``listener`` hear of steps. It is not kept alive by that. Installs the pre-hook, once a process."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        _installed = True
    key = id(listener)
    _listeners[key] = weakref.ref(listener, lambda _: _listeners.pop(key, None))


def unguard_steps(listener: StepListener) -> None:
    """Have ``listener`` hear of steps no more."""
    _listeners.pop(id(listener), None)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # The first of ``args`` is the optimizer.
    by_closure = kwargs.get("closure", args[1] if len(args) > 1 else None) is not None
    for reference in list(_listeners.values()):
        listener = reference()
        if listener is None:
            continue
        if any(listener.owns(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            listener.before_step(by_closure=by_closure)
