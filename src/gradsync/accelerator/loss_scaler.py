"""One gradient scaler for several optimizers whose windows may end at different times.

torch's scaler wants every optimizer to step before the scale changes, once. Here each optimizer steps when its window
ends. So the scale changes as late as possible: when a further loss is scaled while no gradients of the old scale are
around, or when an optimizer wants to step a second time. In the latter case windows that are still accumulating are
brought to the new scale.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync.engine.synchronizer import Synchronizer
from gradsync.window.window import WindowState

__all__ = ["LossScaler"]


class LossScaler:
    """Scales losses up and gradients back down, so that small float16 gradients survive."""

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
        after: Any = self.scaler._scale
        for synchronizer in self._accumulating():
            for bucket in synchronizer.buckets:
                bucket.payload.mul_(after / before)
            synchronizer.window.changed_by_engine(synchronizer.buckets)
