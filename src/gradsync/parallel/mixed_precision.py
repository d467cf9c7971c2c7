"""Mixed precision: forward and backward run in low precision, parameters and gradients keep their own.

``DistributedDataParallel(mixed_precision=...)`` takes torch's configuration object. During forward and backward the
parameters hold low-precision copies; as soon as a bucket's gradients are complete its parameters get their own values
back. Gradients are accumulated in the parameters' precision, which torch's implementation does not do.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from gradsync.core.engine.backward_watch import tensors_in

__all__ = ["LowPrecision"]


class LowPrecision:
    """Swaps the values of parameters for low-precision copies and back."""

    def __init__(self, config: _MixedPrecision, module: nn.Module, ignored: set[str]) -> None:
        self.dtype = config.param_dtype
        self._parameters = [
            parameter
            for name, parameter in module.named_parameters()
            if name not in ignored and parameter.is_floating_point()
        ]
        self._masters: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        if config.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if name not in ignored and buffer.is_floating_point():
                    buffer.data = buffer.to(config.buffer_dtype)

    @classmethod
    def of(cls, config: _MixedPrecision | None, module: nn.Module, ignored: set[str]) -> Self | None:
        """The mixed precision that ``config`` asks for; None where nothing was asked for."""
        return None if config is None else cls(config, module, ignored)

    @torch.no_grad()
    def enter(self) -> None:
        """Replace parameters by narrow copies before a forward, by new ones each time: the optimizer has changed
        them."""
        if self.dtype is None:
            return
        for parameter in self._parameters:
            _, master = self._masters.setdefault(id(parameter), (parameter, parameter.data))
            parameter.data = master.to(self.dtype)

    @property
    def entered(self) -> bool:
        """Whether parameters hold low-precision copies."""
        return bool(self._masters)

    def resume(self) -> None:
        if not self.entered:
            self.enter()

    def release(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            kept = self._masters.pop(id(parameter), None)
            if kept is not None:
                parameter.data = kept[1]

    def release_all(self) -> None:
        self.release([parameter for parameter, _ in self._masters.values()])

    def value_of(self, parameter: nn.Parameter) -> torch.Tensor:
        kept = self._masters.get(id(parameter))
        return parameter.data if kept is None else kept[1]

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast floating-point inputs to the precision of the computation."""
        if self.dtype is None or not any(tensor.is_floating_point() for tensor in tensors_in((args, kwargs))):
            return args, kwargs

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

        cast_args, cast_kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
        return cast_args, cast_kwargs
