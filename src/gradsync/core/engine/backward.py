"""Handles one backward: from ``backward()`` to averaged gradients.

The path of a gradient::

    ready_hooks          a parameter's gradient is ready             stage 1
    chunk.land           it lands in its slot of a bucket            stage 2
    pipeline             full buckets are settled and started        stages 3 and 4
    backward_ended       the rest is started, all are finished       stage 5

The engine detects a backward, decides what kind it is, and delegates the rest::

    gradient_store       where gradients lie, and who owns their memory
    running_backward     which backward it is, and whether it has left a gradient
    synchronization      what is done together with the other ranks
    failed_backwards     what is done when a backward has failed, here or elsewhere

What happens between two backwards, windows and steps, is in :mod:`gradsync.core.engine.synchronizer`. This module
knows parameters, not modules.

[Note: which backward synchronizes] This is decided at the first sign of a backward, from ``enabled`` (which ``no_sync``
turns off) and from what ``enabled`` was when the forward ran. So ``no_sync`` around backward alone suffices. If one
backward runs through several forwards and one of them synchronizes, the backward does.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from gradsync.core.bucket import Bucket, ParameterSpec
from gradsync.core.bucket.arrangement import Arrangement
from gradsync.core.engine.abstention import Abstention, Offer
from gradsync.core.engine.backward_watch import NO_TASK, accumulates, inside_inner_task, watch_backward, watch_failures
from gradsync.core.engine.failed_backwards import FailedBackwards
from gradsync.core.engine.forwards import Forwards
from gradsync.core.engine.gradient_store import GradientStore
from gradsync.core.engine.observer import Observers
from gradsync.core.engine.options import SynchronizerOptions
from gradsync.core.engine.phase import Phase, Phases, Switches
from gradsync.core.engine.pipeline import Pipeline
from gradsync.core.engine.ready_hooks import ReadyHooks
from gradsync.core.engine.running_backward import RunningBackward
from gradsync.core.engine.synchronization import Synchronization
from gradsync.core.engine.veto import Veto
from gradsync.core.window import WindowState

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
        self.forwards, self.abstention = Forwards(), Abstention()
        self.veto = Veto(options.policy.on_veto, options.communicator)
        self.pipeline = Pipeline(options.communicator, options.policy.reduction, self.veto)
        self.arrangement = Arrangement(self.parameters, specs, options.of_buckets())
        self._hooks = ReadyHooks(self.parameters, self, self.pipeline, self.phases)
        self.store = store = GradientStore(self.arrangement, self.pipeline, self._hooks, options)
        self.window, self.sharing, self._sparse = store.window, store.sharing, store.sparse
        self._running = RunningBackward(store, self.phases, options.keeper)
        self.synchronization = Synchronization(store, self._running, self.forwards, self.abstention, options)
        self.failed_backwards = FailedBackwards(self.synchronization, store, self.abstention, self.phases)
        # Whether the weight of the running backward has been counted.
        self._announced = False
        watch_failures()
        options.policy.reduction.examine(specs)
        store.build()

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

    @property
    def observer(self) -> Observers | None:
        """The observers, if there are any."""
        return self.store.observer

    def detach(self) -> None:
        """Remove all hooks. Gradients stay where they are; nothing is synchronized from now on."""
        self.phases.enter(Phase.DETACHED)
        self.store.detach()

    # -- a backward begins ---------------------------------------------------------------------------------------

    def on_output_gradient(self, forward_synchronizes: bool, forward_task: int, offer: Offer) -> None:
        """The gradient of a forward's output is there: a backward has started, or continues."""
        if self.phase is Phase.DETACHED or not accumulates():
            return
        if self.phases.busy and forward_task == NO_TASK and not self._running.is_here:
            self.failed_backwards.recover()
        if not self.phases.busy and not any(parameter.requires_grad for parameter in self.parameters):
            # All are frozen at the moment, like a discriminator while the generator is trained.
            return
        if offer.withdrawn:
            self.abstention.refuse_backward()
        if not self.phases.busy:
            self._begin()
        if self.phase is Phase.LOCAL and self.switches.let_synchronize(forward_synchronizes):
            self.synchronization.begin()

    def begin_at_parameter(self, index: int) -> None:
        """No output announced this backward; its first gradient does: :mod:`gradsync.core.engine.backward_watch`."""
        self.synchronization.count_always()
        if self.abstention.stands:
            self.abstention.refuse_backward()
        # Inside an inner task the end is not the end: gradients stay as they are until a later sign, or a step.
        if not inside_inner_task():
            self._begin(late=True)
            if self.switches.let_synchronize(self.forwards.last_synchronizes is not False):
                self.synchronization.begin()
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
        """Context in which a backward runs that was already counted."""
        self.failed_backwards.require_whole()
        self.store.take_back()
        self.window.begin_backward(self.buckets)
        self.store.expect_backward()
        self._announced = True
        try:
            yield
        finally:
            self._announced = False

    def _begin(self, *, late: bool = False) -> None:
        self.failed_backwards.require_whole()
        self.store.take_back()
        if not self._announced:
            self.window.weights.add_plain()
            self.window.begin_backward(self.buckets, late=late)
            self.store.expect_backward()
        self._running.begin()
        watch_backward(self)
        if self.observer is not None:
            self.observer.backward_began(synchronizes=self.switches.enabled)

    def sparse_ready(self, index: int) -> None:
        """A gradient that has no place in a bucket; it is reduced after the buckets."""
        self._sparse.land(index)

    # -- it ends -------------------------------------------------------------------------------------------------

    def backward_ended(self) -> None:
        """Stage 5: autograd has finished; so do the buckets."""
        if self.phase is Phase.DETACHED:
            return
        if self.observer is not None:
            self.observer.backward_ended()
        accumulated = self.window.state is WindowState.UNSYNCHRONIZED
        arrived = self._running.has_arrived
        if self.phase is Phase.SYNCHRONIZING and (arrived or accumulated):
            self._finish()
            return
        for bucket in self.buckets:
            bucket.gather()
        self.synchronization.leave_backward(Phase.IDLE)
        self.window.backward_ended(self.buckets, arrived=arrived)

    def synchronize(self) -> None:
        """Average what has accumulated, without a backward. Collective."""
        try:
            self._hooks.arrivals.clear()
            self.window.begin_synchronization()
            self.synchronization.begin()
        except BaseException:
            # On an interrupt too, and where nothing has started yet: the others wait for this rank.
            self.failed_backwards.fail()
            raise
        self._finish()

    def _finish(self) -> None:
        try:
            has_means = self.synchronization.exchange()
        except BaseException:
            self.failed_backwards.recover()
            raise
        self.synchronization.finish(has_means=has_means)

    # -- it fails ------------------------------------------------------------------------------------------------

    def backward_failed(self, forward_synchronizes: bool) -> None:
        """Autograd has raised. A backward that was local so far may have been heading for a forward that is not."""
        if self.phase is Phase.LOCAL and self.switches.let_synchronize(forward_synchronizes):
            self.failed_backwards.fail()
        elif self.phases.busy:
            self.failed_backwards.recover()

    def output_unreached(self, forward_synchronizes: bool) -> None:
        """A backward failed on its way to the output of a forward: on the other ranks it has reached it, or will.

        Or it was refused there, because of what an earlier failure has left behind.
        """
        if self.phases.busy:
            # It had reached the output, and an interrupt has kept it from saying so.
            self.backward_failed(forward_synchronizes)
            return
        reaches = any(parameter.requires_grad for parameter in self.parameters)
        if reaches and self.switches.let_synchronize(forward_synchronizes):
            self.failed_backwards.fail_again()

    def begin_another(self) -> None:
        """Everything from here on belongs to a window after one that failed or from which this rank has abstained, and
        which the others have not heard about. See [Note: the same window]."""
        self.abstention.end()
        self.failed_backwards.begin_another()
