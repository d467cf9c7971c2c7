"""Gradient clipping by the norm of the averaged gradient.

The norm of each bucket is computed as soon as its mean is there, while later buckets are still in flight; after the
last one the whole norm is known. This begins with the window after the first call, which is how the engine learns that
a norm is wanted. Buckets hold the same bits on all ranks, so no rank needs to ask another. Early or late, a bucket's
norm is computed by the same operation: a resumed run clips by the same bits as one that was not interrupted.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError, MisuseError
from gradsync.core.bucket.bucket import Bucket
from gradsync.core.bucket.chunk import gradients_of

__all__ = [
    "BucketNorms",
    "checked_norm",
    "clip_gradients",
    "combine_norms",
    "is_whole",
    "norm_of",
    "own_parts",
    "require_means",
]


class BucketNorms:
    """The norms of the buckets of one synchronizer, computed as the buckets finish."""

    def __init__(self, norm_type: float) -> None:
        self.norm_type = norm_type
        self._known: dict[int, tuple[torch.Tensor, int, list[torch.Tensor | None]]] = {}

    def note(self, bucket: Bucket) -> None:
        """Compute the norm of a bucket that holds means now."""
        gradients = list(gradients_of(bucket.parameters))
        self._known.pop(bucket.index, None)
        if not self.may_take(bucket) or not is_whole(bucket, gradients):
            return
        self._known[bucket.index] = (norm_of(bucket.payload, self.norm_type), bucket.buffer._version, gradients)

    def may_take(self, bucket: Bucket) -> bool:
        """Whether the norm of a bucket's memory is that of its gradients.

        It stores the real and imaginary parts of complex ones as separate numbers, which changes all norms but one.
        """
        return self.norm_type == 2.0 or not any(spec.dtype.is_complex for spec in bucket.specs)

    def of(self, bucket: Bucket) -> torch.Tensor | None:
        """The bucket's norm, unless its gradients were changed, replaced or dropped since."""
        norm, version, gradients = self._known.get(bucket.index, (None, -1, []))
        if version != bucket.buffer._version:
            return None
        now = gradients_of(bucket.parameters)
        return norm if all(mine is seen for mine, seen in zip(now, gradients, strict=True)) else None


def is_whole(bucket: Bucket, gradients: Iterable[torch.Tensor | None]) -> bool:
    """Whether ``gradients``, those of the bucket's parameters, are all that is in the bucket."""
    return all(gradient is view for gradient, view in zip(gradients, bucket.views, strict=True))


def own_parts(bucket: Bucket, meant: Collection[int], rank: int) -> list[torch.Tensor]:
    """The parts in ``rank``'s share of the gradients of those parameters whose ids are in ``meant``."""
    own, payload = bucket.plan.share_of(rank), bucket.flat[: bucket.plan.payload]
    present = [
        id(parameter) in meant and parameter.grad is view
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
    ]
    if all(present):
        return [payload[own]]
    ranges = [
        (max(own.start, slot.offset), min(own.stop, slot.offset + slot.numel))
        for slot, is_meant in zip(bucket.plan.slots, present, strict=True)
        if is_meant
    ]
    return [payload[start:stop] for start, stop in ranges if start < stop]


def norm_of(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of a tensor, in float32 at least: a million squares of bfloat16 do not add up in bfloat16."""
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, norm_type, dtype=dtype)
    return norm


def combine_norms(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of all parts together, from the norms of the parts, which may be on several devices."""
    if not norms:
        return torch.tensor(0.0)
    first = norms[0]
    return norm_of(torch.stack([norm.to(first.device, first.dtype) for norm in norms]), norm_type)


@torch.no_grad()
def clip_gradients(
    wholes: Iterable[tuple[Sequence[torch.Tensor], torch.Tensor]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale tensors together so that their norm is at most ``max_norm``. Returns the norm before scaling.

    ``wholes`` are tensors with their norm. The host does not wait for a GPU.
    """
    tensors: list[torch.Tensor] = []
    norms = []
    for several, norm in wholes:
        tensors.extend(several)
        norms.append(norm)
    total = combine_norms(norms, norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the norm of the gradients is {float(total)}, so they cannot be clipped. Pass error_if_nonfinite=False to "
            "go on with gradients that are not finite"
        )
    # As torch does: the small number keeps a zero norm from dividing by zero, and scaling up never happens.
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for tensor in tensors:
        tensor.mul_(factor.to(tensor.device))
    return total


def checked_norm(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """The maximum and the type of a norm as numbers; refuse values that cannot be numbers."""
    try:
        numbers = float(max_norm), float(norm_type)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"clipping needs numbers for max_norm and norm_type, got {max_norm!r} and {norm_type!r}"
        ) from error
    if math.isnan(numbers[0]) or numbers[0] < 0 or math.isnan(numbers[1]) or numbers[1] <= 0:
        raise ConfigurationError(
            f"max_norm must not be negative and norm_type must be greater than 0, got {max_norm!r} and {norm_type!r}"
        )
    return numbers


def require_means(*, finished: bool) -> None:
    """Refuse to clip gradients that are only part of a sum."""
    if not finished:
        raise MisuseError(
            "clipping inside an unfinished window would scale part of a sum: these gradients have not been averaged "
            "over the ranks yet. Clip after the window's last backward, right before the optimizer steps"
        )
