"""A prepared optimizer: call ``step`` and ``zero_grad`` in every micro-batch; they take effect at the window's end."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.optim import Optimizer

from gradsync.accelerator.model_windows import ModelWindows
from gradsync.accelerator.precision import LossScaler
from gradsync.core.engine.synchronizer import Synchronizer, synchronizer_of
from gradsync.optim.sharded import ShardedOptimizer

__all__ = ["PreparedOptimizer"]


def _inner(name: str, *default: Any) -> Any:
    """An attribute or a method of the inner optimizer, to read and to write."""
    return property(
        lambda self: getattr(self.optimizer, name, *default), lambda self, value: setattr(self.optimizer, name, value)
    )


class PreparedOptimizer(Optimizer):
    """Forwards everything to the optimizer it was made from.

    ``step()`` does nothing before the window's last micro-batch. ``zero_grad()`` does nothing while a window has
    gradients that are not averaged yet, so a loop may call it at its beginning, at its end, or both.
    """

    def __init__(self, optimizer: Optimizer, windows: ModelWindows, scaler: LossScaler | None = None) -> None:
        # Not Optimizer.__init__: groups and state are those of the inner optimizer, and so are its hooks.
        self.optimizer = optimizer
        # What others may know it by.
        self.originals: list[Optimizer] = [optimizer]
        self.scaler = scaler
        self.step_was_skipped = False
        self._windows: ModelWindows | None = windows
        self._stepped_inside = False
        if scaler is not None:
            optimizer.register_step_post_hook(self._note_step)

    def __repr__(self) -> str:
        return f"Prepared{self.optimizer!r}"

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no windows any more: it steps whenever it is told to."""
        return {"optimizer": self.optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizer = state["optimizer"]
        self.originals = [self.optimizer]
        self.scaler = self._windows = None
        self.step_was_skipped = self._stepped_inside = False

    @property
    def synchronizers(self) -> list[Synchronizer]:
        """Those that average the gradients of the optimizer's parameters."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        found = {id(each): each for each in map(synchronizer_of, parameters) if each is not None}
        return list(found.values())

    @property
    def window_ends(self) -> bool:
        """Whether the optimizer may step in this micro-batch."""
        return self._windows is None or self._windows.end_for(self.synchronizers)

    def shared_state(self) -> Any:
        """:meth:`state_dict`, on rank 0; elsewhere None where the state is shared out. Collective."""
        if not isinstance(self.optimizer, ShardedOptimizer):
            return self.optimizer.state_dict()
        self.optimizer.consolidate(to=0)
        return self.optimizer.state_dict() if self.optimizer.has_state else None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, if the window ends with this micro-batch."""
        if not self.window_ends:
            return None
        with self._stepping():
            if self.scaler is not None:
                return self._scaled_step(self.scaler, closure)
            result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self.step_was_skipped = self._was_vetoed
        return result

    @property
    def _was_vetoed(self) -> bool:
        """Whether the step that has just run changed nothing, because ranks have agreed on that."""
        return any(synchronizer.window.step_was_skipped for synchronizer in self.synchronizers)

    def _stepping(self) -> AbstractContextManager[None]:
        return nullcontext() if self._windows is None else self._windows.local.stepping(self.synchronizers)

    def _scaled_step(self, scaler: LossScaler, closure: Callable[[], Any] | None) -> Any:
        self._stepped_inside = False
        for synchronizer in self.synchronizers:
            # Unscaling reads gradients before the step does: a rank without a backward must take part first.
            synchronizer.finish_last()
        result = scaler.step(self.optimizer, closure)
        self.step_was_skipped = not self._stepped_inside or self._was_vetoed
        if not self._stepped_inside:
            for synchronizer in self.synchronizers:
                synchronizer.window.close()
        scaler.settle()
        return result

    def _note_step(self, *_: Any) -> None:
        self._stepped_inside = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless they are still being accumulated."""
        if self._windows is None or self._windows.may_zero(self.synchronizers):
            self.optimizer.zero_grad(set_to_none=set_to_none)

    # Optimizer's own methods would look at groups and state of this object, which has none.

    param_groups = _inner("param_groups")
    state = _inner("state")
    defaults = _inner("defaults")
    state_dict = _inner("state_dict")
    load_state_dict = _inner("load_state_dict")
    add_param_group = _inner("add_param_group")
    # Optimizers without a schedule have two modes; to the others these say nothing.
    train = _inner("train", lambda: None)
    eval = _inner("eval", lambda: None)
