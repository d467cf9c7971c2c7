"""The running backward: its identity, and whether it has left a gradient."""

import torch

from gradsync.core.engine.backward_watch import NO_TASK, current_task
from gradsync.core.engine.gradient_store import GradientStore
from gradsync.core.engine.keeper import ParameterKeeper
from gradsync.core.engine.phase import Phase, Phases

__all__ = ["RunningBackward"]


class RunningBackward:
    """The running backward of one engine, if any. It sets the phase when a backward begins and ends."""

    def __init__(self, store: GradientStore, phases: Phases, keeper: ParameterKeeper | None) -> None:
        self._arrangement, self._hooks = store.arrangement, store.hooks
        self.phases, self._keeper = phases, keeper
        self._task = NO_TASK
        # The state before of gradients that no hook reports.
        self._unbucketed: list[tuple[torch.Tensor, int]] = []

    def begin(self) -> None:
        """Start the backward whose graph task calls this. As far as is known, its gradients stay local."""
        self.phases.enter(Phase.LOCAL)
        self._task = current_task()
        if self._keeper is not None:
            self._keeper.resume()
        self._hooks.arrivals.clear()
        self._unbucketed = self._arrangement.unbucketed()

    def stop(self) -> None:
        """The backward computes nothing any more, or something was synchronized without one."""
        if self._keeper is not None:
            self._keeper.release_all()
        self._task = NO_TASK

    def end(self, phase: Phase) -> None:
        """The backward has ended or failed."""
        self.stop()
        # A hook may have detached the engine in the middle of it.
        if self.phases.now is not Phase.DETACHED:
            self.phases.enter(phase)

    @property
    def computes(self) -> bool:
        """Whether a backward is running: this rank is computing gradients."""
        return self._task != NO_TASK

    @property
    def is_here(self) -> bool:
        """Whether the caller is in the graph task of this backward."""
        return self._task == current_task()

    @property
    def has_arrived(self) -> bool:
        """Whether it has left a gradient. Valid only when it ends."""
        if self._hooks.arrivals or (not self._hooks.counting and self._arrangement.has_gradients()):
            return True
        before, now = self._unbucketed, self._arrangement.unbucketed()
        return len(now) != len(before) or any(
            mine is not old or version != seen for (mine, version), (old, seen) in zip(now, before, strict=True)
        )
