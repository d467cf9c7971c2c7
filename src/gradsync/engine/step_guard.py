"""Looks at optimizer steps: no step on unsynchronized gradients, and no rank is left out of a synchronization.

One pre-hook for all of torch's optimizers. It returns at once unless some synchronizer has asked for attention, which
only those do that are between a forward and its synchronization.
"""

import weakref
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

__all__ = ["StepListener", "wants_attention", "watch_steps"]


class StepListener(Protocol):
    """A synchronizer, as the guard sees it."""

    def owns(self, parameter: Any) -> bool:
        """Whether the parameter's gradient is synchronized by this listener."""

    def before_step(self) -> None:
        """An optimizer is about to use the gradients."""


# By identity. A dictionary, because copying its values is one step under the interpreter's lock: ranks may be threads.
_attentive: "dict[int, weakref.ref[StepListener]]" = {}
_installed = False


def watch_steps() -> None:
    """Install the pre-hook, once a process."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        _installed = True


def wants_attention(listener: StepListener, wanted: bool) -> None:
    """Say whether ``listener`` must hear of the next step."""
    key = id(listener)
    if not wanted:
        _attentive.pop(key, None)
    elif key not in _attentive:
        _attentive[key] = weakref.ref(listener, lambda _: _attentive.pop(key, None))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _attentive:
        return
    for reference in list(_attentive.values()):
        listener = reference()
        if listener is None:
            continue
        if any(listener.owns(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            listener.before_step()
