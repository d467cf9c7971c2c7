"""Guards optimizer steps: no step on unsynchronized gradients, and no rank is left out of a synchronization.

One pre-hook and one post-hook for all of torch's optimizers notify every synchronizer that owns parameters of the
optimizer, from the moment the synchronizer is made until it is detached or gone.

On an accelerator a synchronizer may not know yet whether the gradients are means. See
:mod:`gradsync.core.engine.step_gate`.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradsync.core.engine.step_gate import FoundInf, forget_scaler, reads_found_inf

__all__ = ["StepListener", "guard_steps", "unguard_steps"]


class StepListener(Protocol):
    """A synchronizer, as seen by the guard."""

    def owns(self, parameter: Any) -> bool:
        """Whether the parameter's gradient is synchronized by this listener."""

    def before_step(self, *, by_closure: bool, gated: bool) -> torch.Tensor | None:
        """An optimizer is about to use the gradients; ``by_closure``: to have them computed first, inside its step.

        If it can be ``gated``, returns a device tensor that is 1.0 if it must change nothing, unless that is known.
        """

    def after_closure(self) -> None:
        """The closure of a step has run, and the optimizer is about to use the gradients that it has computed."""

    def after_step(self, optimizer: Optimizer) -> None:
        """The optimizer has used them."""


# By identity. A dictionary, because copying its values is one step under the interpreter's lock: ranks may be threads.
_listeners: "dict[int, weakref.ref[StepListener]]" = {}
_installed = False


def guard_steps(listener: StepListener) -> None:
    """Notify ``listener`` of steps. This does not keep it alive. Installs the pre-hook, once per process."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _installed = True
    key = id(listener)
    _listeners[key] = weakref.ref(listener, lambda _: _listeners.pop(key, None))


def unguard_steps(listener: StepListener) -> None:
    """Stop notifying ``listener`` of steps."""
    _listeners.pop(id(listener), None)


# The running steps, by optimizer.
_gated: "weakref.WeakKeyDictionary[Optimizer, FoundInf]" = weakref.WeakKeyDictionary()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    # The first of ``args`` is the optimizer.
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    _open_gate(optimizer)
    gated, gates, listeners = reads_found_inf(optimizer), [], list(_listeners_of(optimizer))
    try:
        for listener in listeners:
            gate = listener.before_step(by_closure=closure is not None, gated=gated)
            if gate is not None:
                gates.append(gate)
    except BaseException:
        forget_scaler(optimizer)
        raise
    if gates:
        _gated[optimizer] = FoundInf(optimizer, gates)
    if closure is None or not listeners:
        return None
    checked = _checked(closure, listeners)
    return (args, {**kwargs, "closure": checked}) if "closure" in kwargs else ((args[0], checked, *args[2:]), kwargs)


def _checked(closure: Callable[[], Any], listeners: Sequence[StepListener]) -> Callable[[], Any]:
    """Wrap the closure so that listeners check, after each call of it, what it has computed."""

    def call() -> Any:
        result = closure()
        for listener in listeners:
            listener.after_closure()
        return result

    return call


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _open_gate(optimizer)
    for listener in _listeners_of(optimizer):
        listener.after_step(optimizer)


def _open_gate(optimizer: Optimizer) -> None:
    """After a step, or before the next one if it has raised."""
    found = _gated.pop(optimizer, None) if _gated else None
    if found is not None:
        found.take_back(optimizer)


def _listeners_of(optimizer: Optimizer) -> Iterator[StepListener]:
    for reference in list(_listeners.values()):
        listener = reference()
        if listener is None:
            continue
        if any(listener.owns(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            yield listener
