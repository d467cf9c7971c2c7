"""Agreement between ranks around the buckets of one synchronization: before the first starts, and after the last.

Every collective here is started by all ranks. So whether one is due must follow from what all of them know: the number
of the window, earlier agreements, or the ballot. What only one rank has seen is requested in the ballot
(:mod:`gradsync.core.bucket.requests`) and done after the buckets, by all.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from gradsync.base.errors import MisuseError, PeerFailedError
from gradsync.core.bucket.arrangement import Arrangement
from gradsync.core.bucket.norm import BucketNorms
from gradsync.core.bucket.requests import Requests
from gradsync.core.engine.fingerprints import Comparison
from gradsync.core.engine.pipeline import Division, Pipeline
from gradsync.core.engine.sparse_reduction import SparseGradients
from gradsync.core.engine.veto import Verdict, invalidate
from gradsync.core.window import Weights

__all__ = ["LocalContribution", "Negotiation"]


@dataclass(frozen=True, kw_only=True)
class LocalContribution:
    """What this rank contributes: whether it has gradients or is computing them, which have come in this backward, and
    which parameters its forwards left out (None where the model never says)."""

    contributes: bool
    arrivals: Sequence[int]
    absent: Collection[int] | None


class Negotiation:
    """The negotiations of one engine with the same engine on the other ranks."""

    def __init__(
        self, arrangement: Arrangement, pipeline: Pipeline, weights: Weights, outside: SparseGradients
    ) -> None:
        self._arrangement, self._pipeline, self._weights, self._outside = arrangement, pipeline, weights, outside
        # The divisor of sums where nothing is weighted.
        self.divisor = float(pipeline.communicator.world_size)
        # The replica check, if one was requested.
        self.comparison: Comparison | None = None
        # From the previous window, where it is only heard of in this one.
        self._late_failure: PeerFailedError | None = None

    # -- before the first bucket starts ----------------------------------------------------------------------------

    def before_buckets(self, present: LocalContribution, rebuild: Callable[[], None]) -> None:
        """Agree on where gradients lie and what they are divided by. Collective, where there is something to agree on.

        Runs once per synchronization: a backward that reached no parameter may have negotiated already.
        """
        arrangement, pipeline, weights = self._arrangement, self._pipeline, self._weights
        if arrangement.order.running:
            arrangement.mark_again()
        else:
            self._late_failure = pipeline.late_failure()
            arrangement.order.window_began()
            if self.comparison is not None:
                self.comparison.before_window(arrangement.order.windows_before, arrangement.parameters)
            if self._rearrange(rebuild):
                arrangement.land_again(present.arrivals)
            weights.start(uncounted=present.contributes and not weights.counting)
            if present.absent is not None and pipeline.reduction.carries_tail:
                arrangement.mark_absent(present.absent)
        pipeline.divide(Division(divisor=weights.divisor(self.divisor), local_scale=weights.landing_scale))
        pipeline.recount()

    def _rearrange(self, rebuild: Callable[[], None]) -> bool:
        """Rebuild the buckets if ranks agree that it is time: True if gathered gradients must be gathered again."""
        arrangement, before = self._arrangement, self._arrangement.trainable
        held = self._layout_is_held
        changed = arrangement.agree(hold_order=held)
        if held and arrangement.trainable != before:
            self._refuse_other_layout()
        changed = (not held and arrangement.tune()) or changed
        if self._reconsider() or changed:
            rebuild()
            return True
        return arrangement.expect_arrivals()

    def _reconsider(self) -> bool:
        """Whether the reduction has been replaced by a different one."""
        pipeline, window = self._pipeline, self._arrangement.order.windows_before
        if not pipeline.reduction.reconsider(window, self._arrangement.buckets, pipeline.communicator):
            return False
        pipeline.reduce_with(pipeline.reduction)
        return True

    @property
    def _layout_is_held(self) -> bool:
        return self._pipeline.reduction.keeps_layout and self._arrangement.order.learned

    def _refuse_other_layout(self) -> None:
        raise MisuseError(
            "a parameter has begun or ceased to be trained, so buckets must be laid out anew, but "
            f"{self._pipeline.reduction!r} has state that belongs to the buckets as they are. Exchange it for a new "
            "one first, with register_comm_hook or synchronizer.reduce_with, or freeze and unfreeze before the first "
            "window"
        )

    # -- the buckets, and what follows them ------------------------------------------------------------------------

    def exchange(self, *, contributes: bool, norms: BucketNorms | None, at_once: bool = False) -> bool:
        """Start what is left and wait for all of it, then do what any rank has requested in the ballot.

        ``at_once``: gradients are used before anything else can wait for the ballot. Returns whether there are means: a
        skipped window may have none.
        """
        pipeline, weights, veto = self._pipeline, self._weights, self._pipeline.veto
        counts, trains_more = weights.unannounced, self._arrangement.trains_more
        weights.require_told()
        contributes = not self._leave_out_own() and contributes
        # Collectives follow, or may; and a rank without gradients has nothing to do but wait.
        asks = counts or trains_more or at_once
        waits = bool(self._arrangement.layout.sparse) or asks or not contributes or veto.reads_at_once
        pipeline.requests = Requests(
            weights=counts,
            trained=trains_more,
            vetoed=veto.is_noted,
            late=self._late_failure is not None,
            known=waits,
        )
        pipeline.flush()
        with pipeline.section:
            correction = weights.finish(self.divisor)
            pipeline.finish(correction=correction, norms=norms)
            if waits:
                pipeline.await_requests()
            return self._conclude(correction, uncounted=contributes and not weights.counting)

    def _conclude(self, correction: float | torch.Tensor | None, *, uncounted: bool) -> bool:
        """Do what the ballot requests: returns whether there are means. Collective if anything was requested."""
        pipeline = self._pipeline
        verdict = self._hear_vetoes()
        if verdict is not None and verdict.skips:
            invalidate(pipeline.buckets, self._arrangement.outside(), finite=verdict.finite)
            pipeline.conclude(well=False)
            return False
        late = self._correct(dropped=verdict.dropped if verdict else 0, uncounted=uncounted)
        divisor = pipeline.division.divisor / pipeline.division.local_scale / late
        self._reduce_outside(divisor if correction is None else divisor / correction)
        pipeline.conclude()
        return True

    def _correct(self, *, dropped: int, uncounted: bool) -> float:
        """Apply to the means what is known only now, and return the factor: weights that were not announced, and ranks
        that are left out. Collective, where there is such a thing."""
        weights, pipeline, correction = self._weights, self._pipeline, 1.0
        if pipeline.requests.weights:
            correction = weights.follow_up(pipeline.division.divisor, uncounted=uncounted) or 1.0
        elif dropped and weights.total:
            # The sum that was sent earlier counts what those ranks had.
            correction = weights.follow_up(weights.total, uncounted=uncounted) or 1.0
        if dropped and not weights.total and self.divisor > dropped:
            correction = self.divisor / (self.divisor - dropped)
        if correction != 1.0:
            pipeline.correct(correction)
        return correction

    # -- vetoes ----------------------------------------------------------------------------------------------------

    def _leave_out_own(self) -> bool:
        """Check what does not pass through the pipeline; drop this rank's gradients if it is left out of the mean."""
        arrangement, veto = self._arrangement, self._pipeline.veto
        if veto.check is not None:
            veto.check.look_at(arrangement.gradients_outside())
        if not veto.holds_back:
            return False
        for bucket in arrangement.buckets:
            bucket.gather()
            assert veto.check is not None
            veto.check.look(bucket)
        if not veto.reason:
            return False
        # From here on this rank counts as one without gradients and without weight.
        arrangement.drop_gradients()
        self._outside.clear()
        self._weights.reset()
        return True

    def _hear_vetoes(self) -> Verdict | None:
        """The verdict on the ballot, if any rank has vetoed. Collective then. A failed rank does not take part."""
        pipeline = self._pipeline
        if pipeline.failed:
            return pipeline.veto.tolerate(pipeline.failed)
        if pipeline.requests.late:
            # Ranks raise at the end of this window, for the previous one.
            return Verdict()
        return pipeline.veto.hear() if pipeline.requests.vetoed else None

    def _reduce_outside(self, divisor: float | torch.Tensor) -> None:
        """Average what has no place in a bucket: sparse gradients, and those of parameters that are trained again."""
        self._outside.reduce(self._arrangement.layout.sparse, divisor)
        if not self._pipeline.requests.trained:
            return
        if self._layout_is_held:
            self._refuse_other_layout()
        taken_in = self._arrangement.take_in()
        for index in taken_in:
            self._outside.land(index)
        self._outside.reduce(taken_in, divisor)

    def raise_late(self) -> None:
        """Raise what was heard about the previous window. Not before this one is over: raising earlier would leave the
        others waiting for this rank, or report a false failure to them."""
        error, self._late_failure = self._late_failure, None
        if error is not None:
            raise error
