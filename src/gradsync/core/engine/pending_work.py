"""Work that the other ranks wait for outside of backwards: a skipped forward, an unreported failure.

Wrappers may have collectives of their own in a forward, such as the broadcast of buffers. A rank that runs no forward
in a window stands in for it: it takes part in these collectives, and in nothing else.
"""

import logging
from collections.abc import Callable

from gradsync.core.engine.backward import BackwardEngine

__all__ = ["PendingWork"]

LOGGER = logging.getLogger("gradsync")


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
            self._engine.forwards.missed()

    # -- a failure -------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """Take part in the synchronization of the other ranks, reporting that this rank failed."""
        try:
            if not self._engine.failed_backwards.has_told:
                self.stand_in_for_forward()
        finally:
            self._engine.failed_backwards.fail()

    def fail_later(self) -> None:
        """Do the same, but later: when this rank next touches the model."""
        self._owes_failure = True

    def has_other_word(self) -> None:
        """This rank is about to tell the others something other than that it failed."""
        self._owes_failure = False

    def settle(self) -> None:
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
