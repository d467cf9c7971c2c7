"""The backward that runs: which one it is, and whether it has left a gradient."""

import torch

from gradsync.core.engine.backward_watch import NO_TASK, current_task
from gradsync.core.engine.gradient_store import GradientStore
from gradsync.core.engine.keeper import ParameterKeeper
from gradsync.core.engine.phase import Phase, Phases

__all__ = ["RunningBackward"]


class RunningBackward:
    """The backward of one engine that runs, if one does. It sets the phase where it begins and ends."""

    def __init__(self, store: GradientStore, phases: Phases, keeper: ParameterKeeper | None) -> None:
        self._arrangement, self._hooks = store.arrangement, store.hooks
        self.phases, self._keeper = phases, keeper
        self._task = NO_TASK
        # What no hook will tell of, as it was before.
        self._unbucketed: list[tuple[torch.Tensor, int]] = []

    def begin(self) -> None:
        """It is the one from whose graph task this is called. As far as is known its gradients stay here."""
        self.phases.enter(Phase.LOCAL)
        self._task = current_task()
        if self._keeper is not None:
            self._keeper.resume()
        self._hooks.arrivals.clear()
        self._unbucketed = self._arrangement.unbucketed()

    def stop(self) -> None:
        """It computes nothing any more, or there was none and something was synchronized without."""
        if self._keeper is not None:
            self._keeper.release_all()
        self._task = NO_TASK

    def end(self, phase: Phase) -> None:
        """It has ended or failed."""
        self.stop()
        # A hook may have detached the engine in the middle of it.
        if self.phases.now is not Phase.DETACHED:
            self.phases.enter(phase)

    @property
    def computes(self) -> bool:
        """Whether there is one: this rank is computing gradients."""
        return self._task != NO_TASK

    @property
    def is_here(self) -> bool:
        """Whether it is the one from whose graph task this is asked."""
        return self._task == current_task()

    @property
    def has_arrived(self) -> bool:
        """Whether it has left a gradient. To be asked when it ends."""
        if self._hooks.arrivals or (not self._hooks.counting and self._arrangement.has_gradients()):
            return True
        before, now = self._unbucketed, self._arrangement.unbucketed()
        return len(now) != len(before) or any(
            mine is not old or version != seen for (mine, version), (old, seen) in zip(now, before, strict=True)
        )
