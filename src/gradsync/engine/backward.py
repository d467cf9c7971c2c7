"""From ``backward()`` to averaged gradients: what happens during one backward.

The walk of a gradient::

    ready_hooks          a parameter's gradient is ready             stop 1
    chunk.land           it lands in its slot of a bucket            stop 2
    pipeline             full buckets are settled and started        stops 3 and 4
    backward_ended       the rest is started, all are finished       stop 5

What happens between two backwards, windows and steps, is in :mod:`gradsync.engine.synchronizer`. Parameters are known
here, not modules.

[Note: which backward synchronizes] It is read at the first sign of a backward, from ``enabled`` (which ``no_sync``
turns off) and from what ``enabled`` was when the forward ran. So ``no_sync`` around backward alone suffices. If one
backward runs through several forwards and one of them synchronizes, the backward does.

[Note: the first window] Nothing is started before the first synchronized backward has ended: until then it is not
known in which order gradients come, nor how often a parameter's hook fires (more than once where reentrant
checkpointing runs through a shared parameter). From the second window on buckets overlap.

[Note: a failed backward] When a backward raises, the synchronization is brought to its end with a vote in the ballot,
so that the other ranks raise too, before the error reaches the user. Nobody goes on until the half-made gradients have
been zeroed. The ballot travels in the last bucket, which therefore starts when backward has ended and not before: a
rank that fails at the very end would otherwise have told nobody.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from gradsync.bucket import Bucket, ParameterSpec
from gradsync.bucket.arrangement import Arrangement
from gradsync.bucket.norm import BucketNorms
from gradsync.bucket.precise import PreciseGradients
from gradsync.engine.abstention import Abstention, Offer
from gradsync.engine.backward_watch import (
    NO_TASK,
    accumulates,
    current_task,
    inside_inner_task,
    watch_backward,
    watch_failures,
)
from gradsync.engine.fingerprints import Comparison
from gradsync.engine.forwards import Forwards
from gradsync.engine.meeting import Meeting, Present
from gradsync.engine.options import SynchronizerOptions
from gradsync.engine.phase import Phase, Phases, Switches
from gradsync.engine.pipeline import Pipeline
from gradsync.engine.ready_hooks import ReadyHooks
from gradsync.engine.sharing import Sharing
from gradsync.engine.sparse_reduction import SparseGradients
from gradsync.engine.turns import Turns
from gradsync.engine.veto import Veto
from gradsync.errors import MisuseError
from gradsync.reduction import Reduction
from gradsync.watch import PaceMeter
from gradsync.window import Window, WindowState, has_nonzero_gradients

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
        self.switches = Switches()
        self.forwards = Forwards()
        # Those that went well, and those of which all ranks know that they did not.
        self.synchronizations = self.failures = 0
        self.pace = PaceMeter()
        self.observer = options.watchers()
        self.phases = Phases()
        self.veto = Veto(options.policy.on_veto, options.communicator)
        self.abstention = Abstention()
        self.pipeline = Pipeline(options.communicator, options.policy.reduction, self.veto)
        self.arrangement = Arrangement(self.parameters, specs, options.of_buckets())
        self.window = Window(options.communicator, self.arrangement.outside)
        dtype = options.policy.accumulation_dtype
        self._precise = None if dtype is None else PreciseGradients(self.parameters, dtype)
        self._hooks = ReadyHooks(self.parameters, self, self.pipeline, self.phases)
        self._sparse = SparseGradients(self.parameters, options.communicator, dtype)
        self._turns = Turns(self, options.communicator)
        self._meeting = Meeting(self.arrangement, self.pipeline, self.window.weights, self._sparse)
        prints = options.policy.fingerprints
        if prints is not None:
            self._meeting.comparison = Comparison(prints, specs, options.communicator, options.keeper)
        self._norms: BucketNorms | None = None
        # Who has the buckets while no backward runs, where each rank has a share of them.
        self.sharing = Sharing(options.communicator)
        # Whether backwards have come that no output told of: then gradients are counted, always.
        self._unwatched = False
        # The weight of the running backward has been counted.
        self._announced = False
        # The graph task of the running backward, and what no hook will tell of.
        self._task = NO_TASK
        self._homeless: list[tuple[torch.Tensor, int]] = []
        # Whether the others know of the failure that has broken this one.
        self.told = False
        watch_failures()
        options.policy.reduction.examine(specs)
        self.build()

    @property
    def phase(self) -> Phase:
        return self.phases.now

    @property
    def counting(self) -> bool:
        """Whether hooks count every gradient, as opposed to looking at chunks; see :mod:`.ready_hooks`."""
        return self._hooks.counting

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they start."""
        return self.pipeline.buckets

    # -- set-up and relearning -----------------------------------------------------------------------------------

    def build(self) -> None:
        """Make the buckets, or make them anew, between two windows or before the first bucket of one starts."""
        # The old buckets go before new ones come: what holds them lets go first.
        self._hooks.remove()
        self.sharing.take_back(self.buckets)
        if self.sharing.tenant is not None:
            self.sharing.tenant.move_out()
        self.window.means_left_buckets()
        if self._precise is not None:
            self._precise.forget()
        self.pipeline.lay([])
        reduction = self.pipeline.reduction
        self.arrangement.shares = self.communicator.world_size if reduction.scatters else 1
        self.arrangement.unit = reduction.unit(self.communicator.world_size)
        self.arrangement.build()
        tuner = self.options.tuner
        if self.observer is not None and tuner is not None and tuner.finished:
            self.observer = self.observer.without(tuner)
        self.pipeline.lay(self.arrangement.buckets, self.observer)
        reduction.rebuilt(self.arrangement.layout)
        if self.sharing.tenant is not None:
            self.sharing.tenant.moved(self.buckets)
        self._hooks.register(self.arrangement.places, counting=True)

    def reduce_with(self, reduction: Reduction) -> None:
        """Exchange the reduction, between two windows."""
        self.sharing.require_tenant_served(scatters=reduction.scatters)
        reduction.examine(self.arrangement.specs)
        self.pipeline.reduce_with(reduction)
        self._norms = None
        self.build()

    def divide_by(self, ranks: int) -> None:
        """Take the mean over so many ranks, where windows are not weighted."""
        self._meeting.divisor = float(ranks)

    def norms(self, norm_type: float) -> BucketNorms:
        """The norms of the buckets; from the next window on they are computed as buckets finish."""
        if self._norms is None or self._norms.norm_type != norm_type:
            self._norms = BucketNorms(norm_type)
        return self._norms

    def count_always(self) -> None:
        """A backward has come that no output told of, so looking at chunks is not enough."""
        self._unwatched = True

    def detach(self) -> None:
        """Remove all hooks. Gradients stay where they are; nothing is synchronized any more."""
        self.phases.enter(Phase.DETACHED)
        self._hooks.remove()
        if self._precise is not None:
            self._precise.restore()

    # -- a backward begins ---------------------------------------------------------------------------------------

    def on_output_gradient(self, forward_synchronizes: bool, forward_task: int, offer: Offer) -> None:
        """The gradient of a forward's output is there: a backward runs, or runs on."""
        if self.phase is Phase.DETACHED or not accumulates():
            return
        if self.phases.busy and forward_task == NO_TASK and current_task() != self._task:
            self.recover()
        if not self.phases.busy and not any(parameter.requires_grad for parameter in self.parameters):
            # All are frozen for the moment, as a discriminator is while the generator learns.
            return
        if offer.withdrawn:
            self.abstention.refuse_backward()
        if not self.phases.busy:
            self._begin()
        switches = self.switches
        if self.phase is Phase.LOCAL and switches.enabled and (forward_synchronizes or switches.forced):
            self._become_synchronizing()

    def begin_at_parameter(self, index: int) -> None:
        """No output told of this backward; its first gradient does. See :mod:`gradsync.engine.backward_watch`."""
        self.count_always()
        if self.abstention.stands:
            self.abstention.refuse_backward()
        # Inside an inner task the end is not the end: gradients stay as they are until a later sign, or a step.
        if not inside_inner_task():
            self._begin(late=True)
            if self.switches.enabled and (self.switches.forced or self.forwards.last_synchronizes is not False):
                self._become_synchronizing()
        self._hooks.arrivals.append(index)
        place = self.arrangement.places[index]
        if place is None:
            self.sparse_ready(index)
            return
        bucket, chunk, slot = place
        if not self._hooks.counting:
            self.pipeline.chunk_overdue(bucket, chunk)
        elif chunk.land(slot):
            self.pipeline.chunk_full(bucket, chunk)

    @contextmanager
    def announced(self) -> Iterator[None]:
        """A backward that was counted already runs in here."""
        self.require_whole()
        self.sharing.take_back(self.buckets)
        self.window.begin_backward(self.buckets)
        self.expect_backward()
        self._announced = True
        try:
            yield
        finally:
            self._announced = False

    def expect_backward(self) -> None:
        """A backward is near: gradients of narrow parameters must come out wide. May be called any number of times."""
        if self._precise is not None:
            self.window.exchange(self._precise.widen, self.buckets, self._precise.parameters)

    def expect_step(self) -> None:
        """A step is near, and a forward may have run since the means came: the optimizer gets narrow ones."""
        if self._precise is not None and not self.pipeline.reduction.scatters:
            self.window.exchange(self._precise.restore, self.buckets, self._precise.parameters)

    def _begin(self, *, late: bool = False) -> None:
        self.require_whole()
        self.sharing.take_back(self.buckets)
        if not self._announced:
            self.window.weights.add_plain()
            self.window.begin_backward(self.buckets, late=late)
            self.expect_backward()
        self.phases.enter(Phase.LOCAL)
        self._task = current_task()
        if self.options.keeper is not None:
            self.options.keeper.resume()
        self._hooks.arrivals.clear()
        self._homeless = self.arrangement.homeless()
        watch_backward(self)
        if self.observer is not None:
            self.observer.backward_began(synchronizes=self.switches.enabled)

    # -- it synchronizes -----------------------------------------------------------------------------------------

    def _become_synchronizing(self) -> None:
        self.phases.enter(Phase.SYNCHRONIZING)
        self.sharing.take_back(self.buckets)
        leads = self._turns.take_lead()
        if leads:
            self._meet()
        counting = self._must_count()
        if counting != self._hooks.counting:
            self._hooks.register(self.arrangement.places, counting=counting)
        self._hooks.stay_last()
        # See [Note: the first window], and :mod:`gradsync.engine.turns`.
        order = self.arrangement.order
        overlapping = leads and order.learned and order.observed and self.options.policy.schedule == "overlapped"
        self.pipeline.begin(overlapping=overlapping and not self.veto.holds_back, by_sight=not counting)

    def _meet(self) -> None:
        present = Present(contributes=self._contributes, arrivals=self._hooks.arrivals, absent=self._announced_absent())
        self._meeting.before_buckets(present, self.build)

    def _announced_absent(self) -> Collection[int] | None:
        return self.forwards.absent if self.options.droppable else None

    @property
    def _contributes(self) -> bool:
        return self._task != NO_TASK or self.window.state is WindowState.UNSYNCHRONIZED

    def _must_count(self) -> bool:
        """Whether gradients that are there do not show that they have come in this backward, or the order is wanted."""
        return (
            self.arrangement.order.observing
            or self._unwatched
            or self.pipeline.wire_is_seen
            or self.arrangement.repeats
            or self.has_gradients()
        )

    def has_gradients(self) -> bool:
        """Whether any parameter has one."""
        # A plain loop: over thousands of parameters it is a quarter faster than any() with map().
        for parameter in self.parameters:  # noqa: SIM110
            if parameter.grad is not None:
                return True
        return False

    def sparse_ready(self, index: int) -> None:
        """A gradient that has no place in a bucket; it is reduced after the buckets."""
        self._sparse.land(index)

    # -- it ends -------------------------------------------------------------------------------------------------

    def backward_ended(self) -> None:
        """Stop 5: autograd has finished; so do the buckets."""
        if self.phase is Phase.DETACHED:
            return
        if self.observer is not None:
            self.observer.backward_ended()
        accumulated = self.window.state is WindowState.UNSYNCHRONIZED
        arrived = self._has_arrived()
        if self.phase is Phase.SYNCHRONIZING and (arrived or accumulated):
            self._finish()
            return
        for bucket in self.buckets:
            bucket.gather()
        self._leave(Phase.IDLE)
        self.window.backward_ended(self.buckets, arrived=arrived)

    def _has_arrived(self) -> bool:
        """Whether the backward that ends has left a gradient."""
        if self._hooks.arrivals or (not self._hooks.counting and self.has_gradients()):
            return True
        before, now = self._homeless, self.arrangement.homeless()
        return len(now) != len(before) or any(
            mine is not old or version != seen for (mine, version), (old, seen) in zip(now, before, strict=True)
        )

    def synchronize(self) -> None:
        """Average what has accumulated, without a backward. Collective."""
        self._hooks.arrivals.clear()
        try:
            self.window.begin_synchronization()
            self._become_synchronizing()
        except MisuseError:
            self.fail()
            raise
        except BaseException:
            self.recover()
            raise
        self._finish()

    def _finish(self) -> None:
        try:
            if not self._turns.leads:
                self._turns.take_lead()
                self._meet()
            if self.window.is_vetoed:
                self.veto.stand()
            contributes = self._contributes
            has_means = self._meeting.exchange(contributes=contributes, norms=self._norms)
        except BaseException:
            self.recover()
            raise
        self.synchronizations += 1
        self.pace.window_ended(worked=contributes)
        if has_means:
            self.arrangement.window_finished(self._hooks.arrivals)
        self._leave_synchronization(Phase.IDLE)
        abstained = self.veto.abstains
        self.veto.forget()
        (self.window.synchronized if has_means else self.window.vetoed)(self.buckets)
        scatters = self.pipeline.reduction.scatters
        if self._precise is not None and self.window.finished and not scatters:
            self.window.exchange(partial(self._precise.narrow, self.buckets), self.buckets, self._precise.parameters)
            self.window.means_left_buckets()
        if scatters:
            self.sharing.hand_out(self.buckets)
        if self.window.is_vetoed and self.window.is_stepped_by_closure:
            self.arrangement.drop_gradients()
            self.window.close()
            self.window.step_was_skipped = True
        if abstained:
            self.abstained()
        if self.observer is not None:
            self.observer.synchronization_finished()
        self._meeting.raise_late()

    def _leave(self, phase: Phase) -> None:
        """The one way out of a backward, whatever has become of it."""
        self._turns.give_up()
        self.forwards.close_backward()
        self.pipeline.reset()
        if self.options.keeper is not None:
            self.options.keeper.release_all()
        self._task = NO_TASK
        self.phases.enter(phase)

    def _leave_synchronization(self, phase: Phase) -> None:
        """What was noted for one synchronization is not for the next."""
        self.arrangement.window_ended()
        self.forwards.close_window()
        self._sparse.clear()
        self._leave(phase)

    # -- it fails --------------------------------------------------------------------------------------------------

    def backward_failed(self, forward_synchronizes: bool) -> None:
        """Autograd has raised. A backward that was local so far may have been on its way to a forward that is not."""
        switches = self.switches
        if self.phase is Phase.LOCAL and switches.enabled and (forward_synchronizes or switches.forced):
            self.fail()
        elif self.phases.busy:
            self.recover()

    def output_unreached(self, forward_synchronizes: bool) -> None:
        """A backward failed on its way to the output of a forward: on the other ranks it has come there, or will.

        Or it was refused there, for what an earlier failure has left behind.
        """
        switches = self.switches
        reaches = not self.phases.busy and any(parameter.requires_grad for parameter in self.parameters)
        if reaches and switches.enabled and (forward_synchronizes or switches.forced):
            self.told = False
            self.fail()

    def recover(self) -> None:
        """Bring the synchronization of a failed backward to its end. See [Note: a failed backward]."""
        self.told = self.phase is Phase.SYNCHRONIZING
        if self.phase is Phase.SYNCHRONIZING and not self.pipeline.complete:
            if not self.arrangement.order.running:
                # It was another model's turn. The other ranks meet for this one next.
                with contextlib.suppress(Exception):
                    self._turns.take_lead()
                    self._meet()
            self.pipeline.abandon()
        abstained = self.told and self.veto.abstains
        if self.told:
            self.failures += 1
            self.veto.forget()
            # What was skipped was another window; a step that follows has nothing to skip.
            self.window.step_was_skipped = False
        self._hooks.arrivals.clear()
        self.window.discard()
        self.window.is_vetoed = self.told and self.veto.forgives
        self._leave_synchronization(Phase.BROKEN)
        self.abstention.answers_failure = False
        if abstained:
            self.abstained()

    def abstained(self) -> None:
        """All ranks have heard that this one abstains, or would."""
        self.abstention.told(self.buckets, self.arrangement.outside())

    def begin_another(self) -> None:
        """Whatever comes now is of another window than one that failed, or from which this rank has abstained: of that
        the others have not heard. See [Note: the same window]."""
        self.abstention.end()
        self.told = False

    @property
    def has_told(self) -> bool:
        """Whether a failure has broken this engine of which the others know, and nothing has begun since."""
        return self.phase is Phase.BROKEN and self.told

    def failed_on_all(self) -> None:
        """All ranks have raised, for a reason that they have in common: nobody waits for this one."""
        self.failures += 1
        self.arrangement.drop_gradients()
        self.window.discard()

    def fail(self) -> None:
        """Take part in the synchronization of the other ranks, telling them that this rank failed."""
        if self.phase is Phase.DETACHED or self.has_told:
            return
        try:
            self.sharing.take_back(self.buckets, worthless=True)
            if self.phase is not Phase.SYNCHRONIZING:
                self._become_synchronizing()
        finally:
            self.recover()

    def require_whole(self) -> None:
        """Refuse to go on with what a failed backward has left behind."""
        if self.phase is not Phase.BROKEN:
            return
        if has_nonzero_gradients(self.parameters):
            raise MisuseError(
                "an earlier backward failed, on this rank or another, and left gradients that are no mean of anything. "
                "Call zero_grad() before you go on"
            )
        self.phases.enter(Phase.IDLE)
