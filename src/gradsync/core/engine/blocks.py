"""The running micro-batch of ``accumulate()``: what it switches, and who finishes the window in it."""

from collections.abc import Callable
from dataclasses import dataclass

from gradsync.core.engine.backward import BackwardEngine
from gradsync.core.engine.phase import Phase
from gradsync.core.window import WindowState

__all__ = ["Block", "Blocks"]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A micro-batch of ``accumulate()``. If it covers several models, ``finish_all`` synchronizes them in one order,
    and nothing is sent before."""

    last: bool
    synchronizes: bool
    finish_all: Callable[[], None] | None = None


@dataclass(frozen=True, kw_only=True)
class _Entered:
    """A running block: what was enabled before it, and how many synchronizations had succeeded or failed."""

    block: Block
    enabled: bool
    synchronizations: int
    failures: int


class Blocks:
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
            synchronizations=engine.synchronization.count,
            failures=engine.failed_backwards.count,
        )
        engine.switches.enabled = block.synchronizes and block.finish_all is None
        engine.window.weights.enter_block(deferred=block.synchronizes and not block.last)
        engine.begin_another()
        engine.forwards.enter_block()
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
        return self._entered is not None and self._entered.synchronizations != self._engine.synchronization.count

    @property
    def is_owed(self) -> bool:
        """Whether the other ranks wait for a synchronization of the running block, and have not heard of it."""
        entered, engine = self._entered, self._engine
        if entered is None or not entered.block.synchronizes:
            return False
        return (entered.synchronizations, entered.failures) == (
            engine.synchronization.count,
            engine.failed_backwards.count,
        )

    def finish(self, take_part: Callable[[], None]) -> None:
        """Ensure that the window is synchronized in its last micro-batch, without a backward if there was none."""
        if self._entered is None or not self._entered.block.synchronizes:
            return
        engine, block = self._engine, self._entered.block
        has_failed = engine.phase is Phase.BROKEN or engine.failed_backwards.count != self._entered.failures
        unfinished = engine.window.state is not WindowState.SYNCHRONIZED and not has_failed
        if block.finish_all is not None:
            block.finish_all()
        elif engine.switches.enabled and unfinished:
            take_part()
