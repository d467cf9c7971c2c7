"""Bucket layout: the place of every gradient, as pure data.

Nothing here owns storage or communicates. A layout is a function of the parameters' descriptions, of the order in
which their gradients become ready and of the caps, so ranks that agree on these three have the same layout.

One bucket in memory, in elements of its dtype::

    │ slot 0 │pad│ slot 1 │ slot 2 │pad│ flags: one per slot │ control: one per rank, requests │
    └────────────── payload ───────────┘└──────────────────────── tail ───────────────────────┘

The tail is sent with the gradients and summed like them, so agreement between ranks costs no collective of its own. A
*flag* is 1 where this rank has a gradient for the slot, so a sum of zero means that no rank has one. The *control
flags* are in the last bucket only: a rank whose backward failed puts a 1 in its own place,
and a rank that requests something puts one in the place of the request (:mod:`gradsync.core.bucket.control_flags`).
Where a layout is to be divided among ranks, the payload is padded at its end, so that all shares have one size and
begin aligned.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["BucketCaps", "BucketLayout", "BucketPlan", "ParameterSpec", "Slot", "plan_layout"]

# Views start at multiples of this many bytes, so that vectorized kernels can run on them.
ALIGNMENT = 16

MIN_PIECE_BYTES = 1024 * 1024

# A bucket that holds less than this share of its cap takes the next gradient whatever its size: a bias between weights
# as large as the cap gets no bucket, and no collective, of its own.
NEARLY_EMPTY = 1 / 16


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """What the plan, and the comparison over ranks, need to know about a parameter."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False
    delayed: bool = False

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor, *, sparse: bool = False, delayed: bool = False) -> "ParameterSpec":
        return cls(
            name=name,
            shape=tuple(parameter.shape),
            stride=_dense_strides(parameter),
            dtype=parameter.dtype,
            device=parameter.device,
            sparse=sparse,
            delayed=delayed,
        )

    @property
    def bucket_dtype(self) -> torch.dtype:
        """The dtype that is sent: a real one for complex numbers, as pairs.

        Sums are the same, and every backend supports reals.
        """
        return self.dtype.to_real() if self.dtype.is_complex else self.dtype

    @property
    def bucket_numel(self) -> int:
        numel = 1
        for extent in self.shape:
            numel *= extent
        return numel * (2 if self.dtype.is_complex else 1)

    @property
    def nbytes(self) -> int:
        return self.bucket_numel * self.bucket_dtype.itemsize


def _dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The strides of the gradient's view: the parameter's own (as channels_last) where they fill memory densely."""
    expected = 1
    for stride, extent in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if extent > 1:
            if stride != expected:
                return torch.empty(parameter.shape, device="meta").stride()
            expected *= extent
    return parameter.stride()


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one parameter's gradient in a bucket, in elements of the bucket's dtype."""

    parameter: int
    offset: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """One bucket: its slots in ready order, and where the tail begins."""

    index: int
    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    payload: int
    control: int
    # The number of equal parts the payload divides into: one per rank where ranks own parts of it.
    shares: int
    # The number of elements per collective. Only a parameter that is larger than a bucket needs several.
    piece: int

    @property
    def numel(self) -> int:
        return self.payload + len(self.slots) + self.control

    @property
    def share(self) -> int:
        """The number of elements in one share of the payload."""
        return self.payload // self.shares

    def share_of(self, rank: int) -> slice:
        """The elements of the payload that ``rank`` owns."""
        return slice(rank * self.share, (rank + 1) * self.share)


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """All buckets in the order in which they start, and the parameters whose gradients are sparse."""

    buckets: tuple[BucketPlan, ...]
    sparse: tuple[int, ...]

    @property
    def parameters(self) -> tuple[int, ...]:
        return tuple(slot.parameter for plan in self.buckets for slot in plan.slots)


@dataclass(frozen=True, kw_only=True)
class BucketCaps:
    """The maximum bytes of gradients per bucket.

    ``caps`` are counted from the first bucket to start, or from the last one with ``from_the_end``; the final entry
    holds for all further buckets. Counting from the end keeps the last bucket small: its reduction is the one that no
    compute is left to hide.
    """

    caps: tuple[int, ...]
    from_the_end: bool = False

    @classmethod
    def uniform(cls, cap: int) -> "BucketCaps":
        return cls(caps=(cap,))

    @classmethod
    def tapered(cls, cap: int, *, least: int) -> "BucketCaps":
        """Smaller caps at the end, where nothing hides the buckets, but not below ``least`` bytes."""
        return cls(caps=(max(cap // 4, least), max(cap // 2, least), cap), from_the_end=True)

    @classmethod
    def one_parameter_each(cls) -> "BucketCaps":
        return cls(caps=(0,))

    def cap(self, position: int) -> int:
        return self.caps[min(position, len(self.caps) - 1)]


def plan_layout(
    specs: Sequence[ParameterSpec],
    order: Sequence[int],
    caps: BucketCaps,
    *,
    control: int,
    shares: int = 1,
    unit: int = 1,
) -> BucketLayout:
    """Plan buckets for the parameters in ``order`` (indices into ``specs``, in the order gradients become ready).

    A bucket holds one dtype on one device. A parameter larger than the cap has a bucket nearly of its own, sent
    in pieces of about the cap. Delayed parameters come after all others and share no bucket with them. Every
    payload divides into ``shares`` equal parts, and is a multiple of ``unit`` numbers.
    """
    sparse = tuple(sorted(index for index in order if specs[index].sparse))
    prompt = [index for index in order if not specs[index].sparse and not specs[index].delayed]
    delayed = [index for index in order if not specs[index].sparse and specs[index].delayed]
    groups = _fill(specs, prompt, caps) + _fill(specs, delayed, caps)
    largest = max(caps.caps)
    plans = [
        _place(
            specs,
            group,
            index,
            control=control if index == len(groups) - 1 else 0,
            shares=shares,
            padding_unit=unit,
            cap=largest,
        )
        for index, group in enumerate(groups)
    ]
    return BucketLayout(buckets=tuple(plans), sparse=sparse)


def _fill(specs: Sequence[ParameterSpec], order: Sequence[int], caps: BucketCaps) -> list[list[int]]:
    """Cut ``order`` into groups below their caps. A bucket starts when its last gradient is ready, hence the sort."""
    if caps.from_the_end:
        groups = _fill_forward(specs, list(reversed(order)), caps.cap)
        groups = [list(reversed(group)) for group in _join_remainders(specs, groups, caps)]
    else:
        groups = _fill_forward(specs, order, caps.cap)
    position = {index: place for place, index in enumerate(order)}
    return sorted(groups, key=lambda group: position[group[-1]])


_Kind = tuple[torch.dtype, torch.device]


def _kind(spec: ParameterSpec) -> _Kind:
    """What all gradients of a bucket have in common."""
    return spec.bucket_dtype, spec.device


def _join_remainders(specs: Sequence[ParameterSpec], groups: Sequence[list[int]], caps: BucketCaps) -> list[list[int]]:
    """Join the last group of each kind to the one before, if it is nearly empty: it has what was left over."""
    kinds: dict[_Kind, list[int]] = {}
    for number, group in enumerate(groups):
        kinds.setdefault(_kind(specs[group[0]]), []).append(number)
    joined = dict(enumerate(map(list, groups)))
    for numbers in kinds.values():
        *_, before, last = (0, *numbers)
        if len(numbers) > 1 and sum(specs[index].nbytes for index in groups[last]) < NEARLY_EMPTY * caps.cap(before):
            joined[before].extend(joined.pop(last))
    return list(joined.values())


def _fill_forward(specs: Sequence[ParameterSpec], order: Sequence[int], cap: Callable[[int], int]) -> list[list[int]]:
    open_groups: dict[_Kind, tuple[list[int], int]] = {}
    groups: list[list[int]] = []
    room: dict[_Kind, int] = {}
    for index in order:
        spec = specs[index]
        key = _kind(spec)
        if key in open_groups:
            group, used = open_groups[key]
            if used + spec.nbytes <= room[key] or used < room[key] * NEARLY_EMPTY:
                group.append(index)
                open_groups[key] = (group, used + spec.nbytes)
                continue
        room[key] = cap(len(groups))
        groups.append([index])
        open_groups[key] = (groups[-1], spec.nbytes)
    return groups


def _place(
    specs: Sequence[ParameterSpec],
    group: Sequence[int],
    index: int,
    *,
    control: int,
    shares: int,
    padding_unit: int,
    cap: int,
) -> BucketPlan:
    first = specs[group[0]]
    alignment = max(1, ALIGNMENT // first.bucket_dtype.itemsize)
    slots: list[Slot] = []
    offset = 0
    for parameter in group:
        numel = specs[parameter].bucket_numel
        slots.append(Slot(parameter=parameter, offset=offset, numel=numel))
        offset += -(-numel // alignment) * alignment
    multiple = math.lcm(alignment * shares, padding_unit)
    offset = -(-offset // multiple) * multiple
    numel = offset + len(slots) + control
    # Equal pieces, none much larger than the cap, and none too small to be worth a collective.
    pieces = max(numel * first.bucket_dtype.itemsize // max(cap, MIN_PIECE_BYTES), 1) if cap else 1
    return BucketPlan(
        index=index,
        dtype=first.bucket_dtype,
        device=first.device,
        slots=tuple(slots),
        payload=offset,
        control=control,
        shares=shares,
        piece=max(-(-numel // pieces), 1),
    )
