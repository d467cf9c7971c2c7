"""Wide accumulation: gradients of bfloat16 and float16 parameters, accumulated and averaged in a wider dtype.

bfloat16 has eight bits of mantissa: the 256th micro-batch of equal size adds nothing to a sum of the other 255. With
``accumulation_dtype=torch.float32`` buckets are float32. During a window ``parameter.grad`` is float32 too, where
autograd adds to it without rounding; when the window is finished it holds the mean in the parameter's own dtype, for
the optimizer. A further backward continues from the wide mean, except where the narrow one was changed. float32 is
sent: add a ``Cast`` reduction to send less.
"""

import dataclasses
from collections.abc import Sequence

import torch

from gradsync.core.bucket.bucket import Bucket
from gradsync.core.bucket.layout import ParameterSpec

__all__ = ["NARROW", "PreciseGradients", "replace_gradient", "restore_gradients", "wide_dtype", "widened"]

NARROW = (torch.float16, torch.bfloat16)


class PreciseGradients:
    """Switches the dtype of gradients: ``dtype`` while they accumulate, the parameter's own for the optimizer."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.parameters = [parameter for parameter in parameters if parameter.dtype in NARROW]
        self.forget()

    def forget(self) -> None:
        """Forget the means: they are in use again, or buckets are about to go."""
        self._means: dict[int, torch.Tensor] = {}

    def widen(self) -> bool:
        """Make wide what autograd creates, or adds to, as a backward begins. True if a gradient was replaced."""
        replaced = False
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                parameter.grad_dtype = self.dtype
            elif gradient.dtype != self.dtype:
                wide = self._means.get(id(parameter))
                replace_gradient(parameter, gradient.to(self.dtype) if wide is None else _updated(wide, gradient))
                replaced = True
        self.forget()
        return replaced

    def narrow(self, buckets: Sequence[Bucket]) -> bool:
        """Hand the means to the optimizer in the parameters' own dtypes. True if a gradient was replaced."""
        self.forget()
        for bucket in buckets:
            copies: dict[torch.dtype, list[torch.Tensor]] = {}
            for slot, parameter in enumerate(bucket.parameters):
                if parameter.dtype not in NARROW or parameter.grad is None:
                    continue
                if parameter.dtype not in copies:
                    copies[parameter.dtype] = bucket.views_of(bucket.payload.to(parameter.dtype))
                replace_gradient(parameter, copies[parameter.dtype][slot])
                self._means[id(parameter)] = bucket.views[slot]
        return bool(self._means)

    def restore(self) -> bool:
        """Give gradients the dtype of their parameters again. True if one was replaced."""
        return restore_gradients(self.parameters)


def restore_gradients(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Give narrow parameters gradients of their own dtype. True if one was replaced."""
    replaced = False
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            parameter.grad_dtype = parameter.dtype
        elif gradient.dtype != parameter.dtype:
            replace_gradient(parameter, gradient.to(parameter.dtype))
            replaced = True
    return replaced


@torch.no_grad()
def _updated(wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
    """``wide``, with the numbers of ``narrow`` that are no longer what those in it are rounded to.

    Versions would not tell: who writes through ``grad.data`` leaves them as they are. Nor does this change that of
    ``wide``, by which the window knows its means.
    """
    torch.where(wide.to(narrow.dtype) == narrow, wide, narrow.to(wide.dtype), out=wide.data)
    return wide


def replace_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Give the parameter this gradient, whatever its dtype."""
    # torch refuses a gradient, or a change of its dtype, that does not fit what is there.
    parameter.grad = None
    parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient


def wide_dtype(dtype: torch.dtype, accumulation_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which gradients of parameters of this ``dtype`` accumulate and are averaged."""
    return dtype if accumulation_dtype is None or dtype not in NARROW else accumulation_dtype


def widened(specs: Sequence[ParameterSpec], dtype: torch.dtype | None) -> list[ParameterSpec]:
    """The specs of the gradients, where narrow ones accumulate in ``dtype``."""
    if dtype is None:
        return list(specs)
    return [dataclasses.replace(spec, dtype=dtype) if spec.dtype in NARROW else spec for spec in specs]
