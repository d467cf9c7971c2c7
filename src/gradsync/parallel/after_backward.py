"""Actions that run after a backward through a wrapped model, before ``backward()`` returns.

Buffer hooks may return futures that must be done by then. Optimizers that torch's ``_apply_optimizer_in_backward`` has
attached to parameters must step on the means; torch steps them bucket by bucket, here all of them step when the last
bucket has finished.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsync.core.engine.backward_watch import call_at_end, tensors_in
from gradsync.core.engine.synchronizer import Synchronizer

__all__ = ["InBackwardOptimizers", "call_after_backward"]


def call_after_backward(output: Any, action: Callable[[], None]) -> None:
    """Call ``action`` when a backward through ``output`` has ended: after the engine, if the engine registered first.

    A backward that reaches several tensors of the output calls it several times.
    """

    def hook(_: torch.Tensor) -> None:
        call_at_end(action)

    for tensor in tensors_in(output):
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(hook)


class InBackwardOptimizers:
    """Optimizers that step their parameters as part of backward."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map as handles

        self._parameters = parameters
        # Their own hooks would step on this rank's gradients alone.
        for parameter in parameters:
            for handle in handles.get(parameter, ()):
                handle.remove()

    @classmethod
    def of(cls, parameters: Sequence[Any]) -> "InBackwardOptimizers | None":
        """The optimizers attached to these parameters; None if there are none."""
        stepped = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
        return cls(stepped) if stepped else None

    def step(self, synchronizer: Synchronizer) -> None:
        """Step on the means, if the backward has left any, then release them."""
        if not synchronizer.window.has_means:
            return
        for parameter in self._parameters:
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:
                    optimizer.step()
                parameter.grad = None
