"""This rank's share of one bucket: flat parameters, and the optimizer that updates them.

A share is cut into *segments*: runs of neighbouring slots that belong to one parameter group and have been updated
equally often. The optimizer sees a flat parameter for each segment, which is few and large. A parameter that nobody has
used in a window is not updated, as a plain optimizer would not either, and from then on it is a segment by itself.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gradsync.bucket import Bucket
from gradsync.bucket.layout import ParameterSpec, Slot

__all__ = ["MASTER", "OptimizerFactory", "Share", "SlotState"]

# Makes an optimizer over flat parameters, for each group its number and those in it.
OptimizerFactory = Callable[[Sequence[tuple[int, list[nn.Parameter]]]], torch.optim.Optimizer]

# By this name the state has parameters in the type in which they are updated, where that is wider than their own.
MASTER = "master"


@dataclass(kw_only=True)
class SlotState:
    """The optimizer's state of one parameter, or of this rank's part of it: ``tensors`` with a number for each element,
    flat, and ``scalars`` that hold for all of them."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Segment:
    """``start`` and ``stop`` count elements of the share; ``slots`` are those of the bucket."""

    group: int
    start: int
    stop: int
    slots: tuple[int, ...]


class Share:
    """This rank's part of the parameters of ``bucket``. ``groups`` has the parameter group of each slot."""

    def __init__(
        self, bucket: Bucket, groups: Sequence[int | None], rank: int, make_optimizer: OptimizerFactory
    ) -> None:
        self.bucket = bucket
        self._groups = groups
        self._make_optimizer = make_optimizer
        plan = bucket.plan
        self._first = rank * plan.share
        self.flat = torch.zeros(plan.share, dtype=plan.dtype, device=plan.device)
        payload = bucket.wire[: plan.payload]
        self.gradient = payload[self._first : self._first + plan.share]
        # New parameters travel in their own dtype, where they have one in common.
        dtypes = {_wire_dtype(parameter.dtype) for parameter in bucket.parameters}
        self.gathered = payload.view(dtypes.pop())[: plan.payload] if len(dtypes) == 1 else payload
        self.gathered_own = self.gathered[self._first : self._first + plan.share]
        self.gathered_views = bucket.views_of(self.gathered)
        self._segments: list[_Segment] = []
        # Whether the parameters have been taken over yet.
        self._is_loaded = False
        self.optimizer: torch.optim.Optimizer | None = None
        self._parts = [part for part in (self._part(number) for number in range(len(plan.slots))) if part is not None]
        self.cut({}, apart=())

    # -- where parameters lie ----------------------------------------------------------------------------------------

    def _part(self, number: int) -> tuple[int, int, int] | None:
        """Of a slot: its number, and where it begins and ends in the share; None where it has nothing in it."""
        slot = self.bucket.plan.slots[number]
        start = max(slot.offset, self._first)
        stop = min(slot.offset + slot.numel, self._first + self.flat.numel())
        return (number, start - self._first, stop - self._first) if start < stop else None

    def load(self) -> None:
        """Take the parameters as they are: whoever has changed one since the last step meant to."""
        targets, sources = [], []
        for number, start, stop in self._parts:
            slot, spec = self.bucket.plan.slots[number], self.bucket.specs[number]
            offset = start + self._first - slot.offset
            held = self.flat[start:stop]
            current = _flat(self.bucket.parameters[number], slot, spec)[offset : offset + stop - start]
            if current.dtype != held.dtype:
                # What is held is more precise than the parameter, as long as it rounds to it.
                current = torch.where(held.to(current.dtype) == current, held, current.to(held.dtype))
            targets.append(held)
            sources.append(current)
        if targets:
            torch._foreach_copy_(targets, sources)
        self._is_loaded = True

    # -- segments ------------------------------------------------------------------------------------------------

    def cut(self, states: dict[int, SlotState], *, apart: Collection[int]) -> None:
        """Cut the share into segments, those slots that are ``apart`` by themselves, and go on with ``states``."""
        self._segments = list(self._runs(states, apart))
        present = sorted({segment.group for segment in self._segments})
        self._group_places = {group: place for place, group in enumerate(present)}
        self._parameters = [nn.Parameter(self.flat[segment.start : segment.stop]) for segment in self._segments]
        if not self._segments:
            self.optimizer = None
            return
        members: list[tuple[int, list[nn.Parameter]]] = [
            (group, [p for p, s in zip(self._parameters, self._segments, strict=True) if s.group == group])
            for group in present
        ]
        self.optimizer = self._make_optimizer(members)
        for segment, parameter in zip(self._segments, self._parameters, strict=True):
            self._restore(segment, parameter, states)

    def _runs(self, states: dict[int, SlotState], apart: Collection[int]) -> Iterator[_Segment]:
        run: _Segment | None = None
        for number, start, stop in self._parts:
            group = self._groups[number]
            if group is None:
                continue
            joins = (
                run is not None
                and run.stop == start
                and run.group == group
                and number not in apart
                and run.slots[-1] not in apart
                and _alike(states.get(run.slots[-1]), states.get(number))
            )
            if run is not None and joins:
                run = _Segment(group=group, start=run.start, stop=stop, slots=(*run.slots, number))
                continue
            if run is not None:
                yield run
            run = _Segment(group=group, start=start, stop=stop, slots=(number,))
        if run is not None:
            yield run

    def _restore(self, segment: _Segment, parameter: nn.Parameter, states: dict[int, SlotState]) -> None:
        known = [states[number] for number in segment.slots if number in states]
        if known and MASTER in known[0].tensors:
            self.flat[segment.start : segment.stop] = torch.cat([each.tensors[MASTER] for each in known])
        if not known or self.optimizer is None or not (known[0].scalars or known[0].tensors.keys() - {MASTER}):
            return
        state = self.optimizer.state[parameter]
        state.clear()
        for key, value in known[0].scalars.items():
            state[key] = value.clone() if isinstance(value, torch.Tensor) else value
        for key in known[0].tensors.keys() - {MASTER}:
            state[key] = torch.cat([each.tensors[key] for each in known])

    def states(self) -> dict[int, SlotState]:
        """The optimizer's state, taken apart by slots. Tensors are views."""
        found: dict[int, SlotState] = {}
        for segment, parameter in zip(self._segments, self._parameters, strict=True):
            state = self.optimizer.state.get(parameter, {}) if self.optimizer is not None else {}
            tensors = {key: value for key, value in state.items() if _is_by_element(value, parameter)}
            scalars = {key: value for key, value in state.items() if key not in tensors}
            if self.gathered.dtype != self.flat.dtype and self._is_loaded:
                tensors[MASTER] = parameter.detach()
            if not tensors and not scalars:
                continue
            for number, start, stop in self._parts:
                if number in segment.slots:
                    found[number] = SlotState(
                        tensors={k: v[start - segment.start : stop - segment.start] for k, v in tensors.items()},
                        scalars=dict(scalars),
                    )
        return found

    def own_part(self, number: int, whole: SlotState) -> SlotState | None:
        """What this rank keeps of the state of a whole parameter."""
        within = self.range_of(number)
        if within is None:
            return None
        tensors = {
            key: value[within[0] : within[1]].to(self.flat.device, copy=True) for key, value in whole.tensors.items()
        }
        return SlotState(tensors=tensors, scalars=whole.scalars)

    def take(self, wholes: dict[int, SlotState]) -> None:
        """Go on with the states of whole parameters, by slots."""
        parts = {number: self.own_part(number, whole) for number, whole in wholes.items()}
        self.cut({number: part for number, part in parts.items() if part is not None}, apart=())

    def part_of(self, number: int) -> tuple[int, int] | None:
        """Where a slot begins and ends in the share."""
        part = self._part(number)
        return None if part is None else part[1:]

    def range_of(self, number: int) -> tuple[int, int] | None:
        """Where this rank's part of a slot begins and ends, in elements of the slot."""
        part = self._part(number)
        if part is None:
            return None
        offset = self._first - self.bucket.plan.slots[number].offset
        return part[1] + offset, part[2] + offset

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self, options: Sequence[dict[str, Any]]) -> None:
        """Update the share by its gradient. ``options`` are those of the parameter groups."""
        self.load()
        unused = frozenset(number for number, _, _ in self._parts if self.bucket.parameters[number].grad is None)
        if any(unused.intersection(s.slots) and not unused.issuperset(s.slots) for s in self._segments):
            self.cut(self.states(), apart=unused)
        if self.optimizer is None:
            return
        for group, place in self._group_places.items():
            self.optimizer.param_groups[place].update(options[group])
        for segment, parameter in zip(self._segments, self._parameters, strict=True):
            is_used = not unused.issuperset(segment.slots)
            parameter.grad = self.gradient[segment.start : segment.stop] if is_used else None
        self.optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def put_down(self) -> None:
        """Lay the new share into the bucket, from where all ranks gather it. Gradients are gone then."""
        self.gathered_own.copy_(self.flat)


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _alike(first: SlotState | None, second: SlotState | None) -> bool:
    """Whether two slots can be updated as one."""
    if first is None or second is None:
        return first is second
    if first.scalars.keys() != second.scalars.keys() or first.tensors.keys() != second.tensors.keys():
        return False
    return all(bool(value == second.scalars[key]) for key, value in first.scalars.items())


def _is_by_element(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _flat(parameter: nn.Parameter, slot: Slot, spec: ParameterSpec) -> torch.Tensor:
    """The parameter's elements in the order in which its gradient lies in the bucket."""
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
