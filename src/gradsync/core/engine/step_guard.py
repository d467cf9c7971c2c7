"""Guards optimizer steps: no step on unsynchronized gradients, and no rank is left out of a synchronization.

One pre-hook and one post-hook for all of torch's optimizers notify every :class:`StepGuard` that owns parameters of the
optimizer, from the moment it is registered until its engine is detached or gone.

[Note: a rank without gradients] If the loss of one rank does not depend on the model, no hook fires there, while the
other ranks wait for it. It takes part when it leaves the last micro-batch of ``accumulate()``, or when its optimizer is
about to step.

[Note: a step by closure] ``optimizer.step(closure)`` runs its backwards inside the step. Code that runs before the step
cannot check their gradients: if one of these windows is skipped, its gradients are dropped at once. Micro-batches may
have accumulated before, under ``no_sync()``; the closure's backward then ends their window. The checks that precede any
other step are made after each call of the closure.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradsync.base.errors import MisuseError
from gradsync.core.engine.backward import BackwardEngine
from gradsync.core.engine.backward_watch import NO_TASK, current_task
from gradsync.core.engine.blocks import PendingWork
from gradsync.core.window import WindowState, has_unattached_gradients

__all__ = ["FoundInf", "StepGuard", "forget_scaler", "guard_steps", "reads_found_inf", "step_gated", "unguard_steps"]


class StepGuard:
    """Lets optimizers step only on means of one engine's gradients. ``index`` has its parameters by their ids."""

    def __init__(self, engine: BackwardEngine, pending_work: PendingWork, index: Mapping[int, int]) -> None:
        self.engine, self.window, self._pending_work, self._index = engine, engine.window, pending_work, index

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether the engine averages the parameter's gradient."""
        index = self._index.get(id(parameter))
        return index is not None and index not in self.engine.arrangement.taken

    def before_step(self, *, by_closure: bool = False, gated: bool = False) -> torch.Tensor | None:
        """Ensure that gradients are means, as an optimizer is about to use them. See [Note: a step by closure].

        Returns what :meth:`.FlagReader.gate_step` does.
        """
        engine, window = self.engine, self.window
        self._leave_backward()
        gate, steps_locally = None, engine.switches.steps_locally
        if not steps_locally:
            engine.pipeline.flags.require_alive()
            gate = None if by_closure else engine.store.gate_step(gated=gated)
        has_means = steps_locally or window.has_means
        if not has_means and not by_closure:
            self._synchronize_if_due()
        engine.store.expect_step()
        # Several optimizers each step: the skip vote that the first has found applies to the others, too.
        is_another = window.state is WindowState.CLOSED and not by_closure and not steps_locally
        rejected = window.is_rejected
        window.step_was_skipped = rejected or (is_another and window.step_was_skipped)
        self._end_window(by_closure=by_closure, has_means=has_means)
        if engine.observer is not None:
            if rejected:
                engine.observer.step_skipped()
            engine.observer.step_began()
        return gate

    def after_closure(self) -> None:
        """Ensure that the gradients that a step's closure has computed are means. See [Note: a step by closure]."""
        if not self.window.has_means and not self.engine.switches.steps_locally:
            self._synchronize_if_due()
            # Before the closure there was nothing to close; the step that goes on now uses these means.
            self.window.optimizer_stepped()

    def after_step(self, optimizer: Optimizer) -> None:
        """Notify observers that an optimizer has used the gradients."""
        if self.engine.observer is not None:
            self.engine.observer.step_ended(optimizer)

    def _leave_backward(self) -> None:
        """Finish what a backward, or the block of a micro-batch, has left unfinished; refuse to step inside one."""
        engine = self.engine
        self._pending_work.report_owed_failure()
        if engine.phases.busy and current_task() != NO_TASK:
            raise MisuseError(
                "an optimizer stepped inside backward, before the gradients were averaged. Step after backward()"
            )
        if engine.phases.busy:
            engine.recover()
        engine.require_whole()
        self._pending_work.finish_window()

    def _synchronize_if_due(self) -> None:
        """Synchronize where the others wait for this rank; raise if gradients were accumulated on purpose."""
        engine, window = self.engine, self.window
        window.refuse_step(engine.parameters)
        is_open = window.state is WindowState.OPEN or engine.skip_vote.votes_to_skip
        if engine.switches.enabled and (
            is_open or has_unattached_gradients(engine.buckets) or engine.arrangement.newly_trained_gradients()
        ):
            # [Note: a rank without gradients], or a backward that no hook reported.
            if not is_open:
                engine.exchange.counts_always = True
            self._pending_work.synchronize()

    def _end_window(self, *, by_closure: bool, has_means: bool) -> None:
        """End the window before the step that uses it. One that a closure continues ends inside the step."""
        window = self.window
        window.is_stepped_by_closure = by_closure
        if window.is_rejected:
            self.engine.store.clear()
        window.end_abstention()
        if has_means or not by_closure or window.state is not WindowState.UNSYNCHRONIZED:
            window.optimizer_stepped()


# -- the step gate on an optimizer -------------------------------------------------------------------------------------


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


def step_gated(optimizer: Any, found_inf: torch.Tensor | None) -> None:
    """Step ``optimizer`` for one that was given ``found_inf``, and has it do the work."""
    if found_inf is None:
        optimizer.step()
        return
    optimizer.found_inf = found_inf
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf


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


# -- torch's hooks -----------------------------------------------------------------------------------------------------

# The guards to notify, by identity. A dictionary, because copying its values is one step under the interpreter's
# lock: ranks may be threads.
_guards: "dict[int, weakref.ref[StepGuard]]" = {}
_installed = False


def guard_steps(guard: StepGuard) -> None:
    """Notify ``guard`` of steps. This does not keep it alive. Installs torch's hooks, once per process."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _installed = True
    key = id(guard)
    _guards[key] = weakref.ref(guard, lambda _: _guards.pop(key, None))


def unguard_steps(guard: StepGuard) -> None:
    """Stop notifying ``guard`` of steps."""
    _guards.pop(id(guard), None)


# The running steps, by optimizer.
_gated: "weakref.WeakKeyDictionary[Optimizer, FoundInf]" = weakref.WeakKeyDictionary()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    # The first of ``args`` is the optimizer.
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    _restore_found_inf(optimizer)
    gated, gates, guards = reads_found_inf(optimizer), [], list(_guards_of(optimizer))
    try:
        for guard in guards:
            gate = guard.before_step(by_closure=closure is not None, gated=gated)
            if gate is not None:
                gates.append(gate)
    except BaseException:
        forget_scaler(optimizer)
        raise
    if gates:
        _gated[optimizer] = FoundInf(optimizer, gates)
    if closure is None or not guards:
        return None
    checked = _checked(closure, guards)
    return (args, {**kwargs, "closure": checked}) if "closure" in kwargs else ((args[0], checked, *args[2:]), kwargs)


def _checked(closure: Callable[[], Any], guards: Sequence[StepGuard]) -> Callable[[], Any]:
    """Wrap the closure so that guards check, after each call of it, what it has computed."""

    def call() -> Any:
        result = closure()
        for guard in guards:
            guard.after_closure()
        return result

    return call


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _restore_found_inf(optimizer)
    for guard in _guards_of(optimizer):
        guard.after_step(optimizer)


def _restore_found_inf(optimizer: Optimizer) -> None:
    """Give the optimizer back its own ``found_inf``: after a step, or before the next one if the step has raised."""
    found = _gated.pop(optimizer, None) if _gated else None
    if found is not None:
        found.take_back(optimizer)


def _guards_of(optimizer: Optimizer) -> Iterator[StepGuard]:
    for reference in list(_guards.values()):
        guard = reference()
        if guard is None:
            continue
        if any(guard.owns(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            yield guard
