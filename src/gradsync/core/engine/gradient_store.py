"""Owns the gradients of an engine: in buckets or outside, wide or narrow, whole or shared out.

Many components hold the buckets: hooks, the pipeline, the window, wide gradients, a sharded optimizer. When buckets are
rebuilt, all of these release the old ones first, so that there is never a second copy of the gradients, and then get
the new ones.

Where a reduction scatters, each rank has only the mean of its own share of the buckets between two backwards. Meanwhile
a sharded optimizer uses the buckets' memory: it reads the gradients of its share, and has the new parameters gathered
into the bucket. It must have left before gradients are written there again::

    backward ──▶ means of shares ──▶ step: new shares ──▶ gathered into the bucket ──▶ parameters ──▶ backward
                 └───────────────────────── hand_out ── take_back ─────────────────────────────────┘
"""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from gradsync.base.errors import MisuseError, PeerFailedError
from gradsync.core.bucket import Bucket
from gradsync.core.bucket.arrangement import Arrangement
from gradsync.core.bucket.norm import BucketNorms
from gradsync.core.bucket.precise import PreciseGradients
from gradsync.core.engine.pipeline import Pipeline
from gradsync.core.engine.policy import SynchronizerOptions
from gradsync.core.engine.ready_hooks import ReadyHooks
from gradsync.core.reduction import Reduction
from gradsync.core.reduction.shared_gradient import SharedGradients, is_zeroed, unshare_views
from gradsync.core.reduction.sparse import SparseGradients
from gradsync.core.window import Window

__all__ = ["BucketClient", "GradientStore"]


class BucketClient(Protocol):
    """Interface of a component that uses the buckets between two backwards."""

    # Whether it does; not where its steps are plain.
    uses_buckets: bool

    @property
    def whole(self) -> Reduction:
        """The reduction to the mean of every gradient on every rank, which would be used without the client."""

    def before_forward(self, module: nn.Module, *, is_compiled: bool) -> None:
        """Prepare for a forward of ``module``. ``is_compiled``: by a compiler that sees all that it calls."""

    def flush(self) -> None:
        """Finish what is in flight in the buckets: they are needed for gradients."""

    def release_buckets(self) -> None:
        """Drop all references to the buckets, whose memory is about to be freed. Called after :meth:`flush`."""

    def buckets_rebuilt(self, buckets: Sequence[Bucket]) -> None:
        """Use these buckets from now on. Called on all ranks alike, so collectives are allowed."""


class GradientStore:
    """The gradients of one engine, window after window, and everything that holds their memory."""

    def __init__(
        self,
        arrangement: Arrangement,
        pipeline: Pipeline,
        hooks: ReadyHooks,
        window: Window,
        options: SynchronizerOptions,
    ) -> None:
        self.arrangement, self.pipeline, self.hooks, self.window = arrangement, pipeline, hooks, window
        parameters, communicator = arrangement.parameters, options.communicator
        dtype = options.policy.accumulation_dtype
        # The owner of the buckets while no backward runs, where each rank has a share of them.
        self.client: BucketClient | None = None
        # The gradients that are shared out at the moment.
        self._shared: SharedGradients | None = None
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
        if self.client is not None:
            self.client.release_buckets()
        self.window.means_left_buckets()
        if self._precise is not None:
            self._precise.forget()
        self.pipeline.set_buckets([])
        reduction, world_size = self.pipeline.reduction, self.pipeline.communicator.world_size
        self.arrangement.shares = world_size if reduction.scatters else 1
        self.arrangement.unit = reduction.unit(world_size)
        self.arrangement.build()
        if self.observer is not None and self._tuner is not None and self._tuner.finished:
            self.observer = self.observer.without(self._tuner)
        self.pipeline.set_buckets(self.arrangement.buckets, self.observer)
        reduction.rebuilt(self.arrangement.layout)
        if self.client is not None:
            self.client.buckets_rebuilt(self.buckets)
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
        if self.has_sharing_client and not reduction.scatters:
            raise MisuseError(
                "a sharded optimizer has the buckets of this model, and needs its share of their means. Choose how "
                "gradients are reduced before you make the optimizer"
            )
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

    # -- width -------------------------------------------------------------------------------------------------------

    def expect_backward(self) -> None:
        """Make gradients of narrow parameters wide, for a backward that is near. May be called any number of times."""
        if self._precise is not None:
            self.window.replace_gradients(self._precise.widen, self.buckets, self._precise.parameters)

    def expect_step(self) -> None:
        """Make gradients narrow again, for a step that is near: a forward may have run since the means came."""
        if self._precise is not None and not self.pipeline.reduction.scatters:
            self.window.replace_gradients(self._precise.restore, self.buckets, self._precise.parameters)

    # -- whether they are means --------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop all gradients, and the window's record of them."""
        self.arrangement.drop_gradients()
        self.window.end_abstention()
        self.window.discard()

    def gate_step(self, *, gated: bool) -> torch.Tensor | None:
        """See :meth:`.FlagReader.gate_step`. A failure is treated as if it had been reported in backward."""
        flags = self.pipeline.flags
        try:
            gate = flags.gate_step(gated=gated)
        except PeerFailedError:
            self.clear()
            raise
        if flags.requests.late:
            self.window.is_rejected = True
        return gate

    def confirm_means(self) -> None:
        """Ensure that all ranks have means, before a collective that a rank whose backward failed would not start."""
        self.gate_step(gated=False)
        if self.pipeline.flags.requests.late:
            self.clear()
            raise PeerFailedError(
                "another rank raises for an earlier window that failed, so no rank steps on this one. See the error "
                "there; call zero_grad() before the next backward"
            )

    # -- ownership ---------------------------------------------------------------------------------------------------

    def hand_out(self) -> None:
        """Give the means of the synchronized window to whatever steps on them."""
        if self.pipeline.reduction.scatters:
            self._share_out()
        elif self._precise is not None and self.window.finished:
            self.window.replace_gradients(
                partial(self._precise.narrow, self.buckets), self.buckets, self._precise.parameters
            )
            self.window.means_left_buckets()

    def _share_out(self) -> None:
        """Mark the gradients as means of a share only: every rank has those of its share now."""
        self._shared = self._new_shared()
        for bucket in self.buckets:
            self._shared.take_in(bucket)

    def _new_shared(self) -> SharedGradients:
        # Views hold this, and outlive the engine: they must not hold the engine.
        confirm = partial(GradientStore.confirm_means, weakref.proxy(self))
        return SharedGradients(self.pipeline.communicator, confirm)

    @property
    def _are_consumed(self) -> bool:
        """Whether the gradients are gone: the client has overwritten their memory."""
        return self._shared is not None and self._shared.are_consumed

    def consume(self) -> None:
        """Let the client overwrite the gradients, in the step that is about to read them for the last time."""
        if self._are_consumed:
            # A second step: on zeros, if the gradients were zeroed, and otherwise on nothing that is a gradient.
            zeroed = [view for bucket in self.buckets for view in bucket.views if is_zeroed(view)]
            self.take_back()
            self._share_out()
            for view in zeroed:
                view.zeroed = True  # type: ignore[attr-defined]
        if self._shared is None:
            self._shared = self._new_shared()
        self._shared.are_consumed = True

    def require_gradients(self) -> None:
        """Refuse to clip gradients that are gone."""
        if self._are_consumed:
            raise MisuseError(
                "gradients were to be clipped after optimizer.step(), which has used their memory for new parameters. "
                "Clip before the step"
            )

    @property
    def has_sharing_client(self) -> bool:
        """Whether an optimizer uses shares, so that all ranks must take part in every step."""
        return self.client is not None and self.client.uses_buckets

    @torch.no_grad()
    def take_back(self, *, worthless: bool = False) -> None:
        """Take the gradients back from whatever else holds them: new ones are about to arrive, or buckets to go.

        May be called any number of times. ``worthless``: the gradients belong to a failed window, and nothing is
        expected of them.
        """
        if self.client is not None:
            self.client.flush()
        if self._shared is None:
            return
        kept = [any(map(_is_kept, bucket.parameters, bucket.views)) for bucket in self.buckets]
        if self._are_consumed and any(kept) and not worthless:
            raise MisuseError(
                "gradients of the window before were not zeroed. The sharded optimizer has used their memory for new "
                "parameters, so nothing can be added to them, and no step can use them again. Call zero_grad() after "
                "optimizer.step()"
            )
        self._shared = None
        for bucket, has_means in zip(self.buckets, kept, strict=True):
            zeroed = [view for view in bucket.views if is_zeroed(view)]
            unshare_views(bucket)
            if zeroed:
                # Not earlier: the memory belonged to the client.
                torch._foreach_zero_(zeroed)
            if has_means:
                self._make_addend(bucket)

    def _make_addend(self, bucket: Bucket) -> None:
        """Convert shares of a mean into a term whose mean over ranks equals it: more gradients may be added to it."""
        communicator, payload = self.pipeline.communicator, bucket.flat[: bucket.plan.payload]
        own = bucket.plan.share_of(communicator.rank)
        payload[: own.start].zero_()
        payload[own.stop :].zero_()
        payload[own].mul_(communicator.world_size)


def _is_kept(parameter: nn.Parameter, view: torch.Tensor) -> bool:
    """Whether a parameter's gradient is still there: neither gone nor zeroed."""
    return parameter.grad is view and not is_zeroed(view)
