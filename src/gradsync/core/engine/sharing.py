"""Sharding of the buckets: between two backwards each rank has only the mean of its own share of them.

Meanwhile a sharded optimizer uses the buckets' memory: it reads the gradients of its share, and has the new parameters
gathered into the bucket. It must have left before gradients are written there again::

    backward ──▶ means of shares ──▶ step: new shares ──▶ gathered into the bucket ──▶ parameters ──▶ backward
                 └───────────────────────── hand_out ── take_back ─────────────────────────────────┘
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from gradsync.base.errors import MisuseError
from gradsync.communicator import Communicator
from gradsync.core.bucket import Bucket
from gradsync.core.reduction import Reduction
from gradsync.core.reduction.shared_gradient import SharedGradients, is_zeroed, unshare_views

__all__ = ["BucketClient", "Sharing"]


class BucketClient(Protocol):
    """Interface of a component that uses the buckets between two backwards."""

    # Or would, if there were other ranks.
    lives_in_buckets: bool

    @property
    def whole(self) -> Reduction:
        """The reduction that would be used without it."""

    def leave(self) -> None:
        """The buckets are needed for gradients: finish what is in flight in them."""

    def move_out(self) -> None:
        """Release the buckets, which are about to go. Called after :meth:`leave`."""

    def moved(self, buckets: Sequence[Bucket]) -> None:
        """Buckets were rebuilt. All ranks are here, so collectives are allowed."""


class Sharing:
    """Tracks which component has the buckets of one engine."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.client: BucketClient | None = None
        self._is_out = False
        self._circle = SharedGradients(communicator)
        # The gradients are gone: their memory was overwritten.
        self._are_used_up = False

    def hand_out(self, buckets: Sequence[Bucket]) -> None:
        """Every rank has the means of its share now."""
        self._is_out, self._are_used_up = True, False
        self._circle = SharedGradients(self._communicator)
        for bucket in buckets:
            self._circle.take_in(bucket)

    def use_up(self, buckets: Sequence[Bucket]) -> None:
        """The client takes the memory of the gradients, for the step that is about to read them."""
        if self._are_used_up:
            # A second step: on zeros, if the gradients were zeroed, and otherwise on nothing that is a gradient.
            zeroed = [view for bucket in buckets for view in bucket.views if is_zeroed(view)]
            self.take_back(buckets)
            self.hand_out(buckets)
            for view in zeroed:
                view.zeroed = True  # type: ignore[attr-defined]
        self._is_out = self._are_used_up = self._circle.are_used_up = True

    def require_means(self) -> None:
        """Refuse to clip gradients that are gone."""
        if self._are_used_up:
            raise MisuseError(
                "gradients were to be clipped after optimizer.step(), which has used their memory for new parameters. "
                "Clip before the step"
            )

    @property
    def has_client(self) -> bool:
        """Whether an optimizer uses shares, so that all ranks must take part in every step."""
        return self.client is not None and self.client.lives_in_buckets

    def require_client_served(self, *, scatters: bool) -> None:
        """Refuse a different reduction while an optimizer uses shares."""
        if self.has_client and not scatters:
            raise MisuseError(
                "a sharded optimizer has the buckets of this model, and needs its share of their means. Choose what is "
                "put on the wire before you make the optimizer"
            )

    @torch.no_grad()
    def take_back(self, buckets: Sequence[Bucket], *, worthless: bool = False) -> None:
        """Gradients are about to arrive, or buckets to go. May be called any number of times.

        ``worthless``: the gradients belong to a failed window, and nothing is expected of them.
        """
        if self.client is not None:
            self.client.leave()
        if not self._is_out:
            return
        kept = [any(map(_is_kept, bucket.parameters, bucket.views)) for bucket in buckets]
        if self._are_used_up and any(kept) and not worthless:
            raise MisuseError(
                "gradients of the window before were not zeroed. The sharded optimizer has used their memory for new "
                "parameters, so nothing can be added to them, and no step can use them again. Call zero_grad() after "
                "optimizer.step()"
            )
        self._is_out = self._are_used_up = False
        self._circle = SharedGradients(self._communicator)
        for bucket, has_means in zip(buckets, kept, strict=True):
            zeroed = [view for view in bucket.views if is_zeroed(view)]
            unshare_views(bucket)
            if zeroed:
                # Not earlier: the memory belonged to the client.
                torch._foreach_zero_(zeroed)
            if has_means:
                self._make_addend(bucket)

    def _make_addend(self, bucket: Bucket) -> None:
        """Convert shares of a mean into a term whose mean over ranks equals it: more gradients may be added to it."""
        rank, share = self._communicator.rank, bucket.plan.share
        payload = bucket.flat[: bucket.plan.payload]
        payload[: rank * share].zero_()
        payload[(rank + 1) * share :].zero_()
        payload[rank * share : (rank + 1) * share].mul_(self._communicator.world_size)


def _is_kept(parameter: torch.nn.Parameter, view: torch.Tensor) -> bool:
    """Whether its gradient is still there: neither gone nor zeroed."""
    return parameter.grad is view and not is_zeroed(view)
