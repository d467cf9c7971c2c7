"""Applies the mean over the ranks: as the new parameters, or as a gradient for an outer optimizer.

The outer optimizer updates *anchors*: what all ranks held when they last agreed, in float32 at least. Its gradient is
the anchor minus the mean of the parameters. Every rank computes the same update of the same numbers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gradsync.base.errors import ConfigurationError
from gradsync.core.bucket import ParameterSpec

__all__ = ["Outer", "OuterFactory", "is_averaging", "make_outer"]

OuterFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Outer:
    """Anchors, and the optimizer that updates them."""

    def __init__(self, anchors: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self.anchors, self.optimizer = list(anchors), optimizer

    @torch.no_grad()
    def drop(self, parameters: Sequence[torch.Tensor]) -> None:
        """Set the anchors to the current parameters."""
        for anchor, parameter in zip(self.anchors, parameters, strict=True):
            anchor.copy_(parameter)

    def step(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Update the anchors for which there are gradients."""
        try:
            for index, gradient in gradients.items():
                self.anchors[index].grad = gradient
            self.optimizer.step()
        finally:
            # The gradients lie in buckets. Optimizers skip anchors that have none.
            for index in gradients:
                self.anchors[index].grad = None


def make_outer(
    factory: OuterFactory | None, parameters: Sequence[torch.Tensor], specs: Sequence[ParameterSpec], *, exact: bool
) -> Outer | None:
    """The outer optimizer over anchors of ``specs``, or None where only the mean of the parameters is wanted.

    A mean that is not ``exact`` is a mean of differences, which needs anchors to be added to.
    """
    if factory is None:
        if exact:
            return None
        factory = _one_whole_step
    if not callable(factory):
        raise ConfigurationError(
            "outer makes an optimizer of parameters, as functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, "
            f"nesterov=True) does, got {factory!r}"
        )
    anchors = [
        nn.Parameter(parameter.detach().to(spec.dtype, copy=True))
        for parameter, spec in zip(parameters, specs, strict=True)
    ]
    try:
        optimizer = factory(list(anchors))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"outer could not make an optimizer of the parameters: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"outer must return a torch.optim.Optimizer, got {type(optimizer).__name__}")
    own = {id(anchor) for anchor in anchors}
    if own != {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}:
        raise ConfigurationError("outer must make an optimizer of all parameters that it is given, and of no other")
    return None if exact and is_averaging(optimizer) else Outer(anchors, optimizer)


def _one_whole_step(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def is_averaging(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step from an anchor by the outer gradient always ends at the mean of the parameters."""
    return type(optimizer) is torch.optim.SGD and all(_is_plain(group) for group in optimizer.param_groups)


def _is_plain(group: dict[str, Any]) -> bool:
    lr = group["lr"]
    return (
        not isinstance(lr, torch.Tensor)
        and lr == 1.0
        and not (group["momentum"] or group["weight_decay"] or group["nesterov"] or group["maximize"])
    )
