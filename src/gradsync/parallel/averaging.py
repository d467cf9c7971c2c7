"""``average_gradients``: one call between ``backward()`` and ``step()``, without a wrapper or hooks.

It is also the reference that the engine is tested against, so it is written for clarity: compare, flatten, sum, divide.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator, choose_communicator
from gradsync.communicator.agreement import require_agreement
from gradsync.core.reduction.sparse import reduce_sparse_gradients

__all__ = ["average_gradients"]


@torch.no_grad()
def average_gradients(model_or_parameters: torch.nn.Module | Iterable[torch.nn.Parameter], group: Any = None) -> None:
    """Replace every gradient by its mean over the ranks of ``group`` (a process group or communicator).

    A gradient that is None on some ranks counts as zeros there; one that is None on all ranks stays None. Sparse
    gradients stay sparse. Ranks compare names, shapes and dtypes first, and if they differ every rank raises
    :class:`~gradsync.errors.MismatchError`, which names the parameter and the ranks, before any gradient is touched.
    """
    named = _named_parameters(model_or_parameters)
    communicator = choose_communicator(group)
    require_agreement(
        communicator,
        "the parameters passed to average_gradients",
        [(f"parameter {name}", {"shape": list(p.shape), "dtype": str(p.dtype)}) for name, p in named],
    )
    parameters = [parameter for _, parameter in named]
    has_dense, has_sparse = _kinds_over_ranks(parameters, communicator)
    _average_dense([p for p, dense in zip(parameters, has_dense, strict=True) if dense], communicator)
    sparse = [p for p, flag in zip(parameters, has_sparse, strict=True) if flag]
    reduce_sparse_gradients(sparse, [True] * len(sparse), communicator, communicator.world_size)


def _named_parameters(
    model_or_parameters: torch.nn.Module | Iterable[torch.nn.Parameter],
) -> list[tuple[str, torch.nn.Parameter]]:
    if isinstance(model_or_parameters, torch.nn.Module):
        return list(model_or_parameters.named_parameters())
    if isinstance(model_or_parameters, torch.Tensor):
        raise ConfigurationError(
            "average_gradients expects a module or an iterable of parameters, got one tensor. Pass [parameter]"
        )
    parameters = list(model_or_parameters)
    for number, parameter in enumerate(parameters):
        if not isinstance(parameter, torch.Tensor):
            raise ConfigurationError(
                f"average_gradients expects parameters, got {type(parameter).__name__} at position {number}. "
                "Pass model.parameters(), not model.named_parameters()"
            )
    return [(str(number), parameter) for number, parameter in enumerate(parameters)]


def _kinds_over_ranks(
    parameters: list[torch.nn.Parameter], communicator: Communicator
) -> tuple[list[bool], list[bool]]:
    """Whether the gradient is dense on some rank, or else sparse on some rank, for every parameter."""
    flags = torch.zeros(2, len(parameters), dtype=torch.int32, device="cpu")
    for number, parameter in enumerate(parameters):
        if parameter.grad is not None:
            flags[int(parameter.grad.is_sparse), number] = 1
    shared = flags.view(-1).to(communicator.device)
    if shared.numel():
        communicator.all_reduce(shared, "max").wait()
    dense, sparse = shared.cpu().view(2, -1).bool()
    return (dense & ~sparse).tolist(), sparse.tolist()


def _average_dense(parameters: list[torch.nn.Parameter], communicator: Communicator) -> None:
    """Average dense gradients, with one collective per dtype and device."""
    alike: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        alike[(parameter.dtype, parameter.device)].append(parameter)
    for group in alike.values():
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        reals = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        communicator.all_reduce(reals.div_(communicator.world_size)).wait()
        for parameter, gradient, mean in zip(group, gradients, flat.split([p.numel() for p in group]), strict=True):
            gradient.copy_(mean.view(gradient.shape))
            parameter.grad = gradient
