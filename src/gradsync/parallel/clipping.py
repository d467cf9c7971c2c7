"""``clip_grad_norm_`` and ``clip_grad_value_`` for gradients that are averaged over ranks."""

from collections.abc import Iterable

import torch

from gradsync.core.bucket.norm import checked_norm
from gradsync.core.engine.clipping import clip_norm, require_means_of, synchronizers_of

__all__ = ["clip_grad_norm_", "clip_grad_value_"]

Parameters = torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]


def clip_grad_norm_(
    parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale gradients so that their total norm is at most ``max_norm``; returns the norm before scaling.

    Like ``torch.nn.utils.clip_grad_norm_``, for a model or its parameters. Where a whole model is clipped, it takes one
    operation per bucket, with norms that are known when the last bucket arrives. Inside an unfinished window it raises
    :class:`~gradsync.base.errors.MisuseError`.
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
