"""Gradient operations of an Accelerator between backward and step: unscaling and clipping."""

from typing import Any

import torch
from torch import nn

from gradsync.accelerator.model_windows import ModelWindows
from gradsync.accelerator.optimizer import PreparedOptimizer
from gradsync.accelerator.precision import Precision
from gradsync.accelerator.state_saving import Prepared
from gradsync.parallel.clipping import clip_grad_norm_, clip_grad_value_, require_means_of, synchronizers_of

__all__ = ["Gradients"]


class Gradients:
    """The gradients of an Accelerator's models when a window has ended; in local SGD, the gradients of this process."""

    precision: Precision
    prepared: Prepared
    windows: ModelWindows

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo the scaling of float16 training, before gradients are read."""
        scaler = self.precision.scaler
        if scaler is None:
            return
        named = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        for each in self.prepared.optimizers if optimizer is None else named:
            if isinstance(each, PreparedOptimizer):
                if not self.windows.local.includes(each.synchronizers):
                    require_means_of(each.synchronizers)
                each = each.optimizer
            scaler.unscale(each)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the averaged gradients so that their norm is at most ``max_norm``; returns the norm before."""
        listed = self._unscaled(parameters)
        if self.windows.local.includes(synchronizers_of(listed)):
            return nn.utils.clip_grad_norm_(listed, max_norm, norm_type)
        return clip_grad_norm_(listed, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Limit every element of the averaged gradients to ±``clip_value``."""
        listed = self._unscaled(parameters)
        if self.windows.local.includes(synchronizers_of(listed)):
            nn.utils.clip_grad_value_(listed, clip_value)
        else:
            clip_grad_value_(listed, clip_value)

    def _unscaled(self, parameters: Any) -> list[torch.Tensor]:
        """``parameters``, and of all optimizers only theirs unscaled: another one's window may be unfinished."""
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        meant = {id(parameter) for parameter in listed}
        for optimizer in self.prepared.optimizers:
            if any(id(parameter) in meant for group in optimizer.param_groups for parameter in group["params"]):
                self.unscale_gradients(optimizer)
        return listed

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step did not take place: the scaler found gradients that are not finite, or ranks agreed to
        skip the window."""
        return any(optimizer.step_was_skipped for optimizer in self.prepared.optimizers)
