"""The life of a backward: it begins, its gradients are ready, and it ends with means or fails.

The engine decides what kind of backward it is. :mod:`~gradsync.core.engine.exchange` does what all ranks do together,
and :mod:`~gradsync.core.engine.gradient_store` knows where gradients lie. What happens between two backwards is in
:mod:`~gradsync.core.engine.blocks` (windows) and :mod:`~gradsync.core.engine.step_guard` (steps). docs/architecture.md
draws the path of a gradient.

[Note: which backward synchronizes] This is decided at the first sign of a backward, from ``enabled`` (which ``no_sync``
turns off) and from what ``enabled`` was when the forward ran. So ``no_sync`` around backward alone suffices. If one
backward runs through several forwards and one of them synchronizes, the backward does.

[Note: a failed backward] When a backward raises, the synchronization is completed with a vote in the control flags, so
that the other ranks raise too, before the error reaches the user. No rank goes on until the half-made gradients have
been zeroed. The flags are in the last bucket, which therefore starts only when backward has ended: otherwise a rank
that fails at the very end could no longer tell the others. :mod:`gradsync.core.engine.backward_watch` detects it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from gradsync.base.errors import MisuseError
from gradsync.communicator.logs import log_errors
from gradsync.core.bucket import Bucket, ParameterSpec
from gradsync.core.bucket.arrangement import Arrangement
from gradsync.core.engine.backward_watch import (
    NO_TASK,
    accumulates,
    current_task,
    inside_inner_task,
    watch_backward,
    watch_failures,
)
from gradsync.core.engine.exchange import GradientExchange
from gradsync.core.engine.gradient_store import GradientStore
from gradsync.core.engine.observer import Observers
from gradsync.core.engine.pipeline import Pipeline
from gradsync.core.engine.policy import SynchronizerOptions
from gradsync.core.engine.ready_hooks import ReadyHooks
from gradsync.core.engine.state import Phase, Phases, Switches
from gradsync.core.window import Reported, Window, WindowState, has_nonzero_gradients
from gradsync.core.window.skip_vote import SkipVote

__all__ = ["BackwardEngine"]


class BackwardEngine:
    """Averages the gradients of ``parameters`` over the ranks of a communicator, during backward."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        options: SynchronizerOptions,
    ) -> None:
        self.options = options
        self.parameters = list(parameters)
        self.communicator = options.communicator
        self.switches, self.phases = Switches(), Phases()
        self.skip_vote = SkipVote(options.policy.on_bad_step, options.communicator)
        self.pipeline = Pipeline(options.communicator, options.policy.reduction, self.skip_vote)
        self.arrangement = Arrangement(
            self.parameters,
            specs,
            world_size=options.communicator.world_size,
            allocate=options.communicator.allocate,
            caps=options.caps,
            tuner=options.tuner,
            before_gather=None if options.swapper is None else options.swapper.release,
        )
        self._hooks = ReadyHooks(self.parameters, self, self.pipeline, self.phases)
        self.window = Window(options.communicator, self.arrangement.outside_parameters)
        self.store = store = GradientStore(self.arrangement, self.pipeline, self._hooks, self.window, options)
        self._sparse = store.sparse
        self.exchange = GradientExchange(store, self.phases, options)
        # Whether the weight of the running backward has been counted.
        self._announced = False
        # The state before the running backward of gradients that no hook reports.
        self._newly_trained: list[tuple[torch.Tensor, int]] = []
        watch_failures()
        options.policy.reduction.examine(specs)
        store.build()

    @property
    def phase(self) -> Phase:
        return self.phases.now

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they start."""
        return self.pipeline.buckets

    @property
    def observer(self) -> Observers | None:
        """All observers as one, if there are any."""
        return self.store.observer

    def detach(self) -> None:
        """Remove all hooks. Gradients stay where they are; nothing is synchronized from now on."""
        self.phases.enter(Phase.DETACHED)
        self.store.detach()

    # -- a backward begins ---------------------------------------------------------------------------------------

    def on_output_gradient(self, forward_synchronizes: bool, forward_task: int, abstentions: int) -> None:
        """Start or continue a backward: the gradient of a forward's output is there."""
        if self.phase is Phase.DETACHED or not accumulates():
            return
        if self.phases.busy and forward_task == NO_TASK and self.phases.task != current_task():
            self.recover()
        if not self.phases.busy and not any(parameter.requires_grad for parameter in self.parameters):
            # All are frozen at the moment, like a discriminator while the generator is trained.
            return
        if abstentions != self.window.abstentions:
            self.window.refuse_backward()
        if not self.phases.busy:
            self._begin()
        if self.phase is Phase.LOCAL and self.switches.lets_synchronize(forward_synchronizes):
            self.exchange.begin()

    def begin_at_parameter(self, index: int) -> None:
        """Begin a backward that no output announced, at its first gradient.

        See :mod:`gradsync.core.engine.backward_watch`.
        """
        self.exchange.counts_always = True
        self.window.expect_backward()
        # Inside an inner task the end is not the end: gradients stay as they are until a later sign, or a step.
        if not inside_inner_task():
            self._begin(late=True)
            if self.switches.lets_synchronize(self.window.last_synchronizes is not False):
                self.exchange.begin()
        self._hooks.arrivals.append(index)
        place = self.arrangement.places[index]
        if place is None:
            # It is reduced after the buckets.
            self._sparse.mark_ready(index)
            return
        bucket, chunk, slot = place
        if not self._hooks.per_parameter:
            self.pipeline.chunk_overdue(bucket, chunk)
        elif chunk.mark_ready(slot):
            self.pipeline.chunk_full(bucket, chunk)

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Context in which a backward runs that was already counted."""
        self.require_whole()
        self.store.take_back()
        self._join_window()
        self._announced = True
        try:
            yield
        finally:
            self._announced = False

    def _begin(self, *, late: bool = False) -> None:
        """Start the backward whose graph task calls this. As far as is known, its gradients stay local."""
        self.require_whole()
        self.store.take_back()
        if not self._announced:
            self.window.weights.add_plain()
            self._join_window(late=late)
        self.phases.enter(Phase.LOCAL)
        self.phases.task = current_task()
        if self.options.swapper is not None:
            self.options.swapper.resume()
        self._hooks.arrivals.clear()
        self._newly_trained = self.arrangement.newly_trained_gradients()
        watch_backward(self)
        if self.observer is not None:
            self.observer.backward_began(synchronizes=self.switches.enabled)

    def _join_window(self, *, late: bool = False) -> None:
        # Wide means are compared with those that the user had, before they become a term of a sum again.
        self.store.expect_backward()
        self.window.begin_backward(self.buckets, late=late)

    # -- it ends -------------------------------------------------------------------------------------------------

    def backward_ended(self) -> None:
        """Finish the buckets, as autograd has finished: stage 5."""
        if self.phase is Phase.DETACHED:
            return
        if self.observer is not None:
            self.observer.backward_ended()
        accumulated = self.window.state is WindowState.UNSYNCHRONIZED
        arrived = self._left_gradients()
        if self.phase is Phase.SYNCHRONIZING and (arrived or accumulated):
            self._finish()
            return
        for bucket in self.buckets:
            bucket.gather()
        self._clear_backward()
        self.phases.leave(Phase.IDLE)
        self.window.backward_ended(self.buckets, arrived=arrived)

    def _left_gradients(self) -> bool:
        """Whether the backward that ends has left a gradient."""
        if self._hooks.arrivals or (not self._hooks.per_parameter and self.arrangement.has_gradients()):
            return True
        before, now = self._newly_trained, self.arrangement.newly_trained_gradients()
        return len(now) != len(before) or any(
            mine is not old or version != seen for (mine, version), (old, seen) in zip(now, before, strict=True)
        )

    def synchronize(self) -> None:
        """Average what has accumulated, without a backward. Collective."""
        try:
            self._hooks.arrivals.clear()
            self.window.begin_synchronization()
            self.exchange.begin()
        except BaseException:
            # On an interrupt too, and where nothing has started yet: the others wait for this rank.
            self.fail()
            raise
        self._finish()

    def _finish(self) -> None:
        try:
            has_means = self.exchange.run()
        except BaseException:
            self.recover()
            raise
        self._complete(has_means=has_means)

    def _complete(self, *, has_means: bool) -> None:
        """Hand out the result, which all ranks have now. Raises what the previous window has left."""
        store, window = self.store, self.window
        self.exchange.pace.window_ended(worked=self.exchange.contributes)
        if has_means:
            self.arrangement.window_finished(self._hooks.arrivals)
        # Before the means are handed out: reopening a bucket must not look like a change to whatever watches it.
        self._clear_window()
        abstained = self.skip_vote.abstains
        self.skip_vote.forget()
        (window.synchronized if has_means else window.rejected)(store.buckets)
        store.hand_out()
        if window.is_rejected and window.is_stepped_by_closure:
            self.arrangement.drop_gradients()
            window.optimizer_stepped()
            window.step_was_skipped = True
            if store.observer is not None:
                store.observer.step_skipped()
        if abstained:
            self.abstained()
        if store.observer is not None:
            store.observer.synchronization_finished()
        self.phases.leave(Phase.IDLE)
        self.exchange.raise_late()

    def abstained(self) -> None:
        """Note that all ranks know that this one abstains."""
        self.window.abstained(self.buckets)

    def _clear_window(self) -> None:
        """Clear what was noted for one synchronization only, whatever its outcome."""
        self.arrangement.window_ended()
        self.window.end_synchronization()
        self._sparse.clear()
        self._clear_backward()

    def _clear_backward(self) -> None:
        self.exchange.give_up_lead()
        self.window.end_backward()
        self.pipeline.reset()
        if self.options.swapper is not None:
            self.options.swapper.release_all()
        self.phases.task = None

    # -- it fails: see [Note: a failed backward] -------------------------------------------------------------------

    def backward_failed(self, forward_synchronizes: bool) -> None:
        """Report to the others that autograd has raised: even a local backward may have been meant to synchronize."""
        if self.phase is Phase.LOCAL and self.switches.lets_synchronize(forward_synchronizes):
            self.fail()
        elif self.phases.busy:
            self.recover()

    def output_unreached(self, forward_synchronizes: bool) -> None:
        """Recover from a backward that did not reach the output of a forward, as it does on the other ranks.

        It failed on its way there, or was refused there, because of what an earlier failure has left behind.
        """
        if self.phases.busy:
            # It had reached the output, and an interrupt has kept it from saying so.
            self.backward_failed(forward_synchronizes)
            return
        reaches = any(parameter.requires_grad for parameter in self.parameters)
        if reaches and self.switches.lets_synchronize(forward_synchronizes):
            # It is a later backward than the one that the others know of.
            self.window.reported = None
            self.fail()

    @property
    def has_reported(self) -> bool:
        """Whether the other ranks know of the failure that broke this engine, and nothing has begun since."""
        return self.phase is Phase.BROKEN and self.window.reported is not None

    def fail(self) -> None:
        """Take part in the synchronization of the other ranks, reporting that this rank failed."""
        if self.phase is Phase.DETACHED or self.has_reported:
            return
        try:
            with log_errors("taking the gradients back failed"):
                self.store.take_back(worthless=True)
            if self.phase is not Phase.SYNCHRONIZING:
                # Whatever this raises, recovering tells the others; the caller has an error of its own to raise.
                with log_errors("beginning the synchronization failed"):
                    self.exchange.begin()
        finally:
            self.recover()

    def recover(self) -> None:
        """Complete the synchronization of a failed backward, on this rank or another.

        Works in any phase, and again where an interrupt has cut it short.
        """
        others_wait, abstained = self.phase is Phase.SYNCHRONIZING, False
        self.window.reported = Reported.FAILED if others_wait else None
        if others_wait:
            abstained = self._report_failure()
        self._discard_backward(is_reported=others_wait)
        self.phases.leave(Phase.BROKEN)
        if abstained:
            self.abstained()

    def _report_failure(self) -> bool:
        """Complete the collectives that the other ranks wait for, with a failure vote: whether this rank abstains."""
        window = self.window
        # An interrupt may come after this rank has exchanged everything and counted that.
        window.failures += not window.exchanged
        self.exchange.abandon()
        abstains = self.skip_vote.abstains
        # Other ranks may have ended this window successfully, or learn of the failure in the next one. Windows are
        # compared between ranks by number.
        self.exchange.pace.window_ended(worked=False)
        self.skip_vote.forget()
        # What was skipped was a different window; a step that follows has nothing to skip.
        window.step_was_skipped = False
        return abstains

    def _discard_backward(self, *, is_reported: bool) -> None:
        """Drop what the failed backward has left in hooks, window and buckets."""
        self.store.mend_hooks()
        self._hooks.arrivals.clear()
        self.window.discard()
        self.window.is_rejected = is_reported and self.skip_vote.tolerates
        self._clear_window()

    def require_attached(self, what: str) -> None:
        """Refuse to communicate inside a backward, or for another wrapper."""
        if current_task() != NO_TASK:
            raise MisuseError(f"{what}() was called inside backward. Call it after backward() has returned")
        if self.phase is Phase.DETACHED:
            raise MisuseError(
                "there is nothing to synchronize: the engine was detached from these parameters, or another wrapper "
                "has taken them. Use that one, or wrap the model again"
            )

    def require_whole(self) -> None:
        """Refuse to continue with what a failed backward has left behind."""
        if self.phase is not Phase.BROKEN:
            return
        if has_nonzero_gradients(self.parameters):
            raise MisuseError(
                "an earlier backward failed, on this rank or another, and left gradients that are no mean of anything. "
                "Call zero_grad() before you go on"
            )
        self.phases.enter(Phase.IDLE)
