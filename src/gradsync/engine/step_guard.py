"""Looks at optimizer steps: no step on unsynchronized gradients, and no rank is left out of a synchronization.

One pre-hook and one post-hook for all of torch's optimizers tell every synchronizer whose parameters the optimizer has,
from the moment the synchronizer is made until it is detached or gone.
"""

import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

__all__ = ["StepListener", "guard_steps", "unguard_steps"]


class StepListener(Protocol):
    """A synchronizer, as the guard sees it."""

    def owns(self, parameter: Any) -> bool:
        """Whether the parameter's gradient is synchronized by this listener."""

    def before_step(self, *, by_closure: bool) -> None:
        """An optimizer is about to use the gradients; ``by_closure``: to have them computed first, inside its step."""

    def after_step(self, optimizer: Optimizer) -> None:
        """The optimizer has used them."""


# By identity. A dictionary, because copying its values is one step under the interpreter's lock: ranks may be threads.
_listeners: "dict[int, weakref.ref[StepListener]]" = {}
_installed = False


def guard_steps(listener: StepListener) -> None:
    """Have ``listener`` hear of steps. It is not kept alive by that. Installs the pre-hook, once a process."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _installed = True
    key = id(listener)
    _listeners[key] = weakref.ref(listener, lambda _: _listeners.pop(key, None))


def unguard_steps(listener: StepListener) -> None:
    """Have ``listener`` hear of steps no more."""
    _listeners.pop(id(listener), None)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # The first of ``args`` is the optimizer.
    by_closure = kwargs.get("closure", args[1] if len(args) > 1 else None) is not None
    for listener in _listeners_of(optimizer):
        listener.before_step(by_closure=by_closure)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for listener in _listeners_of(optimizer):
        listener.after_step(optimizer)


def _listeners_of(optimizer: Optimizer) -> Iterator[StepListener]:
    for reference in list(_listeners.values()):
        listener = reference()
        if listener is None:
            continue
        if any(listener.owns(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            yield listener
