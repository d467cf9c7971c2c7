"""The optimizer over all shares of this rank, and the flat parameters that it updates.

Shares are cut into *segments*: runs of neighbouring parameters that belong to one parameter group and have been updated
equally often. The optimizer has one flat parameter per segment, and segments are few and large. A parameter that no
rank has used in a window is not updated, as with a plain optimizer, and from then on it is a segment by itself.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gradsync.optim.sharded.share import Part, Share, movable, separate
from gradsync.optim.sharded.states import MASTER, ParameterState

__all__ = ["Segments", "ShareSegment"]

# Makes an optimizer over flat parameters from pairs of a group's number and the parameters in it.
OptimizerFactory = Callable[[Sequence[tuple[int, list[nn.Parameter]]]], torch.optim.Optimizer]

States = Mapping[int, ParameterState]


class ShareSegment:
    """Neighbouring ``parts`` of a ``share``, all of one ``group``."""

    def __init__(self, share: Share, group: int, parts: list[Part]) -> None:
        self.share, self.group, self.parts = share, group, parts
        self._place = slice(parts[0].start, parts[-1].stop)
        self.flat = nn.Parameter(share.flat[self._place])
        self.gradient = share.gradient[self._place]

    def point_to(self, flat: torch.Tensor) -> None:
        """Use the segment's place in ``flat``, the memory of the share, from now on."""
        self.flat.data = flat[self._place]

    @property
    def used(self) -> list[bool]:
        """Whether any rank has a gradient, for each parameter."""
        return [part.parameter.grad is not None for part in self.parts]

    def cut_out(self, part: Part, flat: torch.Tensor) -> torch.Tensor:
        first = self.parts[0].start
        return flat[part.start - first : part.stop - first]


class Segments:
    """What this rank updates. ``group_of`` has each parameter's group, by its index in the model."""

    def __init__(
        self,
        shares: Sequence[Share],
        group_of: Mapping[int, int],
        make_optimizer: OptimizerFactory,
        states: States,
    ) -> None:
        self.shares = list(shares)
        self._group_of = group_of
        self._make_optimizer = make_optimizer
        # Parameters whose current values are in the shares.
        self._loaded: set[int] = set()
        # The memory that parameters left in the last step.
        self._left: list[torch.Tensor] = []
        self.cut(states)

    # -- segments ------------------------------------------------------------------------------------------------

    def cut(self, states: States, *, apart: Collection[int] = ()) -> None:
        """Cut the shares into segments, with parameters that are ``apart`` in their own, and keep ``states``."""
        self._segments = [each for share in self.shares for each in self._runs(share, states, apart)]
        groups = sorted({segment.group for segment in self._segments})
        self._places = {group: place for place, group in enumerate(groups)}
        members = [(group, [each.flat for each in self._segments if each.group == group]) for group in groups]
        self.optimizer = self._make_optimizer(members) if members else None
        for segment in self._segments:
            self._restore(segment, states)

    def _runs(self, share: Share, states: States, apart: Collection[int]) -> Iterator[ShareSegment]:
        run: list[Part] = []
        for part in share.parts:
            if part.index not in self._group_of:
                continue
            if run and not self._joins(run[-1], part, states, apart):
                yield ShareSegment(share, self._group_of[run[0].index], run)
                run = []
            run.append(part)
        if run:
            yield ShareSegment(share, self._group_of[run[0].index], run)

    def _joins(self, last: Part, part: Part, states: States, apart: Collection[int]) -> bool:
        return (
            last.stop == part.start
            and self._group_of[last.index] == self._group_of[part.index]
            and last.index not in apart
            and part.index not in apart
            and _alike(states.get(last.index), states.get(part.index))
        )

    def _restore(self, segment: ShareSegment, states: States) -> None:
        known = [states[part.index] for part in segment.parts if part.index in states]
        if not known:
            return
        if MASTER in known[0].tensors and segment.parts[0].is_narrow:
            segment.flat.data.copy_(torch.cat([each.tensors[MASTER] for each in known]))
            self._loaded.update(part.index for part in segment.parts)
        by_element = known[0].tensors.keys() - {MASTER}
        if self.optimizer is None or not (known[0].scalars or by_element):
            return
        state = self.optimizer.state[segment.flat]
        state.clear()
        for key, value in known[0].scalars.items():
            state[key] = value.clone() if isinstance(value, torch.Tensor) else value
        for key in by_element:
            whole = torch.cat([each.tensors[key] for each in known])
            # A plain optimizer of narrow parameters keeps narrow numbers.
            state[key] = whole.to(segment.flat.dtype) if whole.is_floating_point() else whole

    def states(self, share: Share | None = None) -> dict[int, ParameterState]:
        """The optimizer's state per parameter, of all shares or one. Tensors are views."""
        found: dict[int, ParameterState] = {}
        for segment in self._segments:
            if share is not None and segment.share is not share:
                continue
            state = self.optimizer.state.get(segment.flat, {}) if self.optimizer is not None else {}
            tensors = {key: value for key, value in state.items() if _is_by_element(value, segment.flat)}
            scalars = {key: value for key, value in state.items() if key not in tensors}
            for part in segment.parts:
                cut = {key: segment.cut_out(part, value) for key, value in tensors.items()}
                if part.is_narrow and part.index in self._loaded:
                    cut[MASTER] = segment.cut_out(part, segment.flat.detach())
                if cut or scalars:
                    found[part.index] = ParameterState(tensors=cut, scalars=dict(scalars))
        return found

    # -- the step ------------------------------------------------------------------------------------------------

    def place(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make sure before a step that all shares have memory. ``parameters`` are all of the model."""
        self._left = []
        shares = [share for share in self.shares if share.needs_place]
        if not shares:
            return
        for share in shares:
            share.detach()
        # Not in memory that parameters are about to leave.
        self._repoint(shares)
        can_move = movable(parameters)
        # Another thread may have begun to read one before this step: the memory that it reads stays until the next.
        self._left = [parameter.detach() for parameter in parameters if id(parameter) in can_move]
        for share in shares:
            share.place(can_move)
        self._repoint(shares)
        # Some may have left the buckets, and would keep all the memory that they once shared alive.
        inside = {id(parameter) for share in self.shares for parameter in share.bucket.parameters}
        separate(each for each in parameters if id(each) in can_move and id(each) not in inside)

    def _repoint(self, shares: Sequence[Share]) -> None:
        for segment in self._segments:
            if segment.share in shares:
                segment.point_to(segment.share.flat)

    def prepare(self) -> list[ShareSegment]:
        """The segments that a step must :meth:`update`."""
        self._load()
        for share in self.shares:
            share.take_replaced()
        if any(0 < sum(segment.used) < len(segment.parts) for segment in self._segments):
            unused = {part.index for segment in self._segments for part in segment.parts if part.parameter.grad is None}
            self.cut(self.states(), apart=unused)
        return [segment for segment in self._segments if segment.used[0]]

    @property
    def changing(self) -> list[nn.Parameter]:
        """The parameters that a step changes, on any rank."""
        return [
            parameter
            for share in self.shares
            for slot, parameter in zip(share.plan.slots, share.bucket.parameters, strict=True)
            if slot.parameter in self._group_of and parameter.grad is not None
        ]

    def update(self, options: Sequence[dict[str, Any]], segments: Sequence[ShareSegment]) -> None:
        """Have the optimizer update ``segments``, and no others. ``options`` are those of the parameter groups."""
        if self.optimizer is None or not segments:
            return
        for group, place in self._places.items():
            self.optimizer.param_groups[place].update(options[group])
        for segment in segments:
            segment.flat.grad = segment.gradient
        with torch._C._EnableTorchFunction():
            # The optimizer must see only these, not the model's parameters.
            self.optimizer.step()
        for segment in segments:
            segment.flat.grad = None

    def _load(self) -> None:
        """Take the current parameters: one that has changed since the last step was changed on purpose."""
        pairs = [pair for share in self.shares for pair in share.current()]
        if pairs:
            held, current = zip(*pairs, strict=True)
            torch._foreach_copy_(list(held), list(current))
        self._loaded.update(part.index for share in self.shares for part in share.parts)

    def release_buckets(self) -> None:
        """Release everything in the buckets, which go. States stay until they are transferred to new segments."""
        for share in self.shares:
            share.release_bucket()
        for segment in self._segments:
            segment.gradient = segment.share.gradient


def _alike(first: ParameterState | None, second: ParameterState | None) -> bool:
    """Whether two parameters can be updated as one."""
    if first is None or second is None:
        return first is second
    if first.scalars.keys() != second.scalars.keys() or first.tensors.keys() != second.tensors.keys():
        return False
    return all(bool(value == second.scalars[key]) for key, value in first.scalars.items())


def _is_by_element(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape
