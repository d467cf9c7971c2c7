"""Averages sparse gradients, such as those of ``nn.Embedding(sparse=True)``.

They have no place in a flat bucket: ranks have different rows. Every rank's rows are gathered and summed in rank order,
so all ranks do the same additions on the same numbers and hold the same bits. A parameter whose gradient is dense on
some rank (a tied embedding) is reduced densely on all.
"""

from collections.abc import Sequence

import torch

from gradsync.communicator import Communicator
from gradsync.core.bucket.precise import replace_gradient, wide_dtype

__all__ = ["SparseGradients", "reduce_sparse_gradients"]

NOTHING, SPARSE, DENSE = 0, 1, 2


class SparseGradients:
    """The parameters outside the buckets that have received a gradient in this window. Narrow ones are averaged in
    ``accumulation_dtype``, if it is given."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        communicator: Communicator,
        accumulation_dtype: torch.dtype | None = None,
    ) -> None:
        self._parameters = parameters
        self._communicator = communicator
        self._dtype = accumulation_dtype
        self._used: set[int] = set()

    def mark_ready(self, index: int) -> None:
        self._used.add(index)

    def clear(self) -> None:
        self._used.clear()

    def reduce(self, indices: Sequence[int], divisor: float | torch.Tensor) -> None:
        """Average the gradients of those ``indices`` that any rank has used. Collective."""
        parameters = [self._parameters[index] for index in indices]
        used = [index in self._used for index in indices]
        reduce_sparse_gradients(parameters, used, self._communicator, divisor, self._dtype)


@torch.no_grad()
def reduce_sparse_gradients(
    parameters: Sequence[torch.nn.Parameter],
    used: Sequence[bool],
    communicator: Communicator,
    divisor: float | torch.Tensor,
    accumulation_dtype: torch.dtype | None = None,
) -> None:
    """Replace each parameter's gradient by the mean, where at least one rank used the parameter."""
    if not parameters:
        return
    rows = []
    for parameter, is_used in zip(parameters, used, strict=True):
        gradient = parameter.grad
        is_sparse = gradient is not None and gradient.is_sparse
        kind = NOTHING if gradient is None or not is_used else SPARSE if is_sparse else DENSE
        rows.append([kind, gradient._nnz() if is_sparse else 0])  # type: ignore[union-attr]
    local = torch.tensor(rows)
    gathered = torch.empty(local.numel() * communicator.world_size, dtype=local.dtype, device=communicator.device)
    communicator.all_gather(gathered, local.view(-1).to(communicator.device)).wait()
    kinds, counts = gathered.cpu().view(communicator.world_size, -1, 2).unbind(2)
    for number, parameter in enumerate(parameters):
        kind = int(kinds[:, number].max())
        # Not this rank's own gradient: there may be none, and all ranks must send the same.
        dtype = wide_dtype(parameter.dtype, accumulation_dtype)
        if kind == DENSE:
            replace_gradient(parameter, _dense_mean(parameter, dtype, communicator, divisor))
        elif kind == SPARSE:
            counted = counts[:, number].tolist()
            replace_gradient(parameter, _sparse_mean(parameter, dtype, counted, communicator, divisor))


def _dense_mean(
    parameter: torch.nn.Parameter, dtype: torch.dtype, communicator: Communicator, divisor: float | torch.Tensor
) -> torch.Tensor:
    total = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
    if parameter.grad is not None:
        total.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad).div_(divisor)
    communicator.all_reduce(total).wait()
    return total


def _sparse_mean(
    parameter: torch.nn.Parameter,
    dtype: torch.dtype,
    counts: list[int],
    communicator: Communicator,
    divisor: float | torch.Tensor,
) -> torch.Tensor:
    """Pad rows to the largest number on any rank, gather them, cut to the true numbers and add up."""
    rows, longest, world_size = parameter.shape[1:], max(counts), communicator.world_size
    indices = torch.zeros(longest, dtype=torch.int64, device=parameter.device)
    values = torch.zeros((longest, *rows), dtype=dtype, device=parameter.device)
    gradient = parameter.grad
    if gradient is not None and gradient.is_sparse:
        indices[: gradient._nnz()] = gradient._indices()[0]
        values[: gradient._nnz()] = gradient._values() / divisor
    all_indices = torch.empty(longest * world_size, dtype=torch.int64, device=parameter.device)
    all_values = torch.empty(values.numel() * world_size, dtype=dtype, device=parameter.device)
    communicator.all_gather(all_indices, indices).wait()
    communicator.all_gather(all_values, values.view(-1)).wait()
    by_rank = all_values.view(world_size, longest, *rows)
    kept_indices = torch.cat([all_indices.view(world_size, longest)[r, :n] for r, n in enumerate(counts)])
    kept_values = torch.cat([by_rank[r, :n] for r, n in enumerate(counts)])
    # Every rank's indices come from a valid gradient of the same shape: nothing to check. torch.sparse_coo_tensor would
    # warn in some versions that checks are "implicitly" disabled, even if told check_invariants=False.
    unchecked = torch.ops.aten._sparse_coo_tensor_unsafe(kept_indices.unsqueeze(0), kept_values, parameter.shape)
    summed: torch.Tensor = unchecked.coalesce()
    return summed
