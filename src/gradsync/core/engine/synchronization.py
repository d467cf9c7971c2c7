"""The synchronization of a window: this rank takes the collective lock, negotiates, exchanges buckets and leaves.

All ranks run through this, even those whose backward has failed. Errors are raised to the caller;
:mod:`gradsync.core.engine.failed_backwards` makes sure that the others are not left waiting.

[Note: the first window] Nothing is started before the first synchronized backward has ended: until then it is not
known in which order gradients come, nor how often a parameter's hook fires (more than once where reentrant
checkpointing runs through a shared parameter). From the second window on, buckets overlap.
"""

from gradsync.communicator.logs import log_errors
from gradsync.core.engine.abstention import Abstention
from gradsync.core.engine.collective_lock import CollectiveLock
from gradsync.core.engine.fingerprints import Comparison
from gradsync.core.engine.forwards import Forwards
from gradsync.core.engine.gradient_store import GradientStore
from gradsync.core.engine.negotiation import LocalContribution, Negotiation
from gradsync.core.engine.options import SynchronizerOptions
from gradsync.core.engine.phase import Phase
from gradsync.core.engine.running_backward import RunningBackward
from gradsync.core.window import WindowState
from gradsync.health.watch import make_meter

__all__ = ["Synchronization"]

INTERRUPTED = (
    "it was interrupted in the middle of its collectives, and cannot tell which of them the other ranks wait for. Save "
    "what you need, and start the ranks again"
)


class Synchronization:
    """This rank's part in the synchronization of one engine's windows."""

    def __init__(
        self,
        store: GradientStore,
        running: RunningBackward,
        forwards: Forwards,
        abstention: Abstention,
        options: SynchronizerOptions,
    ) -> None:
        self._store, self._running, self._forwards, self._abstention = store, running, forwards, abstention
        self._overlaps = options.policy.schedule == "overlapped"
        self._droppable = options.droppable
        self._collective_lock = CollectiveLock(self, options.communicator)
        self._negotiation = Negotiation(store.arrangement, store.pipeline, store.window.weights, store.sparse)
        prints = options.policy.fingerprints
        if prints is not None:
            specs = store.arrangement.specs
            self._negotiation.comparison = Comparison(prints, specs, options.communicator, options.keeper)
        # Those that succeeded.
        self.count = 0
        # Whether no rank waits for this one in the running synchronization any more, however it ends here.
        self.exchanged = False
        self.pace = make_meter(store.arrangement.specs[0].device)
        # Whether there were backwards that no output announced: then gradients are always counted.
        self._unwatched = False

    def divide_by(self, ranks: int) -> None:
        """Take the mean over this number of ranks, where windows are not weighted."""
        self._negotiation.divisor = float(ranks)

    def count_always(self) -> None:
        """A backward was not announced by any output, so the batched check of chunks is not enough."""
        self._unwatched = True

    # -- it begins -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Gradients must go to all ranks: negotiate, if this engine has the collective lock. Collective then."""
        store = self._store
        self.exchanged = False
        self._running.phases.enter(Phase.SYNCHRONIZING)
        store.take_back()
        leads = self._collective_lock.take_lead()
        if leads:
            self._meet()
        counting = self._must_count()
        if counting != store.hooks.counting:
            store.hooks.register(store.arrangement.places, counting=counting)
        store.hooks.stay_last()
        # See [Note: the first window], and :mod:`gradsync.core.engine.collective_lock`.
        order = store.arrangement.order
        overlapping = leads and order.learned and order.observed and self._overlaps
        store.pipeline.begin(overlapping=overlapping and not store.pipeline.veto.holds_back, by_sight=not counting)

    def _meet(self) -> None:
        absent = self._forwards.absent if self._droppable else None
        present = LocalContribution(contributes=self._contributes, arrivals=self._store.hooks.arrivals, absent=absent)
        with self._store.pipeline.section:
            self._negotiation.before_buckets(present, self._store.build)

    @property
    def _contributes(self) -> bool:
        return self._running.computes or self._store.window.state is WindowState.UNSYNCHRONIZED

    def _must_count(self) -> bool:
        """Whether the presence of a gradient does not prove that it came in this backward, or the order is needed."""
        arrangement = self._store.arrangement
        return (
            arrangement.order.observing
            or self._unwatched
            or self._store.pipeline.wire_is_seen
            or arrangement.repeats
            or arrangement.has_gradients()
        )

    # -- it succeeds -----------------------------------------------------------------------------------------------

    def exchange(self) -> bool:
        """Send what is left and wait for all of it; returns whether there are means. Collective."""
        store = self._store
        if not self._collective_lock.leads:
            self._collective_lock.take_lead()
            self._meet()
        if store.window.is_vetoed:
            store.pipeline.veto.stand()
        self.pace.work_ended()
        by_closure = store.window.is_stepped_by_closure
        has_means = self._negotiation.exchange(contributes=self._contributes, norms=store.norms, at_once=by_closure)
        self.exchanged = True
        self.count += 1
        return has_means

    def finish(self, *, has_means: bool) -> None:
        """All ranks have exchanged everything: hand out the result. Raises what the previous window has left."""
        store, window, veto = self._store, self._store.window, self._store.pipeline.veto
        self.pace.window_ended(worked=self._contributes)
        if has_means:
            store.arrangement.window_finished(store.hooks.arrivals)
        # Before the means are handed out: reopening a bucket must not look like a change to whatever watches it.
        self._clear()
        abstained = veto.abstains
        veto.forget()
        (window.synchronized if has_means else window.vetoed)(store.buckets)
        store.hand_out()
        if window.is_vetoed and window.is_stepped_by_closure:
            store.arrangement.drop_gradients()
            window.close()
            window.step_was_skipped = True
        if abstained:
            self.abstained()
        if store.observer is not None:
            store.observer.synchronization_finished()
        self._running.end(Phase.IDLE)
        self._negotiation.raise_late()

    def abstained(self) -> None:
        """All ranks know that this one abstains, or would."""
        self._abstention.told(self._store.buckets, self._store.arrangement.outside())

    # -- it fails --------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Complete it with the others, who learn that this rank failed, or know that a different one did."""
        pipeline = self._store.pipeline
        if pipeline.section.cut_short and pipeline.communicator.world_size > 1:
            # See [Note: an interrupt].
            pipeline.communicator.abort(INTERRUPTED)
        if self.exchanged or pipeline.complete:
            return
        if not self._store.arrangement.order.running:
            # Another model had the lock. The other ranks negotiate for this one next.
            with log_errors("agreeing on the buckets failed"):
                self._collective_lock.take_lead()
                self._meet()
        pipeline.abandon()
        self.exchanged = True

    # -- exits -----------------------------------------------------------------------------------------------------

    def leave(self, phase: Phase) -> None:
        """The only exit from a window, whatever its outcome."""
        self._clear()
        self._running.end(phase)

    def leave_backward(self, phase: Phase) -> None:
        """The only exit from a backward inside a window."""
        self._clear_backward()
        self._running.end(phase)

    def _clear(self) -> None:
        """Clear what was noted for one synchronization only."""
        self._store.arrangement.window_ended()
        self._forwards.close_window()
        self._store.sparse.clear()
        self._clear_backward()

    def _clear_backward(self) -> None:
        """Release the collective lock, if it was taken."""
        self._collective_lock.give_up()
        self._forwards.close_backward()
        self._store.pipeline.reset()
        self._running.stop()
