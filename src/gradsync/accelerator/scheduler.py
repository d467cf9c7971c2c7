"""A prepared learning-rate scheduler: it may be stepped in every micro-batch, and moves once a window."""

from collections.abc import Sequence
from typing import Any

from gradsync.accelerator.optimizer import PreparedOptimizer

__all__ = ["PreparedScheduler"]


class PreparedScheduler:
    """Passes everything on to the scheduler it was made from; ``step()`` follows the optimizers.

    It does nothing before the window's last micro-batch, nor when a scaler has skipped the optimizer's step.
    ``steps_per_window`` is 1; Accelerate's is the number of processes.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        *,
        follows_optimizer: bool = True,
        steps_per_window: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._follows_optimizer = follows_optimizer
        self._steps_per_window = steps_per_window

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move on, if the optimizers did."""
        if not self._follows_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if any(optimizer.step_was_skipped or not optimizer.window_ends for optimizer in self.optimizers):
            return
        for _ in range(self._steps_per_window):
            if self._beyond_the_end():
                return
            self.scheduler.step(*args, **kwargs)

    def _beyond_the_end(self) -> bool:
        """Whether a schedule of fixed length is through: several steps a window may overshoot its end."""
        total = getattr(self.scheduler, "total_steps", None)
        return self._steps_per_window > 1 and total is not None and self.scheduler._step_count > total
