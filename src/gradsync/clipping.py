"""``clip_grad_norm_`` and ``clip_grad_value_`` for gradients that are averaged over ranks."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gradsync.chunk import gradients_of
from gradsync.gradient_norm import BucketNorms, checked_norm, clip_gradients, is_whole, require_means
from gradsync.synchronizer import Synchronizer, synchronizer_of

__all__ = ["clip_grad_norm_", "clip_grad_value_", "require_means_of"]

Parameters = torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]


def clip_grad_norm_(
    parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale gradients so that the norm of all of them together is at most ``max_norm``; returns the norm before.

    As ``torch.nn.utils.clip_grad_norm_``, for a model or its parameters. Where a whole model is clipped, one operation
    per bucket does it, with norms that are known when the last bucket arrives. Inside an unfinished window it raises
    :class:`~gradsync.errors.MisuseError`.
    """
    max_norm, norm_type = checked_norm(max_norm, norm_type)
    listed = _listed(parameters)
    synchronizers = _synchronizers(listed)
    require_means_of(synchronizers)
    wholes = list(_wholes(listed, synchronizers, norm_type))
    total = clip_gradients(wholes, max_norm, norm_type, error_if_nonfinite)
    for synchronizer in synchronizers:
        synchronizer.window.changed_by_engine(synchronizer.buckets)
    return total


@torch.no_grad()
def clip_grad_value_(parameters: Parameters, clip_value: float) -> None:
    """Limit every element of every gradient to ±``clip_value``, as ``torch.nn.utils.clip_grad_value_``."""
    listed = _listed(parameters)
    require_means_of(_synchronizers(listed))
    torch.nn.utils.clip_grad_value_(listed, clip_value)


def require_means_of(synchronizers: Iterable[Synchronizer]) -> None:
    """Refuse to touch gradients of an unfinished window; in its last micro-batch it is finished first."""
    for synchronizer in synchronizers:
        synchronizer.finish_last()
        require_means(finished=synchronizer.window.finished)


def _listed(parameters: Parameters) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    return list(parameters.parameters() if isinstance(parameters, torch.nn.Module) else parameters)


def _synchronizers(parameters: Iterable[torch.Tensor]) -> list[Synchronizer]:
    found: dict[int, Synchronizer] = {}
    for parameter in parameters:
        synchronizer = synchronizer_of(parameter)
        if synchronizer is not None:
            found[id(synchronizer)] = synchronizer
    return list(found.values())


def _wholes(
    parameters: list[torch.Tensor], synchronizers: list[Synchronizer], norm_type: float
) -> Iterator[tuple[torch.Tensor, Any]]:
    """Whole buckets, where all their gradients are meant; single gradients otherwise."""
    meant = {id(parameter) for parameter in parameters}
    covered: set[int] = set()
    for synchronizer in synchronizers:
        norms = synchronizer.norms
        if norms is None or norms.norm_type != norm_type:
            norms = synchronizer.norms = BucketNorms(norm_type)
        for bucket in synchronizer.buckets:
            inside = [id(parameter) for parameter in bucket.parameters]
            if not meant.issuperset(inside) or not norms.may_take(bucket):
                continue
            known = norms.of(bucket)
            if known is not None or is_whole(bucket, gradients_of(bucket.parameters)):
                covered.update(inside)
                yield bucket.payload, known
    for parameter in parameters:
        if id(parameter) not in covered and parameter.grad is not None:
            gradient = parameter.grad
            yield (gradient.coalesce()._values() if gradient.is_sparse else gradient), None
