"""PowerSGD: sends a gradient matrix as the product of two thin ones, (rows + columns) · rank numbers in all.

::

    P = Σ M Q          Q is from the previous window; the sum is over ranks
    P = orthonormal columns that span those of P
    Q = Σ Mᵀ P
    the mean is P Qᵀ, and a rank has lost M − P (Mᵀ P)ᵀ

One step of a power iteration per window, continuing from the previous one, is enough to follow the directions in which
gradients are large.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator, Handle
from gradsync.core.bucket import Bucket
from gradsync.core.bucket.layout import ParameterSpec
from gradsync.core.reduction.base import Compressing

__all__ = ["LowRank"]


class LowRank(Compressing):
    """Sends matrices with ``rank``; small parameters, and those that are not matrices, are sent as they are.

    The first ``start_after`` windows are exact: while gradients change fast there is nothing to follow. Without
    :class:`~gradsync.core.reduction.error_feedback.ErrorFeedback`, what does not fit into the rank is lost for good.
    """

    def __init__(self, rank: int = 4, *, start_after: int = 0) -> None:
        if not isinstance(rank, int) or rank < 1:
            raise ConfigurationError(f"LowRank needs a rank of at least 1, got {rank!r}")
        if not isinstance(start_after, int) or start_after < 0:
            raise ConfigurationError(f"start_after is a number of windows, got {start_after!r}")
        self.rank, self.start_after = rank, start_after
        self._windows = 0
        self._rights: dict[str, torch.Tensor] = {}
        # The factors of the running window, until it is known to have succeeded.
        self._next: dict[str, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"LowRank({self.rank}" + (f", start_after={self.start_after})" if self.start_after else ")")

    def examine(self, specs: Sequence[ParameterSpec]) -> None:
        super().examine(specs)
        if specs and not any(self._is_thin(spec) for spec in specs):
            largest = max(specs, key=lambda spec: min(_extents(spec)))
            raise ConfigurationError(
                f"LowRank({self.rank}) would send every gradient as it is: {largest.name!r}, of shape "
                f"{tuple(largest.shape)}, is the largest matrix here. Take a lower rank, or the exact mean"
            )

    def _is_thin(self, spec: ParameterSpec) -> bool:
        """Whether the two thin matrices have fewer numbers than the matrix they stand for."""
        rows, columns = _extents(spec)
        return not spec.dtype.is_complex and self.rank * (rows + columns) < rows * columns

    def send(
        self, values: torch.Tensor, bucket: Bucket, communicator: Communicator, lost: torch.Tensor | None = None
    ) -> Handle:
        thin = [slot for slot, spec in enumerate(bucket.specs) if self._is_thin(spec)]
        if not thin or self._windows < self.start_after:
            if lost is not None:
                lost.zero_()
            return communicator.all_reduce(values)
        rights = {slot: self._right(bucket.specs[slot], values) for slot in thin}
        product = _Product(values, bucket, rights, communicator, lost)
        self._next |= {bucket.specs[slot].name: right for slot, right in product.rights.items()}
        return product.start()

    def _right(self, spec: ParameterSpec, values: torch.Tensor) -> torch.Tensor:
        """The right factor from the last window; in the first one a random start, the same on all ranks."""
        known = self._rights.get(spec.name)
        if known is not None and known.shape == (_extents(spec)[1], self.rank):
            return known.to(values)
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(spec.name.encode()))
        return torch.randn(_extents(spec)[1], self.rank, generator=generator, device="cpu").to(values)

    def window_ended(self, *, succeeded: bool, correction: float | torch.Tensor = 1.0) -> None:
        following, self._next = self._next, {}
        if succeeded:
            self._windows += 1
            self._rights |= {name: right for name, right in following.items() if bool(right.isfinite().all())}

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self._windows, "rights": dict(self._rights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._windows = int(state.get("windows", 0))
        self._rights, self._next = dict(state.get("rights", {})), {}


class _Product:
    """The products of thin matrices that stand for one bucket in flight.

    ``rights`` are the factors for the next window, once it has ended.
    """

    def __init__(
        self,
        values: torch.Tensor,
        bucket: Bucket,
        rights: dict[int, torch.Tensor],
        communicator: Communicator,
        lost: torch.Tensor | None,
    ) -> None:
        self._bucket, self._communicator, self._lost = bucket, communicator, lost
        views = bucket.views_of(values)
        self._targets = {slot: views[slot] for slot in rights}
        self._matrices = {slot: view.flatten(1) for slot, view in self._targets.items()}
        rest = [view for slot, view in enumerate(views) if slot not in rights]
        self._rest = [torch.view_as_real(view) if view.is_complex() else view for view in rest]
        lefts = [self._matrices[slot] @ right for slot, right in rights.items()]
        self._first, parts = _lay_out([*lefts, *self._rest])
        self._lefts, self._sums = parts[: len(lefts)], parts[len(lefts) :]
        # Transposed: a thin matrix times a wide one takes a third of the time of a tall one times a thin one.
        self._second, seconds = _lay_out([right.new_empty(right.shape[::-1]) for right in rights.values()])
        self.rights = {slot: second.T for slot, second in zip(rights, seconds, strict=True)}

    def start(self) -> Handle:
        return self._communicator.all_reduce(self._first).then(self._project).then(self._multiply)

    def _project(self) -> Handle:
        for target, whole in zip(self._rest, self._sums, strict=True):
            target.copy_(whole)
        for left, (slot, right) in zip(self._lefts, self.rights.items(), strict=True):
            left.copy_(torch.linalg.qr(left)[0])
            torch.mm(left.T, self._matrices[slot], out=right.T)
        if self._lost is not None:
            self._add_lost(self._lost)
        return self._communicator.all_reduce(self._second)

    def _add_lost(self, lost: torch.Tensor) -> None:
        missing = dict(enumerate(self._bucket.views_of(lost)))
        for left, (slot, right) in zip(self._lefts, self.rights.items(), strict=True):
            with _as_matrix(missing.pop(slot)) as matrix:
                torch.addmm(self._matrices[slot], left, right.T, alpha=-1, out=matrix)
        for exact in missing.values():
            exact.zero_()

    def _multiply(self) -> None:
        for left, (slot, right) in zip(self._lefts, self.rights.items(), strict=True):
            with _as_matrix(self._targets[slot]) as matrix:
                torch.mm(left, right.T, out=matrix)


def _extents(spec: ParameterSpec) -> tuple[int, int]:
    """The rows and columns of a gradient as a matrix: further dimensions become columns. A vector has one column."""
    if len(spec.shape) < 2 or 0 in spec.shape:
        return 1, 1
    return spec.shape[0], spec.bucket_numel // spec.shape[0]


@contextmanager
def _as_matrix(view: torch.Tensor) -> Iterator[torch.Tensor]:
    """A context with the gradient as a matrix to write to; a copy, written back, if memory is ordered otherwise."""
    matrix = view.flatten(1)
    yield matrix
    if matrix.data_ptr() != view.data_ptr():
        view.copy_(matrix.view(view.shape))


def _lay_out(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Lay out all tensors in one flat tensor; returns it, and the place of each in it."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    parts = flat.split([tensor.numel() for tensor in tensors])
    return flat, [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
