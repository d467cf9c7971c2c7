"""Mixed precision: autocast around the forward of prepared models, and a gradient scaler for float16."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn

from gradsync.accelerator.loss_scaler import LossScaler
from gradsync.accelerator.operations import map_tensors
from gradsync.errors import ConfigurationError

__all__ = ["Precision", "plain_forward"]

DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """What ``mixed_precision`` means on one device."""

    def __init__(
        self, name: str | None, device: torch.device, *, autocast: Mapping[str, Any], scaler: Mapping[str, Any]
    ) -> None:
        self.name = "no" if name is None else str(name)
        if self.name not in DTYPES:
            raise ConfigurationError(f"mixed_precision must be one of {', '.join(DTYPES)}, got {name!r}")
        self._device = device
        self._dtype = DTYPES[self.name]
        self._autocast = dict(autocast)
        # float16 alone has so small a range that gradients vanish unless losses are scaled up.
        self.scaler = LossScaler(device, scaler) if self.name == "fp16" else None

    def autocast(self) -> AbstractContextManager[None]:
        """Operations in here run in the lower precision where that is safe."""
        if self._dtype is None or not self._autocast.get("enabled", True):
            return nullcontext()
        return torch.autocast(self._device.type, **{"dtype": self._dtype, **self._autocast})

    def wrap_forward(self, model: nn.Module) -> None:
        """Run ``model.forward`` under autocast from now on; what it returns is float32."""
        if self._dtype is None or hasattr(model, "_gradsync_plain_forward"):
            return
        plain: Callable[..., Any] = model.forward

        @functools.wraps(plain)
        def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self.autocast():
                output = plain(*args, **kwargs)
            return map_tensors(_to_float32, output)

        model._gradsync_plain_forward = plain  # type: ignore[assignment]
        model.forward = MethodType(forward, model)


def plain_forward(model: nn.Module) -> nn.Module:
    """Take :meth:`Precision.wrap_forward` back."""
    if "_gradsync_plain_forward" in vars(model):
        del model._gradsync_plain_forward
        del model.forward
    return model


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
