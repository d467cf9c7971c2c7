"""Tamper check: detects that gradients were changed since the engine last wrote them.

A window accumulates in the buckets. Nothing else may write there between its micro-batches: zeroing loses what was
accumulated, clipping scales part of a sum. Neither can be observed while it happens, but both leave a trace: a gradient
that is gone, or the version of a bucket's memory. The check costs two comparisons per bucket, and as many for each
gradient that has no place in one.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from gradsync.core.bucket.bucket import Bucket

__all__ = ["TamperCheck", "has_loose_gradients", "has_nonzero_gradients"]


class _Seen(NamedTuple):
    """A gradient, and the version of the memory it lies in."""

    parameter: torch.nn.Parameter
    gradient: torch.Tensor
    memory: torch.Tensor
    version: int


class TamperCheck:
    """Remembers one gradient and the version of every bucket, and every gradient outside of buckets."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []

    def note(self, buckets: Iterable[Bucket], outside: Iterable[torch.nn.Parameter] = ()) -> None:
        """Remember the current state of the buckets, and of the gradients of the parameters ``outside``."""
        self._seen = []
        for bucket in buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is view:
                    self._seen.append(_Seen(parameter, view, bucket.buffer, bucket.buffer._version))
                    break
        for parameter in outside:
            gradient = parameter.grad
            if gradient is not None:
                self._seen.append(_Seen(parameter, gradient, gradient, gradient._version))

    def renew(self) -> None:
        """Accept all writes since as the engine's own."""
        self._seen = [each._replace(version=each.memory._version) for each in self._seen]

    def forget(self) -> None:
        self._seen = []

    @property
    def has_lost(self) -> bool:
        """Whether a gradient that existed is gone."""
        return any(each.parameter.grad is not each.gradient for each in self._seen)

    @property
    def has_lost_bucket(self) -> bool:
        """The same for gradients that lie in buckets: autograd replaces sparse ones."""
        return any(each.parameter.grad is not each.gradient for each in self._seen if each.memory is not each.gradient)

    @property
    def has_changed(self) -> bool:
        """Whether a gradient was changed."""
        return any(each.memory._version != each.version for each in self._seen)

    @property
    def is_unchanged(self) -> bool:
        """Whether there were gradients, and all are unchanged."""
        return bool(self._seen) and not self.has_lost and not self.has_changed


def has_nonzero_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether any gradient is nonzero. Reads values: only for building an error."""
    gradients = (parameter.grad for parameter in parameters)
    return any(bool(gradient.any()) for gradient in gradients if gradient is not None)


def has_loose_gradients(buckets: Iterable[Bucket]) -> bool:
    """Whether some gradient lies outside its bucket."""
    return any(
        parameter.grad is not None and parameter.grad is not view
        for bucket in buckets
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
    )
