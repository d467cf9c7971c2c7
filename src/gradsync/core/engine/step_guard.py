"""Guards optimizer steps: no step on unsynchronized gradients, and no rank is left out of a synchronization.

One pre-hook and one post-hook for all of torch's optimizers notify every synchronizer that owns parameters of the
optimizer, from the moment the synchronizer is made until it is detached or gone.

[Note: the step gate] On an accelerator the host does not read the control flags before it queues the optimizer step, so
it may not know yet whether the gradients are means. Whether the step may be taken is decided in one of two ways, and
this module chooses between them:

on the device
    The control flags are converted there to a number that is 1.0 if the step must not be taken. torch's fused
    optimizers read it as ``found_inf``, which is how ``GradScaler`` makes them skip a step: parameters, momenta and
    step counts keep their bits. The host waits for nothing.
by the host
    Every other optimizer. The host waits for the control flags just before the step, so it cannot run ahead of the
    device.

The step must not be taken if

- the backward of some rank failed,
- something was requested that not all ranks know of,
- a rank raises at the end of this window; see [Note: late failures] in :mod:`gradsync.core.bucket.control_flags`,
- a collective was aborted, so that the buckets do not hold the mean. The flag is raised before the abort, and it is
  copied to the device after the collectives.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["FoundInf", "forget_scaler", "guard_steps", "reads_found_inf", "unguard_steps"]


def reads_found_inf(optimizer: Any) -> bool:
    """Whether the optimizer changes nothing where its attribute ``found_inf`` is 1.0.

    An optimizer that is not torch's declares this with an attribute ``reads_found_inf``.
    """
    said = getattr(optimizer, "reads_found_inf", None)
    if said is not None:
        return bool(said)
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return all(group.get("fused") and not _allocates_momentum(optimizer, group) for group in optimizer.param_groups)


def _allocates_momentum(optimizer: Any, group: dict[str, Any]) -> bool:
    """Whether the next step allocates momenta, as the first one of SGD with momentum does.

    Their memory is uninitialized, and a skipped step would leave it so.
    """
    if not group.get("momentum"):
        return False
    return not any("momentum_buffer" in optimizer.state.get(parameter, ()) for parameter in group["params"])


class FoundInf:
    """An optimizer's ``found_inf`` for one step, combined with what a ``GradScaler`` has put there."""

    def __init__(self, optimizer: Any, gates: list[torch.Tensor]) -> None:
        self._before = getattr(optimizer, "found_inf", None)
        found = gates[0]
        for gate in gates[1:]:
            found = torch.maximum(found, gate.to(found.device, non_blocking=True))
        if self._before is not None:
            # A scaler adds up over devices. Only a value of 1.0 has an effect.
            found = torch.maximum(found, self._before.to(found.device, non_blocking=True)).clamp(max=1.0)
        self._own = found
        optimizer.found_inf = found

    def take_back(self, optimizer: Any) -> None:
        """Restore the attribute after the step, unless it was changed since."""
        if getattr(optimizer, "found_inf", None) is not self._own:
            return
        if self._before is None:
            del optimizer.found_inf
        else:
            optimizer.found_inf = self._before


def forget_scaler(optimizer: Any) -> None:
    """Remove what a ``GradScaler`` has put into the optimizer for a step that raises before it has begun.

    The scaler would not do it, and its scale would count twice in the next step.
    """
    if hasattr(optimizer, "found_inf") and hasattr(optimizer, "grad_scale"):
        del optimizer.found_inf, optimizer.grad_scale


# The synchronizers to notify, by identity. A dictionary, because copying its values is one step under the interpreter's
# lock: ranks may be threads.
_listeners: "dict[int, weakref.ref[Any]]" = {}
_installed = False


def guard_steps(listener: Any) -> None:
    """Notify ``listener`` of steps. This does not keep it alive. Installs the pre-hook, once per process."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _installed = True
    key = id(listener)
    _listeners[key] = weakref.ref(listener, lambda _: _listeners.pop(key, None))


def unguard_steps(listener: Any) -> None:
    """Stop notifying ``listener`` of steps."""
    _listeners.pop(id(listener), None)


# The running steps, by optimizer.
_gated: "weakref.WeakKeyDictionary[Optimizer, FoundInf]" = weakref.WeakKeyDictionary()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    # The first of ``args`` is the optimizer.
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    _restore_found_inf(optimizer)
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


def _checked(closure: Callable[[], Any], listeners: Sequence[Any]) -> Callable[[], Any]:
    """Wrap the closure so that listeners check, after each call of it, what it has computed."""

    def call() -> Any:
        result = closure()
        for listener in listeners:
            listener.after_closure()
        return result

    return call


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _restore_found_inf(optimizer)
    for listener in _listeners_of(optimizer):
        listener.after_step(optimizer)


def _restore_found_inf(optimizer: Optimizer) -> None:
    """Give the optimizer back its own ``found_inf``: after a step, or before the next one if the step has raised."""
    found = _gated.pop(optimizer, None) if _gated else None
    if found is not None:
        found.take_back(optimizer)


def _listeners_of(optimizer: Optimizer) -> Iterator[Any]:
    for reference in list(_listeners.values()):
        listener = reference()
        if listener is None:
            continue
        if any(listener.owns(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            yield listener
