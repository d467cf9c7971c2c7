"""Flat memory for the parameters of a bucket, with the same layout as the bucket.

::

    bucket            │ gradient of a │pad│ gradient of b │ gradient of c │pad│
    flat parameters   │ a             │pad│ b             │ c             │pad│
                      └──── share of rank 0 ────┘└──── share of rank 1 ─────┘

Parameters are views of it. So the optimizer updates this rank's share of them in place, and the other shares are
gathered into place: nothing is copied on the way in or out.

Moving a parameter to different memory must not be observable. It would be if something else refers to the memory that
it leaves: a view that was kept, another parameter at the same place, another process. Such parameters stay, and so do
all others of their bucket.

**Alternatives considered.** Memory of the communicator: on one host ranks could then write into each other's
parameters, which saves a copy. But a rank that was wrongly given up for dead could write there much later, and a forked
process would see parameters change.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
from torch import nn

from gradsync.core.bucket import Bucket
from gradsync.optim.sharded.gather import AwaitedParameter

__all__ = ["FlatParameters", "movable", "separate"]

# A step that will move them may have been announced.
_PLAIN = nn.Parameter, AwaitedParameter


class FlatParameters:
    """Holds all parameters of ``bucket``, from now on, in memory of ``dtype``."""

    def __init__(self, bucket: Bucket, dtype: torch.dtype) -> None:
        self.memory = torch.zeros(bucket.plan.payload, dtype=dtype, device=bucket.plan.device)
        self.views = bucket.views_of(self.memory)
        self._parameters = bucket.parameters
        torch._foreach_copy_(self.views, [parameter.detach() for parameter in self._parameters])
        for parameter, view in zip(self._parameters, self.views, strict=True):
            parameter.data = view
        self._places = [_place(parameter) for parameter in self._parameters]

    def hold_all(self) -> bool:
        """Whether no parameter has been given different memory since."""
        return [_place(parameter) for parameter in self._parameters] == self._places


def _place(parameter: torch.Tensor) -> tuple[int, tuple[int, ...], torch.dtype]:
    return parameter.data_ptr(), parameter.stride(), parameter.dtype


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
    """Where a parameter begins and ends in its storage, in bytes."""
    strides = zip(parameter.stride(), parameter.shape, strict=True)
    last = 1 + sum(stride * (extent - 1) for stride, extent in strides) if parameter.numel() else 0
    first = int(parameter.storage_offset())
    return first * parameter.itemsize, (first + last) * parameter.itemsize
