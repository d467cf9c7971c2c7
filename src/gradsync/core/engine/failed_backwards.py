"""Handles a failed backward, on this rank or another: no rank is left waiting, and none uses its leftovers.

[Note: a failed backward] When a backward raises, the synchronization is completed with a vote in the ballot (the
control flags of the last bucket), so that the other ranks raise too, before the error reaches the user. No rank goes
on until the half-made gradients have been zeroed. The ballot travels in the last bucket, which therefore starts only
when backward has ended: otherwise a rank that fails at the very end could no longer tell the others.

How a failed backward is detected is in :mod:`gradsync.core.engine.backward_watch`.
"""

from gradsync.base.errors import MisuseError
from gradsync.communicator.logs import log_errors
from gradsync.core.engine.abstention import Abstention
from gradsync.core.engine.gradient_store import GradientStore
from gradsync.core.engine.phase import Phase, Phases
from gradsync.core.engine.synchronization import Synchronization
from gradsync.core.window import has_nonzero_gradients

__all__ = ["FailedBackwards"]


class FailedBackwards:
    """The failed backwards of one engine: what the other ranks know of them, and what they have left behind."""

    def __init__(
        self, synchronization: Synchronization, store: GradientStore, abstention: Abstention, phases: Phases
    ) -> None:
        self._synchronization, self._store = synchronization, store
        self._abstention, self._phases = abstention, phases
        # The failures that all ranks know of.
        self.count = 0
        # Whether the other ranks know of the failure that has broken this engine.
        self._told = False

    @property
    def has_told(self) -> bool:
        """Whether the other ranks know of the failure that broke this engine, and nothing has begun since."""
        return self._phases.now is Phase.BROKEN and self._told

    def begin_another(self) -> None:
        """A new window begins, which the other ranks have not heard about."""
        self._told = False

    # -- the others are told ---------------------------------------------------------------------------------------

    def fail(self) -> None:
        """Take part in the synchronization of the other ranks, reporting that this rank failed."""
        if self._phases.now is Phase.DETACHED or self.has_told:
            return
        try:
            with log_errors("taking the gradients back failed"):
                self._store.take_back(worthless=True)
            if self._phases.now is not Phase.SYNCHRONIZING:
                # Whatever this raises, recovering tells the others; the caller has an error of its own to raise.
                with log_errors("beginning the synchronization failed"):
                    self._synchronization.begin()
        finally:
            self.recover()

    def fail_again(self) -> None:
        """Do the same for a later backward than the one they know of."""
        self._told = False
        self.fail()

    def recover(self) -> None:
        """Complete the synchronization of a failed backward. See [Note: a failed backward].

        Works in any phase, and again where an interrupt has cut it short.
        """
        window, veto = self._store.window, self._store.pipeline.veto
        self._told = self._phases.now is Phase.SYNCHRONIZING
        if self._told:
            # An interrupt may come after this rank has exchanged everything and counted that.
            self.count += not self._synchronization.exchanged
            self._synchronization.abandon()
        abstained = self._told and veto.abstains
        if self._told:
            # Other ranks may have ended this window successfully, or learn of the failure in the next one. Windows are
            # compared between ranks by number.
            self._synchronization.pace.window_ended(worked=False)
            veto.forget()
            # What was skipped was a different window; a step that follows has nothing to skip.
            window.step_was_skipped = False
        self._store.mend_hooks()
        self._store.hooks.arrivals.clear()
        window.discard()
        window.is_vetoed = self._told and veto.tolerates
        self._synchronization.leave(Phase.BROKEN)
        self._abstention.answers_failure = False
        if abstained:
            self._synchronization.abstained()

    def raised_on_all(self) -> None:
        """All ranks have raised for a common reason: no rank waits for this one."""
        self.count += 1
        self._store.arrangement.drop_gradients()
        self._store.window.discard()

    # -- and afterwards --------------------------------------------------------------------------------------------

    def require_whole(self) -> None:
        """Refuse to continue with what a failed backward has left behind."""
        if self._phases.now is not Phase.BROKEN:
            return
        if has_nonzero_gradients(self._store.arrangement.parameters):
            raise MisuseError(
                "an earlier backward failed, on this rank or another, and left gradients that are no mean of anything. "
                "Call zero_grad() before you go on"
            )
        self._phases.enter(Phase.IDLE)
