"""Unfinished windows: the running micro-batch of ``accumulate()``, work that others wait for, and what is saved.

Wrappers may have collectives of their own in a forward, such as the broadcast of buffers. A rank that runs no forward
in a window stands in for it: it takes part in these collectives, and in nothing else.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradsync.core.engine.backward import BackwardEngine
from gradsync.core.engine.state import Phase
from gradsync.core.window import WindowState

__all__ = ["Block", "PendingWork", "RunningBlock", "load_window", "save_window"]

LOGGER = logging.getLogger("gradsync")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A micro-batch of ``accumulate()``. If it covers several models, ``finish_all`` synchronizes them in one order,
    and nothing is sent before."""

    last: bool
    synchronizes: bool
    finish_all: Callable[[], None] | None = None


@dataclass(frozen=True, kw_only=True)
class _Entered:
    """A running block: what was enabled before it, and how many windows had been synchronized or had failed."""

    block: Block
    enabled: bool
    synchronized: int
    failed: int


class RunningBlock:
    """Tracks the one block of an engine that has been entered and not left.

    There is one at a time: entering another means that the one before was left for good. The iterator of an abandoned
    loop over ``accumulate()`` may still be referenced; its block is then closed at any time, or never.
    """

    def __init__(self, engine: BackwardEngine) -> None:
        self._engine = engine
        self._entered: _Entered | None = None

    def enter(self, block: Block) -> None:
        engine = self._engine
        if self._entered is not None:
            self.leave(self._entered.block)
        self._entered = _Entered(
            block=block,
            enabled=engine.switches.enabled,
            synchronized=engine.record.synchronized,
            failed=engine.record.failed,
        )
        engine.switches.enabled = block.synchronizes and block.finish_all is None
        engine.window.weights.enter_block(deferred=block.synchronizes and not block.last)
        engine.record.begin_another()
        engine.record.any_in_block = False
        engine.store.expect_backward()

    def leave(self, block: Block) -> None:
        """Does nothing if it was already left."""
        entered = self._entered
        if entered is None or entered.block is not block:
            return
        self._entered = None
        self._engine.switches.enabled = entered.enabled
        self._engine.window.weights.leave_block(last=block.last)

    @property
    def is_finished(self) -> bool:
        """Whether the running block has been synchronized: leaving it will do nothing more."""
        return self._entered is not None and self._entered.synchronized != self._engine.record.synchronized

    @property
    def is_owed(self) -> bool:
        """Whether the other ranks wait for a synchronization of the running block, and have not heard of it."""
        entered, record = self._entered, self._engine.record
        if entered is None or not entered.block.synchronizes:
            return False
        return (entered.synchronized, entered.failed) == (record.synchronized, record.failed)

    def finish(self, take_part: Callable[[], None]) -> None:
        """Ensure that the window is synchronized in its last micro-batch, without a backward if there was none."""
        if self._entered is None or not self._entered.block.synchronizes:
            return
        engine, block = self._engine, self._entered.block
        has_failed = engine.phase is Phase.BROKEN or engine.record.failed != self._entered.failed
        unfinished = engine.window.state is not WindowState.SYNCHRONIZED and not has_failed
        if block.finish_all is not None:
            block.finish_all()
        elif engine.switches.enabled and unfinished:
            take_part()


class PendingWork:
    """What one engine owes the same engine on the other ranks."""

    def __init__(self, engine: BackwardEngine) -> None:
        self._engine = engine
        self._stand_in: Callable[[bool], bool] | None = None
        # The others wait for a synchronization that this rank has abandoned.
        self._owes_failure = False

    # -- a forward -------------------------------------------------------------------------------------------------

    def stand_in_by(self, callback: Callable[[bool], bool]) -> None:
        """For wrappers with further collectives in a forward: ``callback`` takes part in those of the others where this
        rank has run no forward, and returns whether it had to. Its argument tells whether the window ends."""
        self._stand_in = callback

    def stand_in_for_forward(self, *, ends_window: bool = True) -> None:
        """Do what the others do in a forward, if this rank has left out one that they count on. Collective then."""
        if self._stand_in is not None and self._stand_in(ends_window):
            self._engine.record.miss_forward()

    # -- a failure -------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """Take part in the synchronization of the other ranks, reporting that this rank failed."""
        try:
            if not self._engine.has_told:
                self.stand_in_for_forward()
        finally:
            self._engine.fail()

    def fail_later(self) -> None:
        """Do the same, but later: when this rank next touches the model."""
        self._owes_failure = True

    def has_other_word(self) -> None:
        """This rank is about to tell the others something other than that it failed."""
        self._owes_failure = False

    def finish(self) -> None:
        """This rank touches the model: do the work that was put off."""
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
    engine.pipeline.hear_end()
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
    engine.pipeline.hear_end()
    engine.pipeline.reduction.load_state_dict(state.get("reduction", {}))
