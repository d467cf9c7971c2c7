"""What all ranks do together in a window: they negotiate, exchange buckets, and do what any of them has requested.

All ranks run through this, even those whose backward has failed. Errors are raised to the caller;
:mod:`gradsync.core.engine.backward` makes sure that the others are not left waiting.

Every collective here is started by all ranks. So whether one is due must follow from what all of them know: the number
of the window, earlier agreements, or the control flags. What only one rank has seen is requested in the control flags
(:mod:`gradsync.core.bucket.control_flags`) and done after the buckets, by all.

[Note: the first window] Nothing is started before the first synchronized backward has ended: until then it is not
known in which order gradients come, nor how often a parameter's hook fires (more than once where reentrant
checkpointing runs through a shared parameter). From the second window on, buckets overlap.

[Note: several models] Each model's buckets start in an order of their own, but nothing orders the buckets of one model
relative to another's. So only the first model that begins in a backward over a group leads, and overlaps it. The others
wait until backward ends and then follow, in the order in which they began.
"""

import weakref

import torch

from gradsync.base.errors import MisuseError, PeerFailedError
from gradsync.communicator import Communicator
from gradsync.communicator.agreement import agree_on_absent
from gradsync.communicator.logs import log_errors
from gradsync.core.bucket.arrangement import GradientOrder
from gradsync.core.bucket.control_flags import Requests
from gradsync.core.engine.gradient_store import GradientStore
from gradsync.core.engine.policy import SynchronizerOptions
from gradsync.core.engine.state import Phase, Phases
from gradsync.core.window import WindowState
from gradsync.core.window.replica_check import Comparison
from gradsync.core.window.skip_vote import WindowVerdict, invalidate
from gradsync.health.watch import make_meter

__all__ = ["GradientExchange", "agree_on_order"]

INTERRUPTED = (
    "it was interrupted in the middle of its collectives, and cannot tell which of them the other ranks wait for. Save "
    "what you need, and start the ranks again"
)

# The exchange that leads the running backward, per group. A rank that is a thread has its own communicator, and so its
# own key.
_leaders: "dict[int, weakref.ref[GradientExchange]]" = {}


class GradientExchange:
    """The exchanges of one engine with the same engine on the other ranks."""

    def __init__(self, store: GradientStore, phases: Phases, options: SynchronizerOptions) -> None:
        self._store, self._phases, self._window = store, phases, store.window
        self._arrangement, self._pipeline, self._weights = store.arrangement, store.pipeline, store.window.weights
        self._communicator = options.communicator
        self._overlaps = options.policy.schedule == "overlapped"
        self._droppable = options.droppable
        # The divisor of sums where nothing is weighted.
        self.divisor = float(options.communicator.world_size)
        # Whether there were backwards that no output announced, for which batched readiness checks are not enough.
        self.counts_always = False
        self.pace = make_meter(store.arrangement.specs[0].device)
        # The replica check, if one was requested.
        self._comparison: Comparison | None = None
        if options.policy.replica_check is not None:
            value_of = None if options.swapper is None else options.swapper.value_of
            specs = store.arrangement.specs
            self._comparison = Comparison(options.policy.replica_check, specs, options.communicator, value_of)
        # The failure of the previous window, where its flags were read late; raised at the end of this one.
        self._late_failure: PeerFailedError | None = None
        self._group, self._reference = id(options.communicator.group or options.communicator), weakref.ref(self)

    # -- who leads: see [Note: several models] ---------------------------------------------------------------------

    @property
    def _leads(self) -> bool:
        return _leaders.get(self._group) is self._reference

    def _take_lead(self) -> bool:
        """Lead in the running backward until :meth:`give_up_lead`, if no other model does; returns whether it leads."""
        leader = _leaders.get(self._group)
        if leader is not None and leader() not in (None, self):
            return False
        _leaders[self._group] = self._reference
        return True

    def give_up_lead(self) -> None:
        if self._leads:
            del _leaders[self._group]

    # -- before the first bucket starts ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the synchronization: negotiate, if this model leads. Collective then."""
        store, pipeline, order = self._store, self._pipeline, self._arrangement.order
        self._window.exchanged = False
        self._phases.enter(Phase.SYNCHRONIZING)
        store.take_back()
        leads = self._take_lead()
        if leads:
            self._negotiate()
        counting = self._must_count()
        if counting != store.hooks.per_parameter:
            store.hooks.register(self._arrangement.places, per_parameter=counting)
        store.hooks.stay_last()
        # See [Note: the first window] and [Note: several models].
        overlapping = leads and order.learned and order.observed and self._overlaps
        pipeline.begin(overlapping=overlapping and not pipeline.skip_vote.holds_back, batched=not counting)

    @property
    def contributes(self) -> bool:
        """Whether this rank has gradients, or is computing them."""
        return self._phases.task is not None or self._window.state is WindowState.UNSYNCHRONIZED

    def _must_count(self) -> bool:
        """Whether the presence of a gradient does not prove that it came in this backward, or the order is needed."""
        arrangement = self._arrangement
        return (
            arrangement.order.observing
            or self.counts_always
            or self._pipeline.changes_versions
            or arrangement.repeats
            or arrangement.has_gradients()
        )

    def _negotiate(self) -> None:
        """Agree on where gradients lie and what they are divided by. Collective, where there is something to agree on.

        Runs once per synchronization: a backward that reached no parameter may have negotiated already.
        """
        arrangement, pipeline, weights = self._arrangement, self._pipeline, self._weights
        with pipeline.section:
            if arrangement.order.running:
                arrangement.restore_absent()
            else:
                self._late_failure = pipeline.flags.read_late()
                arrangement.order.window_began()
                if self._comparison is not None:
                    self._comparison.before_window(arrangement.order.windows_before, arrangement.parameters)
                if self._rearrange():
                    arrangement.restore_arrivals(self._store.hooks.arrivals)
                weights.start_sum(uncounted=self.contributes and not weights.counting)
                if self._droppable and pipeline.reduction.carries_tail:
                    self._agree_on_absent()
            pipeline.divide(weights.divisor(self.divisor), weights.local_scale)
            pipeline.recount()

    def _rearrange(self) -> bool:
        """Rebuild the buckets if ranks agree that it is time: True if gathered gradients must be gathered again."""
        arrangement, order, before = self._arrangement, self._arrangement.order, self._arrangement.trainable
        held, changed, arrangement.stale = self._layout_is_held, arrangement.stale, False
        if order.due:
            changed = self._agree_on_trained() or changed
            if held:
                order.keep()
            else:
                changed = agree_on_order(order, self._communicator) or changed
        if held and arrangement.trainable != before:
            self._refuse_other_layout()
        changed = (not held and self._tune()) or changed
        if self._reconsider() or changed:
            self._store.build()
            return True
        return arrangement.expect_arrivals()

    def _agree_on_trained(self) -> bool:
        """Train a parameter where any rank does: True if that has changed. Collective."""
        trained_here = [parameter.requires_grad for parameter in self._arrangement.parameters]
        trained = torch.tensor(trained_here, dtype=torch.int32, device=self._communicator.device)
        self._communicator.all_reduce(trained, "max").wait()
        return self._arrangement.train(trained.tolist())

    def _agree_on_absent(self) -> None:
        """Do not send gradients that no rank will have. Collective."""
        # Ranks may have run different forwards, or none: only what all of them left out counts.
        parameters = self._arrangement.parameters
        here = [index for index in self._window.absent if parameters[index].grad is None]
        self._arrangement.mark_absent(agree_on_absent(self._communicator, here, len(parameters)))

    def _tune(self) -> bool:
        """Switch to different caps if the measurements favour them: True when buckets must be rebuilt. Collective."""
        tuner = self._arrangement.tuner
        if tuner is None or not tuner.due(self._arrangement.order.windows_before):
            return False
        negated = [-seconds for seconds in tuner.times]
        message = torch.tensor(negated, dtype=torch.float64, device=self._communicator.device)
        self._communicator.all_reduce(message, "max").wait()
        return self._arrangement.tune([-seconds for seconds in message.tolist()])

    def _reconsider(self) -> bool:
        """Let the reduction replace itself by a different one: True if it has."""
        pipeline, arrangement = self._pipeline, self._arrangement
        window = arrangement.order.windows_before
        if not pipeline.reduction.reconsider(window, arrangement.buckets, self._communicator):
            return False
        pipeline.reduce_with(pipeline.reduction)
        return True

    @property
    def _layout_is_held(self) -> bool:
        return self._pipeline.reduction.keeps_layout and self._arrangement.order.learned

    def _refuse_other_layout(self) -> None:
        raise MisuseError(
            "a parameter has begun or ceased to be trained, so buckets must be laid out again, but "
            f"{self._pipeline.reduction!r} has state that belongs to the buckets as they are. Exchange it for a new "
            "one first, with register_comm_hook or synchronizer.reduce_with, or freeze and unfreeze before the first "
            "window"
        )

    # -- the buckets, and what follows them ------------------------------------------------------------------------

    def run(self) -> bool:
        """Start what is left and wait for all of it, then do what any rank has requested in the control flags.
        Collective.

        Returns whether there are means: a skipped window may have none.
        """
        if not self._leads:
            self._take_lead()
            self._negotiate()
        if self._window.is_rejected:
            self._pipeline.skip_vote.keep_rejecting()
        self.pace.work_ended()
        # Inside the step of an optimizer gradients are used before anything else can wait for the control flags.
        has_means = self._reduce_all(at_once=self._window.is_stepped_by_closure)
        self._window.exchanged = True
        self._window.synchronizations += 1
        return has_means

    def _reduce_all(self, *, at_once: bool) -> bool:
        pipeline, weights, skip_vote = self._pipeline, self._weights, self._pipeline.skip_vote
        counts, trains_more = weights.unannounced, self._arrangement.trains_more
        contributes = self.contributes
        weights.require_announced()
        contributes = not self._drop_own_if_rejected() and contributes
        # Collectives follow, or may; and a rank without gradients has nothing to do but wait.
        asks = counts or trains_more or at_once or skip_vote.votes_to_skip
        waits = bool(self._arrangement.layout.sparse) or asks or not contributes or skip_vote.reads_at_once
        pipeline.flags.requests = Requests(
            weights=counts,
            trained=trains_more,
            rejected=skip_vote.votes_to_skip,
            late=self._late_failure is not None,
            known=waits,
        )
        pipeline.flush()
        with pipeline.section:
            correction = weights.finish_sum(self.divisor)
            pipeline.finish(correction=correction, norms=self._store.norms)
            if waits:
                pipeline.flags.await_requests()
            return self._conclude(correction, uncounted=contributes and not weights.counting)

    def _conclude(self, correction: float | torch.Tensor | None, *, uncounted: bool) -> bool:
        """Do what the control flags request: returns whether there are means. Collective if anything was requested."""
        pipeline = self._pipeline
        verdict = self._read_votes()
        if verdict is not None and verdict.skips:
            invalidate(pipeline.buckets, self._arrangement.outside_parameters(), finite=verdict.finite)
            pipeline.conclude(succeeded=False)
            return False
        late = self._correct(dropped=verdict.dropped if verdict else 0, uncounted=uncounted)
        divisor = pipeline.divisor / pipeline.local_scale / late
        self._reduce_outside(divisor if correction is None else divisor / correction)
        pipeline.conclude()
        return True

    def _correct(self, *, dropped: int, uncounted: bool) -> float:
        """Apply to the means what is known only now, and return the factor.

        That is weights that were not announced, and ranks that are left out. Collective, where there is such a thing.
        """
        weights, pipeline, correction = self._weights, self._pipeline, 1.0
        if pipeline.flags.requests.weights:
            correction = weights.sum_after_buckets(pipeline.divisor, uncounted=uncounted) or 1.0
        elif dropped and weights.total:
            # The sum that was sent earlier counts what those ranks had.
            correction = weights.sum_after_buckets(weights.total, uncounted=uncounted) or 1.0
        if dropped and not weights.total and self.divisor > dropped:
            correction = self.divisor / (self.divisor - dropped)
        if correction != 1.0:
            pipeline.correct(correction)
        return correction

    def _drop_own_if_rejected(self) -> bool:
        """Check what does not pass through the pipeline; drop this rank's gradients if the mean leaves it out."""
        arrangement, skip_vote = self._arrangement, self._pipeline.skip_vote
        if skip_vote.check is not None:
            specs, parameters = arrangement.specs, arrangement.parameters
            outside = arrangement.outside_indices
            skip_vote.check.check_outside((index, specs[index].name, parameters[index].grad) for index in outside)
        if not skip_vote.holds_back:
            return False
        for bucket in arrangement.buckets:
            bucket.gather()
            assert skip_vote.check is not None
            skip_vote.check.check_bucket(bucket)
        if not skip_vote.reason:
            return False
        # From here on this rank counts as one without gradients and without weight.
        arrangement.drop_gradients()
        self._store.sparse.clear()
        self._weights.reset()
        return True

    def _read_votes(self) -> WindowVerdict | None:
        """The verdict on the control flags, if any rank has voted to skip. Collective then.

        A failed rank does not take part.
        """
        flags, skip_vote = self._pipeline.flags, self._pipeline.skip_vote
        if flags.failed:
            return skip_vote.tolerate(flags.failed)
        if flags.requests.late:
            # Ranks raise at the end of this window, for the previous one.
            return WindowVerdict()
        return skip_vote.gather_votes() if flags.requests.rejected else None

    def _reduce_outside(self, divisor: float | torch.Tensor) -> None:
        """Average what has no place in a bucket: sparse gradients, and those of parameters that are trained again."""
        arrangement, sparse = self._arrangement, self._store.sparse
        sparse.reduce(arrangement.layout.sparse, divisor)
        if not self._pipeline.flags.requests.trained:
            return
        if self._layout_is_held:
            self._refuse_other_layout()
        before = arrangement.trainable
        # They get a place in the next window.
        arrangement.stale = self._agree_on_trained() or arrangement.stale
        taken_in = [index for index, trained in enumerate(arrangement.trainable) if trained and not before[index]]
        for index in taken_in:
            sparse.mark_ready(index)
        sparse.reduce(taken_in, divisor)

    def raise_late(self) -> None:
        """Raise what was learned about the previous window, now that this one is over.

        Raising earlier would leave the others waiting for this rank, or report a false failure to them.
        """
        error, self._late_failure = self._late_failure, None
        if error is not None:
            raise error

    # -- it fails --------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Complete the synchronization with the others, who learn that this rank failed, or know that another did."""
        pipeline = self._pipeline
        if pipeline.section.cut_short and self._communicator.world_size > 1:
            # See [Note: an interrupt] in :mod:`gradsync.core.engine.state`.
            self._communicator.abort(INTERRUPTED)
        if self._window.exchanged or pipeline.complete:
            return
        if not self._arrangement.order.running:
            # Another model leads. The other ranks negotiate for this one next.
            with log_errors("agreeing on the buckets failed"):
                self._take_lead()
                self._negotiate()
        pipeline.abandon()
        self._window.exchanged = True


def agree_on_order(order: GradientOrder, communicator: Communicator) -> bool:
    """Take rank 0's order. Collective. True when the order has changed."""
    proposal = torch.tensor(order.propose(), dtype=torch.int64)
    if communicator.world_size > 1 and proposal.numel():
        shared = proposal.to(communicator.device)
        communicator.broadcast(shared, 0).wait()
        proposal = shared.cpu()
    agreed: list[int] = proposal.tolist()
    return order.adopt(agreed)
