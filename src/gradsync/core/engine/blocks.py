"""Unfinished windows: the running micro-batch of ``accumulate()``, work that others wait for, and what is saved.

Wrappers may have collectives of their own in a forward, such as the broadcast of buffers. A rank that runs no forward
in a window stands in for it: it takes part in these collectives, and in nothing else.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradsync.base.errors import MisuseError
from gradsync.core.engine.backward import BackwardEngine
from gradsync.core.engine.state import Phase
from gradsync.core.window import Reported, WindowState, has_nonzero_gradients

__all__ = ["Block", "PendingWork", "load_window", "save_window"]

LOGGER = logging.getLogger("gradsync")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A micro-batch of ``accumulate()``.

    If it covers several models, ``finish_all`` synchronizes them in one order, and nothing is sent before.
    """

    last: bool
    synchronizes: bool
    finish_all: Callable[[], None] | None = None


class _Entered(NamedTuple):
    """A running block: what was enabled before it, and how many windows had been synchronized or had failed."""

    block: Block
    enabled: bool
    synchronizations: int
    failures: int


class PendingWork:
    """What one engine owes the same engine on the other ranks, outside of backwards.

    One block is entered at a time: entering another means that the one before was left for good. The iterator of an
    abandoned loop over ``accumulate()`` may still be referenced; its block is then closed at any time, or never.
    """

    def __init__(self, engine: BackwardEngine) -> None:
        self._engine = engine
        self._entered: _Entered | None = None
        self._stand_in: Callable[[bool, bool], bool] | None = None
        # The others wait for a synchronization that this rank has abandoned.
        self._owes_failure = False

    # -- blocks ----------------------------------------------------------------------------------------------------

    def enter(self, block: Block) -> None:
        """Begin the micro-batch of ``block``."""
        engine, window = self._engine, self._engine.window
        former = self._entered
        if former is not None:
            # A loop over accumulate() was left, and its iterator is still referenced.
            unfinished = window.ends == former.synchronizations + former.failures
            self._owes_failure |= former.block.synchronizes and unfinished
        self.report_owed_failure()
        if former is not None:
            self.leave(former.block)
        self._entered = _Entered(block, engine.switches.enabled, window.synchronizations, window.failures)
        engine.switches.enabled = block.synchronizes and block.finish_all is None
        window.weights.enter_block(deferred=block.synchronizes and not block.last)
        window.begin_next()
        window.any_in_block = False
        engine.store.expect_backward()

    def leave(self, block: Block) -> None:
        """End the micro-batch of ``block``, unless it was already left."""
        if self._entered is not None and self._entered.block is block:
            self._engine.switches.enabled = self._entered.enabled
            self._entered = None
            self._engine.window.weights.leave_block(last=block.last)

    @property
    def block_is_finished(self) -> bool:
        """Whether the running block has been synchronized: leaving it will do nothing more."""
        return self._entered is not None and self._entered.synchronizations != self._engine.window.synchronizations

    def finish_window(self) -> None:
        """Synchronize the window in its last micro-batch, if no backward of this rank has: nothing else will."""
        if self._entered is None or not self._entered.block.synchronizes:
            return
        engine, block = self._engine, self._entered.block
        has_failed = engine.phase is Phase.BROKEN or engine.window.failures != self._entered.failures
        if block.finish_all is not None:
            block.finish_all()
        elif engine.switches.enabled and engine.window.state is not WindowState.SYNCHRONIZED and not has_failed:
            self.take_part()

    def take_part(self) -> None:
        """Finish a window in whose last micro-batch this rank had no backward."""
        self.stand_in_for_forward()
        self.synchronize()

    def synchronize(self) -> None:
        """Average what has accumulated, now. Collective: all ranks call it, or synchronize in their backward."""
        engine = self._engine
        engine.require_attached("synchronize")
        self.report_owed_failure()
        if engine.phases.busy:
            engine.recover()
        engine.require_whole()
        engine.synchronize()

    # -- a forward -------------------------------------------------------------------------------------------------

    def stand_in_by(self, callback: Callable[[bool, bool], bool]) -> None:
        """Set how this rank takes part in a wrapper's own collectives in forwards of the others, if it has run none.

        ``callback(has_run, ends_window)`` does so where it must, and returns whether it had to: ``has_run`` tells
        whether this rank has run the forward itself.
        """
        self._stand_in = callback

    def stand_in_for_forward(self, *, ends_window: bool = True, has_run: bool | None = None) -> None:
        """Do what the others do in a forward, if this rank has left out one that they count on. Collective then.

        By default that is the forward of the running block or, outside of blocks, any of the window.
        """
        window = self._engine.window
        if has_run is None:
            has_run = window.any_in_block if window.weights.in_block else window.any_forward
        if self._stand_in is not None and self._stand_in(has_run, ends_window):
            window.record_missed_forward()

    # -- contributing nothing --------------------------------------------------------------------------------------

    def abstain(self, reason: str = "") -> None:
        """Give up this rank's part of the window, and have all ranks agree on what happens to it.

        Where this micro-batch would have synchronized, it takes part at once, as its backward would have.
        """
        engine, window = self._engine, self._engine.window
        in_block = window.weights.in_block
        has_run = window.any_in_block if in_block else window.awaits_backward
        engine.require_attached("abstain")
        # This is what it reports to the ranks that wait.
        self.fail_later(owed=False)
        if engine.phases.busy:
            engine.recover()
        window.refuse_second_abstention()
        any_forward = window.any_forward
        has_failed = engine.phase is Phase.BROKEN and not any_forward and window.reported is Reported.FAILED
        if self._is_over() and not any_forward:
            raise MisuseError(
                "abstain() was called after the window's backward, which all ranks have ended by now. Call it in the "
                "place of that backward; to give a mean up, zero the gradients of all ranks"
            )
        engine.store.clear()
        engine.require_whole()
        if has_failed:
            # Its backward has failed, and the others know.
            window.is_rejected = engine.skip_vote.tolerates
            engine.abstained()
            return
        self.stand_in_for_forward(ends_window=False, has_run=has_run)
        window.awaits_backward = False
        engine.store.expect_backward()
        engine.skip_vote.abstain(reason)
        if engine.switches.enabled and (not in_block or self.block_is_finished):
            self.take_part()

    def _is_over(self) -> bool:
        """Whether a backward of this rank has ended the window, and there is no sign that another has begun."""
        engine, window = self._engine, self._engine.window
        if window.stays_rejected or self.block_is_finished:
            return True
        # With shares, no rank can tell alone whether they are zero.
        return window.has_means and (engine.pipeline.reduction.scatters or has_nonzero_gradients(engine.parameters))

    def shadow(self) -> None:
        """Take part in the synchronization of ranks that still have data, contributing nothing."""
        engine = self._engine
        engine.store.clear()
        engine.window.announce_all_absent(len(engine.parameters))
        self.synchronize()
        # The means stay for now: a sharded optimizer may step on them here, too.
        engine.window.optimizer_stepped()

    # -- a failure -------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """Take part in the synchronization of the other ranks, reporting that this rank failed."""
        try:
            if not self._engine.has_reported:
                self.stand_in_for_forward()
        finally:
            self._engine.fail()

    def fail_later(self, *, owed: bool = True) -> None:
        """Put :meth:`fail` off until this rank next touches the model; or drop that plan, if it is not ``owed``."""
        self._owes_failure = owed

    def report_owed_failure(self) -> None:
        """Do the work that was put off: this rank touches the model."""
        if self._owes_failure:
            self._owes_failure = False
            LOGGER.warning(
                "a loop over accumulate() was left in its last micro-batch, before its backward: the other ranks are "
                "told that this rank failed. Call abstain() to have them skip the window"
            )
            # Its counts are dropped: they would contradict gradients that were not counted.
            self._engine.window.discard()
            self.fail()


def save_window(engine: BackwardEngine) -> dict[str, Any]:
    """This rank's part of an unfinished window, as plain values: weights, gradients, and the reduction's state."""
    accumulated = engine.window.state is WindowState.UNSYNCHRONIZED
    engine.pipeline.flags.await_window_end()
    gradients = {
        spec.name: parameter.grad.detach().clone()
        for spec, parameter in zip(engine.arrangement.specs, engine.parameters, strict=True)
        if accumulated and parameter.grad is not None
    }
    return {
        "weights": engine.window.weights.state_dict(),
        "accumulated": accumulated,
        "gradients": gradients,
        "reduction": engine.pipeline.reduction.state_dict(),
    }


def load_window(engine: BackwardEngine, state: dict[str, Any]) -> None:
    """Continue in the window that was saved."""
    engine.window.discard()
    for spec, parameter in zip(engine.arrangement.specs, engine.parameters, strict=True):
        saved = state["gradients"].get(spec.name)
        parameter.grad = None
        if saved is not None:
            engine.store.expect_backward()
            parameter.grad = saved.to(parameter.device)
    for bucket in engine.buckets if state["accumulated"] else ():
        bucket.gather()
        bucket.reopen()
    engine.window.weights.load_state_dict(state["weights"])
    engine.window.reopen(engine.buckets, accumulated=state["accumulated"])
    engine.pipeline.flags.await_window_end()
    engine.pipeline.reduction.load_state_dict(state.get("reduction", {}))
