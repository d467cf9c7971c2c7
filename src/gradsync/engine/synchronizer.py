"""Between backwards: what has accumulated is synchronized, and no optimizer steps on anything else.

[Note: a rank without gradients] If the loss of one rank does not depend on the model, no hook fires there, while the
other ranks wait for it. It takes part when it leaves the last micro-batch of ``accumulate()``, or when its optimizer is
about to step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gradsync.bucket.layout import ParameterSpec
from gradsync.engine.backward import BackwardEngine
from gradsync.engine.backward_watch import NO_TASK, current_task
from gradsync.engine.options import SynchronizerOptions
from gradsync.engine.ownership import own, owner_of, release
from gradsync.engine.step_guard import wants_attention, watch_steps
from gradsync.errors import MisuseError
from gradsync.window.window import WindowState
from gradsync.window.witness import has_loose_gradients

__all__ = ["Synchronizer", "synchronizer_of"]


def synchronizer_of(parameter: torch.Tensor) -> "Synchronizer | None":
    """The synchronizer that averages the parameter's gradient, if there is one."""
    owner: Synchronizer | None = owner_of(parameter)
    return owner


class Synchronizer(BackwardEngine):
    """Averages the gradients of ``parameters`` over the ranks of a communicator, once a window."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        options: SynchronizerOptions,
    ) -> None:
        for owner in {synchronizer_of(parameter) for parameter in parameters} - {None}:
            owner.hand_over(parameters)  # type: ignore[union-attr]
        super().__init__(parameters, specs, options)
        # Set by wrappers that have further collectives in a forward, for a rank that runs none in a window.
        self.before_taking_part: Callable[[], None] | None = None
        # Set while a last micro-batch of several models runs: synchronizes all of them.
        self.finish_block: Callable[[], None] | None = None
        own(self, self.parameters)
        watch_steps()
        wants_attention(self, True)

    @contextmanager
    def switched(self, **switches: bool) -> Iterator[None]:
        """Set ``enabled``, ``forced`` or ``steps_locally`` for a while."""
        previous = {name: getattr(self, name) for name in switches}
        vars(self).update(switches)
        try:
            yield
        finally:
            vars(self).update(previous)

    def fail(self) -> None:
        """Take part in the synchronization of the other ranks, telling them that this rank failed."""
        if not self._broken:
            self.window.weights.counting = True
            self._become_synchronizing()
            self._recover()

    def synchronize(self) -> None:
        """Average what has accumulated, now. Collective: all ranks call it, or synchronize in their backward."""
        if current_task() != NO_TASK:
            raise MisuseError("synchronize() was called inside backward. Call it after backward() has returned")
        if self._in_backward:
            self._recover()
        if self._broken:
            self._require_zeroed()
        self.window.begin_synchronization()
        self._arrivals.clear()
        self._become_synchronizing()
        self._finish()

    @property
    def in_block(self) -> bool:
        """Whether a micro-batch of accumulate() is running."""
        return self.window.weights.in_block

    def take_part(self) -> None:
        """Finish a window in whose last micro-batch this rank had no backward."""
        if self.before_taking_part is not None and not self.forward_in_window:
            self.before_taking_part()
        self.synchronize()

    def finish_last(self) -> None:
        """In the last micro-batch of a window: if no backward of this rank has synchronized it, nothing else will."""
        if self.finish_block is not None:
            self.finish_block()
        elif self.in_block and self.enabled and self.window.state is not WindowState.SYNCHRONIZED and not self._broken:
            self.take_part()

    def shadow(self) -> None:
        """Take part in the synchronization of ranks that still have data, contributing nothing."""
        for parameter in self.parameters:
            parameter.grad = None
        self._absence.announce_all(len(self.parameters))
        self.synchronize()
        self.window.close()

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether this synchronizer averages the parameter's gradient."""
        index = self._index.get(id(parameter))
        return index is not None and index not in self._arrangement.taken

    def before_step(self) -> None:
        """An optimizer is about to use the gradients: see that they are means."""
        if self._in_backward and current_task() != NO_TASK:
            raise MisuseError(
                "an optimizer stepped inside backward, before the gradients were averaged. Step after backward()"
            )
        if self._in_backward:
            self._recover()
        if self._broken:
            self._require_zeroed()
        self.finish_last()
        if not self.window.has_means and not self.steps_locally:
            self._before_unsynchronized_step()
        self.window.close()

    def _before_unsynchronized_step(self) -> None:
        self.window.refuse_step(self.parameters)
        if self.enabled and (self.window.state is WindowState.OPEN or has_loose_gradients(self.buckets)):
            # [Note: a rank without gradients], or a backward of which no hook told.
            self._unwatched_backwards = self._unwatched_backwards or self.window.state is not WindowState.OPEN
            self.synchronize()

    # -- saving ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What makes sums come out bit for bit as they would have: the layout of the buckets. The same on all ranks."""
        return self._arrangement.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lay out the buckets as they were. All ranks must load the same, between two windows."""
        if len(state["trainable"]) != len(self.parameters):
            raise MisuseError(
                f"the saved engine has {len(state['trainable'])} parameters and this one {len(self.parameters)}: it "
                "belongs to another model"
            )
        self._arrangement.load_state_dict(state)
        self._build()

    def window_state(self) -> dict[str, Any]:
        """This rank's part of an unfinished window: weights, and gradients that are not averaged yet."""
        accumulated = self.window.state is WindowState.UNSYNCHRONIZED
        gradients = {
            spec.name: parameter.grad.detach().clone()
            for spec, parameter in zip(self.specs, self.parameters, strict=True)
            if accumulated and parameter.grad is not None
        }
        return {"weights": self.window.weights.state_dict(), "accumulated": accumulated, "gradients": gradients}

    def load_window_state(self, state: dict[str, Any]) -> None:
        """Go on in the window that was saved."""
        self.window.discard()
        for spec, parameter in zip(self.specs, self.parameters, strict=True):
            saved = state["gradients"].get(spec.name)
            parameter.grad = None
            if saved is not None:
                self.expect_backward()
                parameter.grad = saved.to(parameter.device)
        for bucket in self.buckets if state["accumulated"] else ():
            bucket.gather()
            bucket.reopen()
        self.window.weights.load_state_dict(state["weights"])
        self.window.reopen(self.buckets, accumulated=state["accumulated"])

    def detach(self) -> None:
        """Remove all hooks. Gradients stay where they are; nothing is synchronized any more."""
        self._detached = True
        self._hooks.remove()
        if self._precise is not None:
            self._precise.restore()
        wants_attention(self, False)
        release(self, self.parameters)

    def hand_over(self, parameters: Iterable[torch.Tensor]) -> None:
        """Another synchronizer takes these parameters: a gradient is averaged once, by the last wrapper."""
        self._arrangement.take_out(self._index[id(p)] for p in parameters if id(p) in self._index)
        if len(self._arrangement.taken) == len(self.parameters):
            self.detach()
        else:
            self._build()
