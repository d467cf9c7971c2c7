"""The micro-batch of ``accumulate()`` that runs: what it switches, and who finishes the window in it."""

from collections.abc import Callable
from dataclasses import dataclass

from gradsync.engine.backward import BackwardEngine
from gradsync.engine.phase import Phase
from gradsync.window import WindowState

__all__ = ["Block", "Blocks"]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A micro-batch of ``accumulate()``. With several models in it ``finish_all`` synchronizes them, in one order, and
    nothing is sent before."""

    last: bool
    synchronizes: bool
    finish_all: Callable[[], None] | None = None


@dataclass(frozen=True, kw_only=True)
class _Entered:
    """A block that runs: what was enabled before it, and how many synchronizations had gone well or failed."""

    block: Block
    enabled: bool
    synchronizations: int
    failures: int


class Blocks:
    """The blocks of one engine that have been entered and not left."""

    def __init__(self, engine: BackwardEngine) -> None:
        self._engine = engine
        self._entered: list[_Entered] = []

    def enter(self, block: Block) -> None:
        engine = self._engine
        self._entered.append(
            _Entered(
                block=block,
                enabled=engine.switches.enabled,
                synchronizations=engine.synchronization.count,
                failures=engine.failed_backwards.count,
            )
        )
        engine.switches.enabled = block.synchronizes and block.finish_all is None
        engine.window.weights.enter_block(deferred=block.synchronizes and not block.last)
        engine.abstention.end()
        engine.forwards.enter_block()
        engine.store.expect_backward()

    def leave(self) -> None:
        entered = self._entered.pop()
        self._engine.switches.enabled = entered.enabled
        self._engine.window.weights.leave_block(last=entered.block.last)

    @property
    def is_finished(self) -> bool:
        """Whether the running one has been synchronized: leaving it will do nothing more."""
        return bool(self._entered) and self._entered[-1].synchronizations != self._engine.synchronization.count

    def finish(self, take_part: Callable[[], None]) -> None:
        """See that the window is synchronized in its last micro-batch, without a backward if there was none."""
        if not self._entered or not self._entered[-1].block.synchronizes:
            return
        engine, block = self._engine, self._entered[-1].block
        has_failed = engine.phase is Phase.BROKEN or engine.failed_backwards.count != self._entered[-1].failures
        unfinished = engine.window.state is not WindowState.SYNCHRONIZED and not has_failed
        if block.finish_all is not None:
            block.finish_all()
        elif engine.switches.enabled and unfinished:
            take_part()
