"""Owns the gradients of an engine: in buckets or outside, wide or narrow, whole or shared out.

Many components hold the buckets: hooks, the pipeline, the window, wide gradients, a sharded optimizer. When buckets are
rebuilt, all of these release the old ones first, so that there is never a second copy of the gradients, and then get
the new ones.
"""

from functools import partial

from gradsync.core.bucket import Bucket
from gradsync.core.bucket.arrangement import Arrangement
from gradsync.core.bucket.norm import BucketNorms
from gradsync.core.bucket.precise import PreciseGradients
from gradsync.core.engine.pipeline import Pipeline
from gradsync.core.engine.policy import SynchronizerOptions
from gradsync.core.engine.ready_hooks import ReadyHooks
from gradsync.core.engine.sharing import Sharing
from gradsync.core.reduction import Reduction
from gradsync.core.reduction.sparse import SparseGradients
from gradsync.core.window import Window

__all__ = ["GradientStore"]


class GradientStore:
    """The gradients of one engine, window after window, and everything that holds their memory."""

    def __init__(
        self, arrangement: Arrangement, pipeline: Pipeline, hooks: ReadyHooks, options: SynchronizerOptions
    ) -> None:
        self.arrangement, self.pipeline, self.hooks = arrangement, pipeline, hooks
        parameters, communicator = arrangement.parameters, options.communicator
        dtype = options.policy.accumulation_dtype
        self.window = Window(communicator, arrangement.outside)
        # The owner of the buckets while no backward runs, where each rank has a share of them.
        self.sharing = Sharing(communicator)
        # Gradients that have no place in a bucket.
        self.sparse = SparseGradients(parameters, communicator, dtype)
        self._precise = None if dtype is None else PreciseGradients(parameters, dtype)
        # Norms that were requested; see :meth:`norms_of`.
        self.norms: BucketNorms | None = None
        self.observer = options.watchers()
        self._tuner = options.tuner

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they start."""
        return self.pipeline.buckets

    # -- buckets are made ----------------------------------------------------------------------------------------

    def build(self) -> None:
        """Make or remake the buckets, between two windows or before the first bucket of one starts."""
        # The old buckets go before the new ones come: whatever holds them releases them first.
        self.hooks.remove()
        self.take_back()
        if self.sharing.client is not None:
            self.sharing.client.move_out()
        self.window.means_left_buckets()
        if self._precise is not None:
            self._precise.forget()
        self.pipeline.lay([])
        reduction, world_size = self.pipeline.reduction, self.pipeline.communicator.world_size
        self.arrangement.shares = world_size if reduction.scatters else 1
        self.arrangement.unit = reduction.unit(world_size)
        self.arrangement.build()
        if self.observer is not None and self._tuner is not None and self._tuner.finished:
            self.observer = self.observer.without(self._tuner)
        self.pipeline.lay(self.arrangement.buckets, self.observer)
        reduction.rebuilt(self.arrangement.layout)
        if self.sharing.client is not None:
            self.sharing.client.moved(self.buckets)
        self.hooks.register(self.arrangement.places, per_parameter=True)

    def mend_hooks(self) -> None:
        """Restore all hooks, if an interrupt came while they were being replaced."""
        if self.hooks.whole:
            return
        if self.pipeline.communicator.world_size == 1:
            # It may have come while buckets were made. A rank with peers cannot make them alone, and has aborted then.
            self.build()
        else:
            self.hooks.register(self.arrangement.places, per_parameter=True)

    def reduce_with(self, reduction: Reduction) -> None:
        """Replace the reduction, between two windows."""
        self.sharing.require_client_served(scatters=reduction.scatters)
        reduction.examine(self.arrangement.specs)
        self.pipeline.reduce_with(reduction)
        self.norms = None
        self.build()

    def norms_of(self, norm_type: float) -> BucketNorms:
        """The norms of the buckets; from the next window on they are computed as buckets finish."""
        if self.norms is None or self.norms.norm_type != norm_type:
            self.norms = BucketNorms(norm_type)
        return self.norms

    def detach(self) -> None:
        """Stop collecting gradients. They stay where they are."""
        self.hooks.remove()
        if self._precise is not None:
            self._precise.restore()

    # -- ownership and width -----------------------------------------------------------------------------------------

    def take_back(self, *, worthless: bool = False) -> None:
        """Gradients are about to arrive: nothing else may hold the buckets. See :meth:`Sharing.take_back`."""
        self.sharing.take_back(self.buckets, worthless=worthless)

    def expect_backward(self) -> None:
        """A backward is near: gradients of narrow parameters must be wide. May be called any number of times."""
        if self._precise is not None:
            self.window.exchange(self._precise.widen, self.buckets, self._precise.parameters)

    def expect_step(self) -> None:
        """A step is near, and a forward may have run since the means came: the optimizer gets narrow gradients."""
        if self._precise is not None and not self.pipeline.reduction.scatters:
            self.window.exchange(self._precise.restore, self.buckets, self._precise.parameters)

    def hand_out(self) -> None:
        """The window is synchronized: give the means to whatever steps on them."""
        scatters = self.pipeline.reduction.scatters
        if self._precise is not None and self.window.finished and not scatters:
            self.window.exchange(partial(self._precise.narrow, self.buckets), self.buckets, self._precise.parameters)
            self.window.means_left_buckets()
        if scatters:
            self.sharing.hand_out(self.buckets)
