"""Checks whether this rank's gradients are finite, bucket by bucket, right before they are sent.

A sum over ranks does not tell whose numbers it came from, so every rank checks its own. On a CPU the sum of a bucket is
enough, at the speed of memory: one number that is not finite makes the sum not finite. Finite numbers may overflow in
it, so this is only a suspicion, and a rare one; the extremes of each gradient then show whether it is true, and which
parameter it is.

On an accelerator the host must not wait, and learns of it from the ballot, where the device itself sets the mark. There
the extremes are computed right away, in one operation for all gradients of a bucket.
"""

import math
from collections.abc import Iterable

import torch

from gradsync.core.bucket.bucket import Bucket
from gradsync.core.bucket.host_copy import reads_at_once

__all__ = ["FiniteCheck"]


class FiniteCheck:
    """The findings in this rank's gradients, in one window."""

    def __init__(self) -> None:
        # Parameters by their index in the model; and the extremes of gradients, until they are read.
        self._found: dict[int, str] = {}
        self._unread: list[tuple[Bucket, list[int], torch.Tensor]] = []

    def forget(self) -> None:
        """Another window begins."""
        self._found.clear()
        self._unread.clear()

    @torch.no_grad()
    def look(self, bucket: Bucket) -> None:
        """Check a bucket whose gradients are settled, but still this rank's own."""
        if reads_at_once(bucket.plan.device):
            if not math.isfinite(bucket.payload.sum().item()):
                self._note(bucket, [slot for slot, view in enumerate(bucket.views) if not _is_finite(view)])
            return
        slots = [slot for slot, view in enumerate(bucket.views) if view.numel()]
        if slots:
            extremes = torch.stack(torch._foreach_norm([bucket.views[slot] for slot in slots], math.inf))
            self._unread.append((bucket, slots, extremes))

    @torch.no_grad()
    def look_at(self, outside: Iterable[tuple[int, str, torch.Tensor | None]]) -> None:
        """Check gradients that have no place in a bucket: the parameter's index, its name, the gradient."""
        for index, name, gradient in outside:
            if gradient is not None and not _is_finite(gradient._values() if gradient.is_sparse else gradient):
                self._found[index] = name

    def mark(self, place: torch.Tensor) -> None:
        """Mark ``place`` in the ballot, if anything was found."""
        if self._found:
            place.fill_(1)
        for _, _, extremes in self._unread:
            place.logical_or_(~extremes.to(place.device).isfinite().all())

    @property
    def first(self) -> str | None:
        """The first parameter of the model whose gradient is not finite. On an accelerator the host waits for it."""
        unread, self._unread = self._unread, []
        for bucket, slots, extremes in unread:
            are_finite = extremes.isfinite().tolist()
            self._note(bucket, [slot for slot, is_finite in zip(slots, are_finite, strict=True) if not is_finite])
        return self._found[min(self._found)] if self._found else None

    def _note(self, bucket: Bucket, slots: Iterable[int]) -> None:
        for slot in slots:
            self._found[bucket.plan.slots[slot].parameter] = bucket.specs[slot].name


def _is_finite(gradient: torch.Tensor) -> bool:
    """Many times as fast on a CPU as checking each number: the extremes show it."""
    if not gradient.numel():
        return True
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    return all(math.isfinite(extreme.item()) for extreme in torch.aminmax(gradient))
