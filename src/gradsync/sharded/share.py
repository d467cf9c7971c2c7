"""This rank's share of one bucket: where parameters lie in it, in flat memory of its own."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from gradsync.bucket import Bucket
from gradsync.bucket.layout import ParameterSpec, Slot
from gradsync.bucket.shared_gradient import SharedGradient

__all__ = ["Part", "Place", "Share", "is_narrow"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a share has of one parameter: ``start`` and ``stop`` count elements of the share, ``offset`` is how many of
    the parameter's come before. ``index`` is the parameter's number in the model."""

    index: int
    parameter: nn.Parameter
    start: int
    stop: int
    offset: int
    # The share holds it in a wider type than its own.
    is_narrow: bool


@dataclass(frozen=True, kw_only=True)
class Place:
    """``count`` elements of a parameter's ``whole``, flat, from ``offset`` on."""

    whole: int
    offset: int
    count: int


class Share:
    """This rank's part of the parameters of ``bucket``."""

    def __init__(self, bucket: Bucket, rank: int) -> None:
        plan = bucket.plan
        first = rank * plan.share
        payload = bucket.wire[: plan.payload]
        self.plan, self.bucket = plan, bucket
        self.flat = torch.zeros(plan.share, dtype=plan.dtype, device=plan.device)
        self.gradient = payload[first : first + plan.share]
        # New parameters travel in their own dtype, where they have one in common.
        dtypes = {_wire_dtype(parameter.dtype) for parameter in bucket.parameters}
        self.gathered = payload.view(dtypes.pop())[: plan.payload] if len(dtypes) == 1 else payload
        self.gathered_own = self.gathered[first : first + plan.share]
        self.gathered_views = bucket.views_of(self.gathered)
        self.parts = list(_parts(bucket, first, first + plan.share))
        self._pointers: list[tuple[int, tuple[int, ...]]] = []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._are_views = False
        self._specs = {slot.parameter: (slot, spec) for slot, spec in zip(plan.slots, bucket.specs, strict=True)}

    def let_go(self) -> None:
        """The bucket goes. What this rank has of its parameters stays. May be called again, if no other bucket came."""
        for name in ("bucket", "gathered_views"):
            vars(self).pop(name, None)
        self.gradient = self.gathered = self.gathered_own = self.flat[:0]

    def current(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of what the share holds of each parameter, and what the parameter is."""
        pointers = [(part.parameter.data_ptr(), part.parameter.stride()) for part in self.parts]
        if pointers != self._pointers:
            # Somebody has given parameters other memory; or they have not been looked at before.
            self._pointers = pointers
            self._pairs = [self._pair(part) for part in self.parts]
            self._are_views = all(
                _shares_memory(part.parameter, pair[1]) for part, pair in zip(self.parts, self._pairs, strict=True)
            )
        pairs = self._pairs if self._are_views else [self._pair(part) for part in self.parts]
        return [
            (held, _more_precise(held, current) if part.is_narrow else current)
            for part, (held, current) in zip(self.parts, pairs, strict=True)
        ]

    def is_current(self, before: torch.Tensor) -> bool:
        """Whether parameters still are what the share was ``before``, rounded to their type."""
        return all(
            torch.equal(before[part.start : part.stop].to(current.dtype), current)
            for part, (_, current) in zip(self.parts, map(self._pair, self.parts), strict=True)
        )

    def put_down(self) -> None:
        """Lay the new share into the bucket, from where all ranks gather it. Gradients are gone then."""
        self.gathered_own.copy_(self.flat)

    def take_replaced(self) -> None:
        """Gradients that somebody has put in the place of means, the same on all ranks, are what the step is to use."""
        for part in self.parts:
            gradient = part.parameter.grad
            if gradient is not None and not isinstance(gradient, SharedGradient):
                flat = _flat(gradient, *self._specs[part.index])
                self.gradient[part.start : part.stop] = flat[part.offset : part.offset + part.stop - part.start]

    def _pair(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        held = self.flat[part.start : part.stop]
        return held, _flat(part.parameter, *self._specs[part.index])[part.offset : part.offset + held.numel()]


def _parts(bucket: Bucket, first: int, end: int) -> Iterator[Part]:
    for slot, parameter in zip(bucket.plan.slots, bucket.parameters, strict=True):
        start, stop = max(slot.offset, first), min(slot.offset + slot.numel, end)
        if start < stop:
            yield Part(
                index=slot.parameter,
                parameter=parameter,
                start=start - first,
                stop=stop - first,
                offset=start - slot.offset,
                is_narrow=is_narrow(parameter, bucket),
            )


def is_narrow(parameter: nn.Parameter, bucket: Bucket) -> bool:
    """Whether its gradient has a wider type than itself."""
    return _wire_dtype(parameter.dtype) != bucket.plan.dtype


def _more_precise(held: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """What is held is, as long as it rounds to the parameter."""
    return torch.where(held.to(current.dtype) == current, held, current.to(held.dtype))


def _shares_memory(parameter: nn.Parameter, flat: torch.Tensor) -> bool:
    """Whether the one is a view of the other, and not a copy."""
    return parameter.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _flat(parameter: torch.Tensor, slot: Slot, spec: ParameterSpec) -> torch.Tensor:
    """The elements of a parameter, or of a gradient, in the order in which they lie in the bucket."""
    values = parameter.detach()
    if spec.dtype.is_complex:
        values = torch.view_as_real(values)
        strides = (*(2 * stride for stride in spec.stride), 1)
    else:
        strides = spec.stride
    if values.stride() != strides and values.numel() > 1:
        dense = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device)
        values = dense.copy_(values)
    return values.as_strided((slot.numel,), (1,))
