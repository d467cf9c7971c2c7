"""Gradients of bfloat16 and float16 parameters, accumulated and averaged in a wider type.

bfloat16 has eight bits of mantissa: the 256th micro-batch of equal size adds nothing to a sum of the other 255. With
``accumulation_dtype=torch.float32`` buckets are float32; during a window ``parameter.grad`` is float32 too, where
autograd adds to it without rounding, and when the window is finished it holds the mean in the parameter's own dtype,
for the optimizer. The wire carries float32: add a ``Cast`` reduction to send less.
"""

import dataclasses
from collections.abc import Sequence

import torch

from gradsync.bucket.bucket import Bucket
from gradsync.bucket.layout import ParameterSpec
from gradsync.errors import ConfigurationError

__all__ = ["PreciseGradients", "checked_dtype", "widened"]

NARROW = (torch.float16, torch.bfloat16)


class PreciseGradients:
    """Exchanges the dtype of gradients: ``dtype`` while they accumulate, the parameter's own for the optimizer."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._narrow = [parameter for parameter in parameters if parameter.dtype in NARROW]

    def widen(self) -> None:
        """A backward begins: what autograd leaves, or adds to, is wide."""
        for parameter in self._narrow:
            gradient = parameter.grad
            if gradient is None:
                parameter.grad_dtype = self.dtype
            elif gradient.dtype != self.dtype:
                _exchange(parameter, gradient.to(self.dtype))

    def narrow(self, buckets: Sequence[Bucket]) -> None:
        """The means are there: hand them to the optimizer."""
        for bucket in buckets:
            copies: dict[torch.dtype, list[torch.Tensor]] = {}
            for slot, parameter in enumerate(bucket.parameters):
                if parameter.dtype not in NARROW or parameter.grad is None:
                    continue
                if parameter.dtype not in copies:
                    copies[parameter.dtype] = bucket.views_of(bucket.payload.to(parameter.dtype))
                _exchange(parameter, copies[parameter.dtype][slot])

    def restore(self) -> None:
        """Leave parameters as they were found."""
        for parameter in self._narrow:
            gradient = parameter.grad
            if gradient is None:
                parameter.grad_dtype = parameter.dtype
            elif gradient.dtype != parameter.dtype:
                _exchange(parameter, gradient.to(parameter.dtype))


def _exchange(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    # torch refuses a gradient, and a change of its dtype, that do not fit what is there.
    parameter.grad = None
    parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient


def checked_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in (torch.float32, torch.float64):
        raise ConfigurationError(
            f"accumulation_dtype must be torch.float32, torch.float64 or None (the parameters' own), got {dtype!r}"
        )


def widened(specs: Sequence[ParameterSpec], dtype: torch.dtype | None) -> list[ParameterSpec]:
    """The specs of the gradients, where narrow ones accumulate in ``dtype``."""
    if dtype is None:
        return list(specs)
    return [dataclasses.replace(spec, dtype=dtype) if spec.dtype in NARROW else spec for spec in specs]
