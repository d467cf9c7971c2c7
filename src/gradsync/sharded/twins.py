"""Parameters in the memory of a model's, with gradients of their own, and optimizers over them.

What a step does may lie far behind it: by then ``zero_grad()`` has cleared the model's gradients, a scheduler has moved
its groups, and the class of its parameters says that they are awaited. So an optimizer whose work is put off gets
parameters that nobody else knows, and options as they were when the step was called.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from gradsync.sharded.options import Options, copied

__all__ = ["PutOffStep", "Twin", "doubled"]


class Twin:
    """``itself`` is a parameter in the memory of another."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self.itself = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)

    def follow(self) -> None:
        """Somebody may have given the parameter other memory."""
        mine, other = self.itself, self._parameter
        if mine.data_ptr() != other.data_ptr() or mine.stride() != other.stride() or mine.dtype != other.dtype:
            mine.data = other.data


Gradients = Mapping[Twin, torch.Tensor]


def doubled(optimizer: torch.optim.Optimizer, twins: Mapping[int, Twin]) -> torch.optim.Optimizer:
    """The same optimizer with the same state, over the twins of its parameters, by their ids."""
    double: torch.optim.Optimizer = object.__new__(type(optimizer))
    # Schedulers put a step of their own into the optimizer, which steps the original.
    vars(double).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    # Hooks are called once a step, and not once an update.
    double._optimizer_step_pre_hooks, double._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    double.param_groups = [
        {**group, "params": [twins[id(p)].itself for p in group["params"]]} for group in optimizer.param_groups
    ]
    double.state = defaultdict(dict, {twins[id(p)].itself: state for p, state in optimizer.state.items()})
    return double


@dataclass(frozen=True, kw_only=True)
class PutOffStep:
    """One step of ``optimizers`` over twins, made of several updates. Each sees the ``options`` of all groups as they
    were when the step was called."""

    options: Options
    optimizers: Sequence[torch.optim.Optimizer]

    def update(self, gradients: Gradients) -> None:
        """Have the optimizers update these parameters, and no other."""
        for twin in gradients:
            twin.follow()
        wanted = {id(twin.itself): gradient for twin, gradient in gradients.items()}
        options = iter(copied(self.options))
        for optimizer in self.optimizers:
            all_of_them = [group["params"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group.update(next(options))
                group["params"] = [twin for twin in group["params"] if id(twin) in wanted]
            try:
                _step(optimizer, wanted)
            finally:
                for group, params in zip(optimizer.param_groups, all_of_them, strict=True):
                    group["params"] = params


def _step(optimizer: torch.optim.Optimizer, gradients: Mapping[int, torch.Tensor]) -> None:
    twins: list[nn.Parameter] = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    for twin in twins:
        # Of narrow parameters means may be wider than what an optimizer expects.
        twin.grad = gradients[id(twin)].to(twin.dtype)
    try:
        if twins:
            optimizer.step()
    finally:
        for twin in twins:
            twin.grad = None
