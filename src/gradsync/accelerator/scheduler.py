"""A prepared learning-rate scheduler: call it in every micro-batch; it moves when the optimizers have stepped."""

from collections.abc import Sequence
from typing import Any

from gradsync.accelerator.model_windows import ModelWindows
from gradsync.accelerator.optimizer import PreparedOptimizer

__all__ = ["PreparedScheduler"]


class PreparedScheduler:
    """Forwards everything to the scheduler it was made from; ``step()`` follows the optimizers.

    It does nothing before the window's last micro-batch, or when a scaler or a veto has skipped the optimizer's step.

    ``several`` is how far it moves then. Scripts write a schedule for one process, and with N processes it has to
    advance N times as fast. So Accelerate moves it ``num_processes`` times per window, and stops at the end of a
    schedule that knows its length. ``None`` is one step per window, for schedules that count windows.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        windows: ModelWindows,
        *,
        follows_optimizer: bool = True,
        several: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._windows: ModelWindows | None = windows
        self._follows_optimizer = follows_optimizer
        self._several = several

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no windows any more: it moves whenever its optimizers may step."""
        return {**self.__dict__, "_windows": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, if the optimizers stepped."""
        if not self._follows_optimizer or (self._window_ends and self._several is None):
            self.scheduler.step(*args, **kwargs)
        elif self._window_ends:
            for _ in range(self._several or 0):
                if not self._beyond_the_end:
                    self.scheduler.step(*args, **kwargs)

    @property
    def _window_ends(self) -> bool:
        if not self.optimizers:
            return self._windows is None or self._windows.end_for([])
        return all(optimizer.window_ends and not optimizer.step_was_skipped for optimizer in self.optimizers)

    @property
    def _beyond_the_end(self) -> bool:
        """Whether a schedule of fixed length is finished: several steps per window may overshoot its end."""
        total = getattr(self.scheduler, "total_steps", None)
        return total is not None and self.scheduler._step_count > total
