"""Shadow parameters: they share the model's memory but have gradients of their own, for deferred optimizer steps.

The work of a step may be done long after the call: by then ``zero_grad()`` has cleared the model's gradients, a
scheduler has changed its groups, and its parameters belong to the class of awaited ones. So an optimizer whose work is
deferred gets private parameters, and options as they were when the step was called.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from gradsync.optim.sharded.options import Options, copied, is_equal

__all__ = ["PutOffStep", "ShadowParameter", "doubled"]


class ShadowParameter:
    """``itself`` is a parameter that shares the memory of a model's parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.itself = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)

    def follow(self) -> None:
        """Point to the parameter's current memory, which may have been replaced."""
        mine, other = self.itself, self.parameter
        if mine.data_ptr() != other.data_ptr() or mine.stride() != other.stride() or mine.dtype != other.dtype:
            mine.data = other.data


Gradients = Mapping[ShadowParameter, torch.Tensor]


def doubled(optimizer: torch.optim.Optimizer, shadows: Mapping[int, ShadowParameter]) -> torch.optim.Optimizer:
    """The same optimizer with the same state, over the shadows of its parameters, by their ids."""
    double: torch.optim.Optimizer = object.__new__(type(optimizer))
    # Schedulers replace the optimizer's step by their own, which steps the original.
    vars(double).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    # The hooks stay with the original: they are called once per step, not once per update.
    for name in [name for name in vars(double) if name.endswith("_hooks")]:
        setattr(double, name, OrderedDict())
    double.param_groups = [
        {**group, "params": [shadows[id(p)].itself for p in group["params"]]} for group in optimizer.param_groups
    ]
    double.state = defaultdict(dict, {shadows[id(p)].itself: state for p, state in optimizer.state.items()})
    return double


@dataclass(frozen=True, kw_only=True)
class PutOffStep:
    """One deferred step of ``optimizers`` over shadow parameters, made of several updates. Each uses the ``options`` of
    all groups from when the step was called; what they write there is collected in ``written``, once per step."""

    options: Options
    optimizers: Sequence[torch.optim.Optimizer]
    written: dict[int, dict[str, Any]] = field(default_factory=dict)

    def update(self, gradients: Gradients) -> None:
        """Have the optimizers update these parameters, and no others."""
        for shadow in gradients:
            shadow.follow()
        wanted = {id(shadow.itself): gradient for shadow, gradient in gradients.items()}
        for number, optimizer in self._numbered():
            if any(id(shadow) in wanted for group in optimizer.param_groups for shadow in group["params"]):
                self._step(number, optimizer, wanted)

    def count(self, idle: Sequence[bool]) -> None:
        """Have optimizers that are ``idle``, because none of their parameters has a gradient, step on nothing: they may
        count their steps."""
        for (number, optimizer), is_idle in zip(self._numbered(), idle, strict=True):
            if is_idle:
                self._step(number, optimizer, {})

    def _numbered(self) -> Iterator[tuple[int, torch.optim.Optimizer]]:
        """The optimizers, each with the index of its first group."""
        number = 0
        for optimizer in self.optimizers:
            yield number, optimizer
            number += len(optimizer.param_groups)

    def _step(self, number: int, optimizer: torch.optim.Optimizer, gradients: Mapping[int, torch.Tensor]) -> None:
        groups = optimizer.param_groups
        all_of_them = [group["params"] for group in groups]
        for group, options in zip(groups, copied(self.options[number : number + len(groups)]), strict=True):
            group.update(options)
            group["params"] = [shadow for shadow in group["params"] if id(shadow) in gradients]
        shadows: list[nn.Parameter] = list(chain.from_iterable(group["params"] for group in groups))
        for shadow in shadows:
            # For narrow parameters, means may be wider than an optimizer expects.
            shadow.grad = gradients[id(shadow)].to(shadow.dtype)
        try:
            with torch._C._EnableTorchFunction():
                # The optimizer must see only the shadows, not the model's parameters.
                optimizer.step()
        finally:
            for shadow in shadows:
                shadow.grad = None
            for place, (group, params) in enumerate(zip(groups, all_of_them, strict=True), number):
                group["params"] = params
                old = self.options[place]
                changed = {key: value for key, value in group.items() if key != "params"}
                changed = {key: value for key, value in changed.items() if not is_equal(value, old.get(key))}
                self.written.setdefault(place, {}).update(changed)
