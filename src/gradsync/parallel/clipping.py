"""Gradient clipping: ``clip_grad_norm_`` and ``clip_grad_value_`` for gradients that are averaged over ranks.

Whole buckets are scaled where all their gradients are given, and single gradients elsewhere.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.core.bucket.chunk import gradients_of
from gradsync.core.bucket.norm import (
    checked_norm,
    clip_gradients,
    combine_norms,
    is_whole,
    norm_of,
    own_parts,
    require_means,
)
from gradsync.core.engine.synchronizer import Synchronizer, synchronizer_of

__all__ = ["clip_grad_norm_", "clip_grad_value_", "clip_norm", "require_means_of", "synchronizers_of"]


def clip_norm(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale gradients so that their total norm is at most ``max_norm``; returns the norm before scaling."""
    synchronizers = synchronizers_of(parameters)
    require_means_of(synchronizers)
    total = clip_gradients(_wholes(parameters, synchronizers, norm_type), max_norm, norm_type, error_if_nonfinite)
    for synchronizer in synchronizers:
        synchronizer.window.changed_by_engine()
    return total


def require_means_of(synchronizers: Iterable[Synchronizer]) -> None:
    """Refuse to touch gradients of an unfinished window; in its last micro-batch it is finished first."""
    for synchronizer in synchronizers:
        synchronizer.pending_work.finish_window()
        require_means(finished=synchronizer.window.finished)
        synchronizer.require_gradients()


def synchronizers_of(parameters: Iterable[torch.Tensor]) -> list[Synchronizer]:
    """All synchronizers that average gradients of ``parameters``, each once."""
    found = {id(each): each for each in map(synchronizer_of, parameters) if each is not None}
    return list(found.values())


Whole = tuple[Sequence[torch.Tensor], torch.Tensor]


def _wholes(parameters: Sequence[torch.Tensor], synchronizers: list[Synchronizer], norm_type: float) -> Iterator[Whole]:
    """Whole buckets, where all their gradients are given; single gradients otherwise. Each with its norm."""
    meant = {id(parameter) for parameter in parameters}
    covered: set[int] = set()
    for synchronizer in synchronizers:
        if synchronizer.reduction.scatters:
            covered.update(
                id(parameter)
                for bucket in synchronizer.buckets
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
                if parameter.grad is view
            )
            yield _shares(meant, synchronizer, norm_type)
            continue
        norms = synchronizer.norms_of(norm_type)
        for bucket in synchronizer.buckets:
            bucket.reclaim_views()
            inside = [id(parameter) for parameter in bucket.parameters]
            if not meant.issuperset(inside) or not norms.may_take(bucket):
                continue
            known = norms.of(bucket)
            if known is not None or is_whole(bucket, gradients_of(bucket.parameters)):
                covered.update(inside)
                yield [bucket.payload], norm_of(bucket.payload, norm_type) if known is None else known
    for parameter in parameters:
        if id(parameter) not in covered and parameter.grad is not None:
            gradient = parameter.grad
            values = gradient.coalesce()._values() if gradient.is_sparse else gradient
            yield [values], norm_of(values, norm_type)


def _shares(meant: set[int], synchronizer: Synchronizer, norm_type: float) -> Whole:
    """This rank's share of the gradients, with the norm of the shares of all ranks. Collective."""
    communicator = synchronizer.communicator
    if norm_type != 2.0 and any(spec.dtype.is_complex for spec in synchronizer.specs):
        raise ConfigurationError(
            "a sharded optimizer keeps complex gradients as pairs of numbers, whose norm is that of the gradients for "
            f"norm_type=2 only, got {norm_type:g}"
        )
    synchronizer.confirm_means()
    mine = [part for bucket in synchronizer.buckets for part in own_parts(bucket, meant, communicator.rank)]
    local = combine_norms([norm_of(part, norm_type) for part in mine], norm_type).to(communicator.device, torch.float64)
    if math.isinf(norm_type):
        communicator.all_reduce(local, "max").wait()
        return mine, local
    power = local**norm_type
    communicator.all_reduce(power).wait()
    return mine, power ** (1.0 / norm_type)


Parameters = torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]


def clip_grad_norm_(
    parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale gradients so that their total norm is at most ``max_norm``; returns the norm before scaling.

    Like ``torch.nn.utils.clip_grad_norm_``, for a model or its parameters. Where a whole model is clipped, it takes one
    operation per bucket, with norms that are known when the last bucket arrives. Inside an unfinished window it raises
    :class:`~gradsync.base.errors.MisuseError`. Change gradients before it as torch can see, by ``grad.mul_()``: writes
    through ``grad.data`` or NumPy do not count as changes.
    """
    return clip_norm(_listed(parameters), *checked_norm(max_norm, norm_type), error_if_nonfinite)


@torch.no_grad()
def clip_grad_value_(parameters: Parameters, clip_value: float) -> None:
    """Limit every element of every gradient to ±``clip_value``, like ``torch.nn.utils.clip_grad_value_``."""
    listed = _listed(parameters)
    require_means_of(synchronizers_of(listed))
    torch.nn.utils.clip_grad_value_(listed, clip_value)


def _listed(parameters: Parameters) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    return list(parameters.parameters() if isinstance(parameters, torch.nn.Module) else parameters)
