"""Prepared optimizers and schedulers: call them in every micro-batch; they take effect at the end of a window."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn
from torch.optim import Optimizer

from gradsync.accelerator.models import LossScaler
from gradsync.accelerator.windows import ModelWindows
from gradsync.base.errors import ConfigurationError
from gradsync.core.engine.synchronizer import Synchronizer, synchronizer_of
from gradsync.optim.local_steps import LocalSteps, local_steps_by_name
from gradsync.optim.sharded import OverlappedOptimizer, ShardedOptimizer
from gradsync.optim.sharded.bucket_optimizer import BucketOptimizer
from gradsync.optim.sharded.mode import Mode
from gradsync.parallel.accumulation import Accumulation

__all__ = ["Overlap", "Overlapping", "PreparedOptimizer", "PreparedScheduler", "take_local_steps"]

# What communication overlaps with: backward alone, the next forward too, or whatever is faster.
Overlap = Literal["backward", "next-forward", "auto"]


@dataclass(frozen=True, kw_only=True)
class Overlapping:
    """The settings ``shard_optimizer`` and ``overlap`` of an accelerator."""

    shards: bool = False
    overlap: Overlap | None = None

    def __post_init__(self) -> None:
        if self.overlap is not None and self.overlap not in get_args(Overlap):
            raise ConfigurationError(f"overlap must be one of {', '.join(get_args(Overlap))}, got {self.overlap!r}")
        if self.shards and self.overlap == "backward":
            raise ConfigurationError(
                "shard_optimizer=True and overlap='backward' exclude each other: new parameters of a sharded optimizer "
                "are gathered behind the next forward. Leave one of them out"
            )

    def refuse_local_steps(self, given: object) -> None:
        """Refuse what shares out the optimizer's state, or waits for means."""
        if self.shards or self.overlap not in (None, "backward"):
            asked = "shard_optimizer=True" if self.shards else f"overlap={self.overlap!r}"
            raise ConfigurationError(
                f"local_steps={given!r} and {asked} exclude each other: a rank that steps locally has no means to wait "
                "for, and needs the whole state of the optimizer. Leave one of them out"
            )

    def apply(self, optimizer: Optimizer, models: Sequence[Accumulation]) -> Optimizer:
        """The ``optimizer`` of one of ``models``, sharded or overlapped as it was asked for."""
        mode: Mode = "auto" if self.overlap == "auto" else "next-forward"
        if isinstance(optimizer, BucketOptimizer) or not (self.shards or self.overlap in ("next-forward", "auto")):
            return optimizer
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owners = [each for each in models if not trained.isdisjoint(map(id, each.synchronizer.parameters))]
        if len(owners) != 1:
            asked = "shard_optimizer=True" if self.shards else f"overlap={self.overlap!r}"
            raise ConfigurationError(
                f"{asked} needs an optimizer of one prepared model, and this one has parameters of {len(owners)}. "
                "Prepare model and optimizer together, and give every model its own optimizer"
            )
        if self.shards:
            return ShardedOptimizer(optimizer, owners[0], mode=mode)
        return OverlappedOptimizer(optimizer, owners[0], mode=mode)


def take_local_steps(
    given: str | Mapping[str, Any],
    optimizer: "PreparedOptimizer",
    models: Sequence[nn.Module],
    before: Sequence[LocalSteps],
) -> LocalSteps:
    """Let the ``optimizer`` of one of the prepared ``models`` take local steps: by name, or by their arguments."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners = [each for each in models if not trained.isdisjoint(map(id, each.parameters()))]
    if len(owners) != 1 or any(each.trains(owners[0]) for each in before):
        found = f"one of {len(owners)} models" if len(owners) != 1 else "a second one of its model"
        raise ConfigurationError(
            f"local_steps={given!r} needs one optimizer of one prepared model, and this is {found}. Prepare model and "
            "optimizer together; for several optimizers of one model, create LocalSteps(model, optimizers, …) yourself"
        )
    return LocalSteps(owners[0], optimizer, **(local_steps_by_name(given) if isinstance(given, str) else given))


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
        """A copy has no windows any more: it steps at every call."""
        return {"optimizer": self.optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizer = state["optimizer"]
        self.originals = [self.optimizer]
        self.scaler = self._windows = None
        self.step_was_skipped = self._stepped_inside = False

    @property
    def synchronizers(self) -> list[Synchronizer]:
        """The synchronizers that average the gradients of the optimizer's parameters."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        found = {id(each): each for each in map(synchronizer_of, parameters) if each is not None}
        return list(found.values())

    @property
    def window_ends(self) -> bool:
        """Whether the optimizer may step in this micro-batch."""
        return self._windows is None or self._windows.end_for(self.synchronizers)

    def shared_state(self) -> Any:
        """The :meth:`state_dict`, on rank 0; elsewhere None where the state is shared out. Collective."""
        if not isinstance(self.optimizer, ShardedOptimizer):
            return self.optimizer.state_dict()
        self.optimizer.consolidate(to=0)
        return self.optimizer.state_dict() if self.optimizer.has_state else None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, if the window ends with this micro-batch."""
        if not self.window_ends:
            return None
        with nullcontext() if self._windows is None else self._windows.local.stepping(self.synchronizers):
            if self.scaler is not None:
                return self._scaled_step(self.scaler, closure)
            result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self.step_was_skipped = self._was_rejected
        return result

    @property
    def _was_rejected(self) -> bool:
        """Whether the step that has just run changed nothing, because ranks have agreed on that."""
        return any(synchronizer.window.step_was_skipped for synchronizer in self.synchronizers)

    def _scaled_step(self, scaler: LossScaler, closure: Callable[[], Any] | None) -> Any:
        self._stepped_inside = False
        for synchronizer in self.synchronizers:
            # Unscaling reads gradients before the step does: a rank without a backward must take part first.
            synchronizer.pending_work.finish_window()
        result = scaler.step(self.optimizer, closure)
        self.step_was_skipped = not self._stepped_inside or self._was_rejected
        if not self._stepped_inside:
            for synchronizer in self.synchronizers:
                synchronizer.window.optimizer_stepped()
        scaler.finalize()
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


class PreparedScheduler:
    """Forwards everything to the scheduler it was made from; ``step()`` follows the optimizers.

    It does nothing before the window's last micro-batch, or when a scaler or a skip vote has skipped the optimizer's
    step.

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

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, if the optimizers stepped."""
        if not self._follows_optimizer or (self._window_ends and self._several is None):
            self.scheduler.step(*args, **kwargs)
        elif self._window_ends:
            total = getattr(self.scheduler, "total_steps", None)
            for _ in range(self._several or 0):
                # Several steps per window may overshoot the end of a schedule of fixed length.
                if total is None or self.scheduler._step_count <= total:
                    self.scheduler.step(*args, **kwargs)

    @property
    def _window_ends(self) -> bool:
        if not self.optimizers:
            return self._windows is None or self._windows.end_for([])
        return all(optimizer.window_ends and not optimizer.step_was_skipped for optimizer in self.optimizers)
