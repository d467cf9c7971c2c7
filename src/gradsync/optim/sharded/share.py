"""This rank's share of one bucket: which parameters it has, and the memory where they are updated and gathered.

A share is in one of two kinds of memory; ``narrow`` parameters have a narrower dtype than their gradients:

==================  =========================  =======================  ==============================================
memory              the optimizer updates      others are gathered      copies in each step
==================  =========================  =======================  ==============================================
Attached            this rank's parameters     into the parameters      none
Attached, narrow    a wide copy of the share   into the parameters      compared with the wide copy before, rounded
                                                                        after
Detached            a copy of the share        into the bucket          into the copy before, out of the bucket after
==================  =========================  =======================  ==============================================

Attached parameters are views of flat memory with the layout of the bucket. Parameters are detached if they cannot be
moved there, if their bucket has several dtypes, or if they are on an accelerator. ::

    bucket            │ gradient of a │pad│ gradient of b │ gradient of c │pad│
    flat parameters   │ a             │pad│ b             │ c             │pad│
                      └──── share of rank 0 ────┘└──── share of rank 1 ─────┘

Moving a parameter to different memory must not be observable. It would be if something else refers to the memory that
it leaves: a view that was kept, another parameter at the same place, another process. Such parameters stay, and so do
all others of their bucket.

**Alternatives considered.** Memory of the communicator: on one host ranks could then write into each other's
parameters, which saves a copy. But a rank that was wrongly given up for dead could write there much later, and a forked
process would see parameters change.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from gradsync.core.bucket import Bucket
from gradsync.core.bucket.layout import ParameterSpec, Slot
from gradsync.core.reduction.shared_gradient import SharedGradient
from gradsync.optim.sharded.gather import AwaitedParameter

__all__ = ["Part", "Share", "is_narrow", "movable", "separate"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of one parameter in a share: the elements from ``start`` to ``stop`` of the share, which are those
    ``inside`` the parameter. ``index`` is the parameter's index in the model."""

    index: int
    parameter: nn.Parameter
    start: int
    stop: int
    inside: slice
    # Whether the share holds it in a wider dtype than its own.
    is_narrow: bool


# -- where a share lies ------------------------------------------------------------------------------------------------


class Detached:
    """Parameters stay where they are, and the optimizer updates a copy of the share.

    New parameters of all ranks are gathered into ``gathered``, which is the memory of ``bucket``.
    """

    is_in_place = False

    def __init__(self, bucket: Bucket, own: slice, gathered: torch.Tensor) -> None:
        self._parameters = bucket.parameters
        self.gathered, self.sent = gathered, gathered[own]
        self._views = bucket.views_of(gathered)

    def receive(self) -> None:
        """Copy the new parameters of all ranks, which have arrived, to where they belong."""
        # Without counting as a change: those that the step has changed were counted when it began.
        torch._foreach_copy_([parameter.data for parameter in self._parameters], list(self._views))


class Attached:
    """All parameters of ``bucket`` lie, from now on, in flat memory of ``dtype``, and are gathered there.

    ``is_in_place``: the optimizer updates this rank's share there; otherwise it has a wide copy.
    """

    def __init__(self, bucket: Bucket, own: slice, dtype: torch.dtype, *, is_in_place: bool) -> None:
        self.is_in_place = is_in_place
        self._parameters = bucket.parameters
        self.gathered = torch.zeros(bucket.plan.payload, dtype=dtype, device=bucket.plan.device)
        self.sent = self.gathered[own]
        views = bucket.views_of(self.gathered)
        torch._foreach_copy_(views, [parameter.detach() for parameter in self._parameters])
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.data = view
        self._places = [_place(parameter) for parameter in self._parameters]

    def holds_all(self) -> bool:
        """Whether no parameter has been given different memory since."""
        return [_place(parameter) for parameter in self._parameters] == self._places

    def receive(self) -> None:
        """Nothing is left to do: new parameters were gathered to where they belong."""


def _place(parameter: torch.Tensor) -> tuple[int, tuple[int, ...], torch.dtype]:
    return parameter.data_ptr(), parameter.stride(), parameter.dtype


# -- the share ---------------------------------------------------------------------------------------------------------


class Share:
    """This rank's part of the parameters of ``bucket``. The optimizer updates ``flat``, with ``gradient``."""

    def __init__(self, bucket: Bucket, rank: int) -> None:
        plan = bucket.plan
        self._own = plan.share_of(rank)
        self.plan, self.bucket = plan, bucket
        self.gradient = bucket.flat[self._own]
        self.parts = list(_parts(bucket, self._own))
        # New parameters are sent in their own dtype, where they have one in common.
        dtypes = {_wire_dtype(parameter.dtype) for parameter in bucket.parameters}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else None
        self._is_wider = self._dtype != plan.dtype
        self._may_attach = self._dtype is not None and plan.device.type == "cpu"
        # Only a wide copy must be kept between steps; the others get their memory when they need it.
        self._copy = self._zeros() if self._is_wider else None
        payload = bucket.flat[: plan.payload]
        gathered = payload if self._dtype is None else payload.view(self._dtype)[: plan.payload]
        self._detached = Detached(bucket, self._own, gathered)
        self._use(self._detached)
        self._pointers: list[tuple[int, tuple[int, ...]]] = []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._are_views = False
        self._specs = {slot.parameter: (slot, spec) for slot, spec in zip(plan.slots, bucket.specs, strict=True)}

    # -- memory ----------------------------------------------------------------------------------------------------

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self.plan.share, dtype=self.plan.dtype, device=self.plan.device)

    def _use(self, memory: Detached | Attached) -> None:
        self._memory, self.gathered, self.sent = memory, memory.gathered, memory.sent
        if memory.is_in_place:
            self.flat = self.sent
        elif self._copy is not None:
            self.flat = self._copy
        else:
            # A placeholder, without memory.
            self.flat = torch.zeros(1, dtype=self.plan.dtype, device=self.plan.device).expand(self.plan.share)

    @property
    def is_in_place(self) -> bool:
        """Whether the optimizer updates parameters in place."""
        return self._memory.is_in_place

    @property
    def needs_place(self) -> bool:
        """Whether it must be :meth:`placed <place>` before the next step."""
        if isinstance(self._memory, Attached):
            return not self._memory.holds_all()
        return self._may_attach or self.flat.stride() == (0,)

    def detach(self) -> None:
        """Release the memory of the parameters."""
        self._pointers, self._pairs = [], []
        if self._memory is not self._detached:
            self._use(self._detached)

    def place(self, movable: Collection[int]) -> None:
        """Attach the parameters, if all of them are ``movable``, by their ids; else make a copy of this share."""
        parameters, specs, dtype = self.bucket.parameters, self.bucket.specs, self._dtype
        can_move = all(id(p) in movable and self._fits(p, spec) for p, spec in zip(parameters, specs, strict=True))
        if self._may_attach and dtype is not None and can_move:
            attached = Attached(self.bucket, self._own, dtype, is_in_place=not self._is_wider)
            if not self._is_wider:
                self._copy = None
            self._use(attached)
            return
        if self._copy is None:
            self._copy = self._zeros()
        self._use(self._detached)

    def _fits(self, parameter: nn.Parameter, spec: ParameterSpec) -> bool:
        """Whether it still matches what buckets were planned for, so that it looks the same after a move."""
        return (
            _wire_dtype(parameter.dtype) == self._dtype
            and parameter.is_complex() == spec.dtype.is_complex
            and (tuple(parameter.shape), parameter.stride()) == (spec.shape, spec.stride)
        )

    def release_bucket(self) -> None:
        """Release the bucket, but keep this rank's part of its parameters. May be repeated before the next bucket."""
        for name in ("bucket", "_memory", "_detached"):
            vars(self).pop(name, None)
        self.gradient = self.gathered = self.sent = self.flat[:0]

    # -- values ----------------------------------------------------------------------------------------------------

    def current(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of what the share holds of each parameter and the parameter's value, where these may differ."""
        if self.is_in_place:
            return []
        pointers = [(part.parameter.data_ptr(), part.parameter.stride()) for part in self.parts]
        if pointers != self._pointers:
            # Parameters were given different memory; or they have not been looked at before.
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

    def fill_sent(self) -> None:
        """Copy the new share to where it is ``sent`` from. If that is the bucket, this overwrites its gradients."""
        if self.sent is not self.flat:
            self.sent.copy_(self.flat)

    def receive(self) -> None:
        """Take the new parameters of all ranks, which have arrived."""
        self._memory.receive()

    def take_replaced(self) -> None:
        """Use gradients that the user has put in the place of means, the same on all ranks, in this step."""
        for part in self.parts:
            gradient = part.parameter.grad
            if gradient is not None and not isinstance(gradient, SharedGradient):
                flat = _flat(gradient, *self._specs[part.index])
                self.gradient[part.start : part.stop] = flat[part.inside]

    def _pair(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        values = _flat(part.parameter, *self._specs[part.index])
        return self.flat[part.start : part.stop], values[part.inside]


def _parts(bucket: Bucket, own: slice) -> Iterator[Part]:
    for slot, parameter in zip(bucket.plan.slots, bucket.parameters, strict=True):
        start, stop = max(slot.offset, own.start), min(slot.offset + slot.numel, own.stop)
        if start < stop:
            yield Part(
                index=slot.parameter,
                parameter=parameter,
                start=start - own.start,
                stop=stop - own.start,
                inside=slice(start - slot.offset, stop - slot.offset),
                is_narrow=is_narrow(parameter, bucket),
            )


def is_narrow(parameter: nn.Parameter, bucket: Bucket) -> bool:
    """Whether its gradient has a wider dtype than the parameter."""
    return _wire_dtype(parameter.dtype) != bucket.plan.dtype


def _more_precise(held: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """The held value, as long as it rounds to the parameter; else the parameter."""
    return torch.where(held.to(current.dtype) == current, held, current.to(held.dtype))


def _shares_memory(parameter: nn.Parameter, flat: torch.Tensor) -> bool:
    """Whether one is a view of the other, and not a copy."""
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


# -- which parameters may be moved -------------------------------------------------------------------------------------

# A step that will move them may have been announced.
_PLAIN = nn.Parameter, AwaitedParameter


def separate(parameters: Iterable[nn.Parameter]) -> None:
    """Give each of ``parameters``, which are movable, memory of its own size, so that the old memory can be freed."""
    for parameter in parameters:
        if parameter.untyped_storage().nbytes() > parameter.nbytes:
            parameter.data = parameter.detach().clone(memory_format=torch.preserve_format)


def movable(parameters: Iterable[nn.Parameter]) -> Collection[int]:
    """The ids of those ``parameters`` whose memory only they refer to, each to its own part."""
    by_storage: dict[int, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if type(parameter) in _PLAIN and parameter.layout is torch.strided and parameter.device.type == "cpu":
            by_storage[parameter.untyped_storage()._cdata].append(parameter)
    return {id(each) for group in by_storage.values() if _are_alone(group) for each in group}


def _are_alone(group: list[nn.Parameter]) -> bool:
    """Whether the storage of these parameters has no other reference, and none overlaps another."""
    storage = group[0].untyped_storage()
    # The references held by the parameters and by this function.
    if storage.is_shared() or torch._C._storage_Use_Count(storage._cdata) != len(group) + 1:
        return False
    ends = 0
    for first, last in sorted(map(_extent, group)):
        if first < ends:
            return False
        ends = last
    return True


def _extent(parameter: nn.Parameter) -> tuple[int, int]:
    """The bytes at which a parameter begins and ends in its storage."""
    strides = zip(parameter.stride(), parameter.shape, strict=True)
    last = 1 + sum(stride * (extent - 1) for stride, extent in strides) if parameter.numel() else 0
    first = int(parameter.storage_offset())
    return first * parameter.itemsize, (first + last) * parameter.itemsize
