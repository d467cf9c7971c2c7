"""Mixed precision: autocast around the forward of prepared models, and one gradient scaler for float16.

Several optimizers may step in windows that end at different times, while torch's scaler expects all of them to step
before the scale changes, once. So the scale changes as late as possible: when another loss is scaled while no gradients
of the old scale exist, or when an optimizer is about to step a second time. In the latter case, windows that are still
accumulating are converted to the new scale.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from gradsync.accelerator.operations import map_tensors
from gradsync.base.errors import ConfigurationError
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.core.window.window import WindowState

__all__ = ["LossScaler", "Precision", "plain_forward"]

DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class LossScaler:
    """Scales losses up and gradients back down, so that small float16 gradients do not underflow."""

    def __init__(self, device: torch.device, options: Mapping[str, Any]) -> None:
        self.scaler = torch.amp.GradScaler(device.type, **options)
        # Those of all models that are trained with it.
        self.synchronizers: Callable[[], Iterable[Synchronizer]] = tuple
        self._stepped: set[int] = set()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, scaled."""
        if self._stepped and not self._accumulating():
            self._update()
        return self.scaler.scale(loss)

    def _accumulating(self) -> list[Synchronizer]:
        return [each for each in self.synchronizers() if each.window.state is WindowState.UNSYNCHRONIZED]

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo the scaling of the optimizer's gradients, unless that was done."""
        if self._is_used and self._stage(optimizer) == "READY":
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Step, unless gradients are not finite."""
        options = {} if closure is None else {"closure": closure}
        if not self._is_used:
            # No loss was ever scaled here.
            return optimizer.step(**options)
        if id(optimizer) in self._stepped:
            self._update()
        self._stepped.add(id(optimizer))
        return self.scaler.step(optimizer, **options)

    def settle(self) -> None:
        """After a step: let the scale grow or shrink at once, if no gradients of the old scale are around."""
        waiting = (WindowState.UNSYNCHRONIZED, WindowState.SYNCHRONIZED)
        if self._stepped and not any(each.window.state in waiting for each in self.synchronizers()):
            self._update()

    def state_dict(self) -> dict[str, Any]:
        if self._stepped:
            self._update()
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)

    @property
    def _is_used(self) -> bool:
        return self.scaler._scale is not None

    def _stage(self, optimizer: Optimizer) -> str:
        stage: str = self.scaler._per_optimizer_states[id(optimizer)]["stage"].name
        return stage

    @torch.no_grad()
    def _update(self) -> None:
        before = self.scaler._scale
        if before is None:
            return
        before = before.clone()
        self.scaler.update()
        self._stepped.clear()
        factor = cast(torch.Tensor, self.scaler._scale) / before
        for synchronizer in self._accumulating():
            for bucket in synchronizer.buckets:
                bucket.payload.mul_(factor)
            synchronizer.window.changed_by_engine()
        for synchronizer in self.synchronizers():
            synchronizer.rescaled(factor)


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

    def autocast(self, options: Mapping[str, Any] | None = None) -> AbstractContextManager[None]:
        """Operations in here run in the lower precision where that is safe; ``options`` replace those it has."""
        chosen = self._autocast if options is None else options
        # Inside an autocast that is on, options may turn it off.
        if self._dtype is None or (options is None and not chosen.get("enabled", True)):
            return nullcontext()
        return torch.autocast(self._device.type, **{"dtype": self._dtype, **chosen})

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
