"""From ``backward()`` to averaged gradients: autograd's hooks, the buckets, the reduction, the end of backward.

The walk of a gradient::

    ready_hooks          a parameter's gradient is ready             stop 1
    chunk.land           it lands in its slot of a bucket            stop 2
    pipeline             full buckets are gathered and started       stops 3 and 4
    _end_backward        the rest is started, all are finished       stop 5

This is what happens during a backward; what happens between two, windows and steps, is in
:mod:`gradsync.engine.synchronizer`. Parameters are known here, not modules; wrappers tell of forwards.

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

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gradsync.bucket.arrangement import Arrangement, BucketOptions
from gradsync.bucket.bucket import Bucket
from gradsync.bucket.chunk import Chunk
from gradsync.bucket.layout import BucketCaps, BucketLayout, ParameterSpec
from gradsync.bucket.norm import BucketNorms
from gradsync.bucket.precise import PreciseGradients
from gradsync.engine.absence import Absence
from gradsync.engine.backward_watch import NO_TASK, at_end_of_backward, current_task, inside_inner_task, tensors_in
from gradsync.engine.options import SynchronizerOptions
from gradsync.engine.pipeline import Pipeline
from gradsync.engine.ready_hooks import ReadyHooks
from gradsync.engine.sparse_reduction import SparseGradients
from gradsync.engine.turns import Turns
from gradsync.errors import MisuseError, PeerFailedError
from gradsync.reduction import Reduction
from gradsync.window.window import Window, WindowState
from gradsync.window.witness import has_nonzero_gradients

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
        self.specs = list(specs)
        self.reduction = options.reduction
        # Whether backwards synchronize; also those of forwards that ran without; whether steps on local gradients pass.
        self.enabled, self.forced, self.steps_locally = True, False, False
        self.divisor = float(options.communicator.world_size)
        self.window = Window(options.communicator)
        self.synchronizations = 0
        # Set by whoever clips: the norm of every bucket is then computed as it finishes.
        self.norms: BucketNorms | None = None
        dtype = options.accumulation_dtype
        self._precise = None if dtype is None else PreciseGradients(self.parameters, dtype)
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._arrangement = Arrangement(
            self.parameters,
            self.specs,
            BucketOptions(
                communicator=options.communicator,
                caps=options.caps,
                tuner=options.tuner,
                before_gather=None if options.keeper is None else options.keeper.release,
            ),
        )
        self._order = self._arrangement.order
        self._hooks = ReadyHooks(self.parameters, self)
        self._arrivals = self._hooks.arrivals
        self._sparse = SparseGradients(self.parameters, options.communicator)
        self._overdue: list[tuple[Bucket, Chunk]] = []
        self._synchronizing = False
        self._met = False
        self.forward_in_window = False
        self._task = NO_TASK
        self._last_forward_synchronizes: bool | None = None
        self._unwatched_backwards = False
        self._wire_is_seen = False
        self._broken = False
        # The weight of the running backward has been counted.
        self.announced = False
        self._absence = Absence()
        self._turns = Turns(self, options.communicator.group or options.communicator)
        self._detached = False
        self._build()

    @property
    def _in_backward(self) -> bool:
        return not self._hooks.idle

    @_in_backward.setter
    def _in_backward(self, value: bool) -> None:
        self._hooks.idle[:] = [] if value else [True]

    # -- set-up and relearning -----------------------------------------------------------------------------------

    def _build(self) -> None:
        # The old buckets go before new ones come: what holds them lets go first.
        options = self.options
        self._hooks.remove()
        self._overdue.clear()
        self.window.means_left_buckets()
        self._observer = options.watchers
        self._pipeline = Pipeline([], options.communicator, self.reduction)
        self._arrangement.build()
        self._pipeline = Pipeline(self.buckets, options.communicator, self.reduction, self._observer)
        self._pipeline.wire_is_seen |= self._wire_is_seen
        self._hooks.register(self._arrangement.places, counting=True)

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they start."""
        return self._arrangement.buckets

    @property
    def caps(self) -> BucketCaps:
        """How large buckets may be, as far as it is known by now."""
        return self._arrangement.caps

    @property
    def layout(self) -> BucketLayout:
        """The plan of the buckets."""
        return self._arrangement.layout

    def reduce_with(self, reduction: Reduction) -> None:
        """Exchange the reduction, between two windows."""
        self.reduction = reduction
        self._build()

    # -- forwards ------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward with gradients on is about to run."""
        if self._in_backward and current_task() == NO_TASK:
            self._recover()
        self._pipeline.check_deferred()
        self._absence.begin_forward()
        self.forward_in_window = True
        self.expect_backward()

    def end_forward(self, output: Any) -> None:
        """The forward has run: watch its output for the backward to come."""
        self._absence.end_forward()
        synchronizes, task, reference = self.enabled, current_task(), weakref.ref(self)
        self._last_forward_synchronizes = synchronizes
        # Zeroed gradients close a window too: a scaler may have skipped its step.
        state = self.window.state
        closed = state is WindowState.CLOSED or (state is WindowState.SYNCHRONIZED and not self._any_gradient())
        if closed and synchronizes:
            self.window.state = WindowState.OPEN

        def hook(_: torch.Tensor) -> None:
            synchronizer = reference()
            if synchronizer is not None and not synchronizer._detached:
                synchronizer._on_output_gradient(synchronizes, task)

        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(hook)

    def announce_absent(self, parameters: Iterable[torch.Tensor]) -> None:
        """During a forward: no rank will compute gradients of these parameters from it. All ranks must say the same."""
        self._absence.announce(self._index[id(p)] for p in parameters if id(p) in self._index)

    # -- backward ------------------------------------------------------------------------------------------------

    def _on_output_gradient(self, forward_synchronizes: bool, forward_task: int) -> None:
        if self._in_backward and forward_task == NO_TASK and current_task() != self._task:
            self._recover()
        if not self._in_backward:
            if not any(parameter.requires_grad for parameter in self.parameters):
                # All are frozen for the moment, as a discriminator is while the generator learns.
                return
            self._begin_backward()
        if (forward_synchronizes or self.forced) and self.enabled and not self._synchronizing:
            self._become_synchronizing()

    def expect_backward(self) -> None:
        """A backward is near: gradients of narrow parameters must come out wide. May be called any number of times."""
        if self._precise is not None:
            self._precise.widen()

    def announce_backward(self) -> None:
        """A backward that was counted already is about to run."""
        if self._broken:
            self._require_zeroed()
        self.window.begin_backward(self.buckets)
        self.expect_backward()
        self.announced = True

    def _begin_backward(self, *, late: bool = False) -> None:
        if self._broken:
            self._require_zeroed()
        if not self.announced:
            self.window.weights.add_plain()
            self.window.begin_backward(self.buckets, late=late)
            self.expect_backward()
        self._in_backward = True
        self._synchronizing = False
        self._task = current_task()
        if self.options.keeper is not None:
            self.options.keeper.resume()
        self._arrivals.clear()
        self._overdue.clear()
        at_end_of_backward(self._end_backward, self._backward_failed)
        if self._observer is not None:
            self._observer.backward_began(synchronizes=self.enabled)

    def begin_backward_at_parameter(self, index: int) -> None:
        """No output told of this backward; its first gradient does. See :mod:`gradsync.engine.backward_watch`."""
        self._unwatched_backwards = True
        # Inside an inner task the end is not the end: gradients stay as they are until a later sign, or a step.
        if not inside_inner_task():
            self._begin_backward(late=True)
            if self.enabled and (self.forced or self._last_forward_synchronizes is not False):
                self._become_synchronizing()
        self._arrivals.append(index)
        place = self._arrangement.places[index]
        if place is None:
            self.on_sparse_gradient(index)
        elif not self._hooks.counting:
            self.look_at(place[0], place[1])
        elif place[1].land(place[2]):
            self.on_chunk_full(place[0], place[1])

    def _become_synchronizing(self) -> None:
        self._synchronizing = True
        if self._turns.take_lead():
            self._meet()
        counting = self._must_count()
        if counting != self._hooks.counting:
            self._hooks.register(self._arrangement.places, counting=counting)
        self._hooks.stay_last()
        for bucket in self.buckets:
            bucket.watched = not counting
        self._start_ready()

    def _meet(self) -> None:
        """What ranks must agree on before the first bucket starts. Collective, where there is something to agree on.

        Once a synchronization: a backward that reaches no parameter (``autograd.grad``) may have met already.
        """
        if self._met:
            return
        self._met = True
        if self._arrangement.has_unfrozen:
            self._order.invalidate()
        changed = self._order.due and self._arrangement.agree()
        if self._arrangement.tune() or changed:
            self._build()
            self._arrangement.land_again(self._arrivals)
        if self.window.weights.agreed_on:
            self.window.weights.start()
            self._pipeline.divisor = float(self.options.communicator.world_size)
            self._pipeline.local_scale = self.window.weights.landing_scale
        else:
            self.window.weights.skip()
            self._pipeline.divisor, self._pipeline.local_scale = self.divisor, 1.0
        if self.options.droppable and self.reduction.carries_tail:
            self._arrangement.mark_absent(self._absence.window)

    def _must_count(self) -> bool:
        """Whether gradients that are there do not show that they have come in this backward, or the order is wanted."""
        return (
            self._order.observing
            or self._unwatched_backwards
            or self._pipeline.wire_is_seen
            or self._arrangement.repeats
            or self._any_gradient()
        )

    def _any_gradient(self) -> bool:
        # A plain loop: over thousands of parameters it is a quarter faster than any() with map().
        for parameter in self.parameters:  # noqa: SIM110
            if parameter.grad is not None:
                return True
        return False

    def look_at(self, bucket: Bucket, chunk: Chunk) -> None:
        """The last gradient of the chunk, by the learned order, is ready: see whether all are."""
        self._overdue.append((bucket, chunk))
        for candidate in list(self._overdue):
            if candidate[1].land_by_sight():
                self._overdue.remove(candidate)
                self.on_chunk_full(*candidate)

    def on_chunk_full(self, bucket: Bucket, chunk: Chunk) -> None:
        """All gradients of the chunk are ready: bring them in, and start the bucket if that was the last of it."""
        if self._synchronizing and self._overlaps:
            bucket.settle(self._pipeline.scale(bucket), [chunk])
        else:
            # It may not be the end of it: this rank accumulates, or more gradients of the same parameter may come.
            chunk.gather()
        if bucket.note_full_chunk():
            if self._observer is not None:
                self._observer.bucket_ready(bucket)
            if self._synchronizing:
                self._start_ready()

    def on_sparse_gradient(self, index: int) -> None:
        """A gradient that has no place in a bucket; it is reduced after the buckets."""
        self._sparse.land(index)

    @property
    def _overlaps(self) -> bool:
        """Whether buckets start before backward has ended. See [Note: the first window], and :mod:`.turns`."""
        return self.options.schedule == "overlapped" and self._order.learned and self._turns.leads

    def _start_ready(self) -> None:
        if self._overlaps:
            self._pipeline.start_ready()

    def _end_backward(self) -> None:
        """Stop 5: autograd has finished; so do the buckets."""
        if self._observer is not None:
            self._observer.backward_ended()
        accumulated = self.window.state is WindowState.UNSYNCHRONIZED
        arrived = bool(self._arrivals) or (not self._hooks.counting and self._any_gradient())
        if self._synchronizing and (arrived or accumulated):
            self._finish()
        else:
            for bucket in self.buckets:
                bucket.gather()
                bucket.reopen()
            self.window.backward_ended(self.buckets, arrived=arrived)
        self._turns.give_up()
        self._in_backward = self._synchronizing = False
        self._last_forward_synchronizes = None
        if self.options.keeper is not None:
            self.options.keeper.release_all()

    def _finish(self) -> None:
        try:
            if not self._turns.leads:
                self._turns.take_lead()
                self._meet()
            self._pipeline.flush(counted=self._hooks.counting)
            correction = self.window.weights.finish()
            self._pipeline.finish(counted=self._hooks.counting, correction=correction, norms=self.norms)
            divisor = self._pipeline.divisor / self._pipeline.local_scale
            self._sparse.reduce(self.layout.sparse, divisor if correction is None else divisor / correction)
        except BaseException as error:
            self._broken = True
            self.window.discard()
            if not isinstance(error, PeerFailedError):
                self._pipeline.abandon()
            raise
        finally:
            self._turns.give_up()
            self._in_backward = self._synchronizing = self._met = self.forward_in_window = False
            self._absence.close_window()
            self._sparse.clear()
            for bucket in self.buckets:
                bucket.reopen()
        self.synchronizations += 1
        self._wire_is_seen = self._pipeline.wire_is_seen
        self._arrangement.window_finished(self._arrivals)
        self.window.synchronized(self.buckets)
        if self._precise is not None and self.window.finished:
            self._precise.narrow(self.buckets)
            self.window.means_left_buckets()
        if self._observer is not None:
            self._observer.synchronization_finished()

    # -- failures ------------------------------------------------------------------------------------------

    def _backward_failed(self) -> None:
        if self._in_backward:
            self._recover()

    def _recover(self) -> None:
        """Bring the synchronization of a failed backward to its end. See [Note: a failed backward]."""
        synchronizing = self._synchronizing
        self._turns.give_up()
        self._in_backward = self._synchronizing = self._met = self.forward_in_window = False
        self._broken = True
        self._arrivals.clear()
        self._sparse.clear()
        self._absence.close_window()
        if synchronizing:
            self._pipeline.abandon()
        else:
            for bucket in self.buckets:
                bucket.reopen()
        if self.options.keeper is not None:
            self.options.keeper.release_all()
        self.window.discard()

    def _require_zeroed(self) -> None:
        if has_nonzero_gradients(self.parameters):
            raise MisuseError(
                "an earlier backward failed, on this rank or another, and left gradients that are no mean of anything. "
                "Call zero_grad() before you go on"
            )
        self._broken = False
