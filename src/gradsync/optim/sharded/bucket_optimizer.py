"""What optimizers that live in the buckets of an engine have in common: they move in, step there, and move out.

Between two backwards such an optimizer has the mean of this rank's share of every bucket, and the buckets' memory
(:mod:`gradsync.core.engine.sharing`). What it makes of them is its own affair: see
:mod:`gradsync.optim.sharded.optimizer` and :mod:`gradsync.optim.sharded.overlapped`.
"""

import inspect
import itertools
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, overload

import torch
from torch import nn

from gradsync.base.errors import ConfigurationError, MisuseError
from gradsync.communicator import Communicator
from gradsync.core.bucket import Bucket, BucketCaps
from gradsync.core.bucket.shared_gradient import SharedGradient
from gradsync.core.bucket.tuner import SMALLEST_BUCKET, BucketTuner
from gradsync.core.engine.phase import Phase
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.core.reduction import Cast, Mean, Reduction, ScatteredMean
from gradsync.optim.sharded.gather import AwaitedParameter, await_before_forward
from gradsync.optim.sharded.mode import ChosenMode, Mode, check_mode
from gradsync.optim.sharded.options import Options
from gradsync.optim.sharded.sharded_checkpoint import indexed
from gradsync.optim.sharded.share import is_narrow
from gradsync.parallel.replica import Replica

__all__ = ["BucketOptimizer", "Synchronized", "constructor_options", "trained_parameters"]

# Buckets at least, where the wire works by itself: a forward should not wait long for parameters that it does not need.
PIECES = 11
# What such buckets are when they are not tried one by one.
PIECES_AT_ONCE = 16


class Synchronized(Protocol):
    """A model whose gradients are synchronized: a DistributedDataParallel, or what synchronize_gradients returns."""

    @property
    def synchronizer(self) -> Synchronizer: ...

    @property
    def replica(self) -> Replica: ...


class BucketOptimizer(torch.optim.Optimizer):
    """An optimizer of ``groups`` of parameters of ``model`` that lives in the buckets of its engine, or, where ``mode``
    says plain, beside them."""

    _is_ready = False
    _is_closed = False
    # What reduce-scatters take.
    _wire: Communicator

    def __init__(self, model: Synchronized, groups: Options, defaults: dict[str, Any], mode: Mode) -> None:
        check_mode(mode)
        self.mode = mode
        self._synchronizer = _synchronizer_of(model)
        super().__init__(groups, defaults)
        self._check_parameters(self.param_groups)
        self._steps = 0
        # The optimizers that others may still hold in the place of this one.
        self._stands_for: list[torch.optim.Optimizer] = []
        self._plain_caps: BucketCaps | None = None
        self._prepare()
        self._move_in()
        await_before_forward(model.replica.module)
        self._is_ready = True

    # -- what the several kinds do ---------------------------------------------------------------------------------

    @abstractmethod
    def _prepare(self) -> None:
        """Called once, before it moves in."""

    @abstractmethod
    def _scattered(self, dtype: torch.dtype | None) -> ScatteredMean:
        """What is put on the wire for it; gradients cross it in ``dtype``, if there is one."""

    @abstractmethod
    def _update(self) -> None:
        """Use the means. Everything of the step before has arrived."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until all parameters are the new ones."""

    @abstractmethod
    def _settle(self) -> None:
        """State and parameters are wanted as the last step left them."""

    @abstractmethod
    def received(self) -> None:
        """The means are there: :class:`~gradsync.core.engine.sharing.BucketClient`."""

    @abstractmethod
    def leave(self) -> None:
        """The buckets are wanted for gradients: :class:`~gradsync.core.engine.sharing.BucketClient`."""

    @abstractmethod
    def move_out(self) -> None:
        """Buckets are about to go: :class:`~gradsync.core.engine.sharing.BucketClient`."""

    @abstractmethod
    def moved(self, buckets: Sequence[Bucket]) -> None:
        """Buckets were laid out anew: :class:`~gradsync.core.engine.sharing.BucketClient`. Collective."""

    # -- in the buckets of the engine ------------------------------------------------------------------------------

    def _check_parameters(self, groups: Sequence[dict[str, Any]]) -> None:
        known = {id(parameter) for parameter in self._synchronizer.parameters}
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise ConfigurationError(
                        f"a parameter of shape {tuple(parameter.shape)} in group {number} does not belong to the "
                        "model, so its gradient is not averaged. Pass parameters of the model that was wrapped"
                    )
                # An interrupt may have left it announced by a step that never began.
                if type(parameter) not in (nn.Parameter, AwaitedParameter):
                    raise ConfigurationError(
                        f"{type(self).__name__} needs plain parameters, got one of type {type(parameter).__name__}"
                    )

    def _move_in(self) -> None:
        engine = self._synchronizer.engine
        if engine.sharing.client is not None:
            raise ConfigurationError(
                "another sharded optimizer has this model's parameters. One optimizer takes several parameter groups: "
                "pass them as params; or close() the other one"
            )
        narrow = any(is_narrow(p, bucket) for bucket in engine.buckets for p in bucket.parameters)
        self._reduction_before = self._synchronizer.reduction
        reduction = self._reduction(needs_shares=narrow)
        # Alone there is nobody to share with: steps are plain, if that is precise enough.
        in_buckets = reduction is not None and (engine.communicator.world_size > 1 or narrow)
        self.lives_in_buckets = False
        engine.sharing.client = self
        if reduction is None or not in_buckets:
            return
        if reduction.scatters and self._tuner is not None:
            self._tuner.fewest = PIECES
        try:
            self._synchronizer.reduce_with(reduction)
        except BaseException:
            engine.sharing.client = None
            raise
        self.lives_in_buckets = True

    def _reduction(self, *, needs_shares: bool) -> Reduction | None:
        """What to put on the wire in this mode; None if that stays as it is."""
        if self.mode == "plain":
            return None
        before = self._reduction_before
        if not isinstance(before, Mean | Cast | ScatteredMean):
            raise ConfigurationError(
                f"{type(self).__name__} needs means, or shares of them, and {before!r} sends something else. Wrap the "
                "model without it"
            )
        scattered = self._scattered(None if isinstance(before, Mean) else before.dtype)
        # Narrow parameters have their precise copies in shares, and nowhere else.
        if self.mode == "next-forward" or needs_shares:
            return scattered
        # Hooks of parameters hold the reduction. They must not hold the optimizer, whose engine removes them.
        return ChosenMode(self.whole, scattered, partial(type(self)._mode_changed, weakref.proxy(self)))

    @property
    def whole(self) -> Reduction:
        """What the model takes without this optimizer: :class:`~gradsync.core.engine.sharing.BucketClient`."""
        before = self._reduction_before
        return before.whole if isinstance(before, ScatteredMean) else before

    @property
    def choice(self) -> ChosenMode | None:
        """With ``mode="auto"``: what was chosen, and why, once that is settled."""
        reduction = self._synchronizer.reduction
        return reduction if isinstance(reduction, ChosenMode) else None

    def _mode_changed(self, scatters: bool) -> None:
        """Buckets are about to be laid out for shares, or for whole means again."""
        arrangement = self._synchronizer.engine.arrangement
        if not scatters:
            arrangement.caps = arrangement.caps if self._plain_caps is None else self._plain_caps
            return
        self._plain_caps = caps = arrangement.caps
        total = sum(plan.numel * plan.dtype.itemsize for plan in arrangement.layout.buckets)
        # Sizes that somebody has asked for stay; and those that no wire works on by itself.
        if self._tuner is not None and caps.from_the_end and max(caps.caps) > total // PIECES:
            cap = max(total // PIECES_AT_ONCE, SMALLEST_BUCKET)
            arrangement.caps = BucketCaps.tapered(cap, least=SMALLEST_BUCKET)

    @property
    def _tuner(self) -> BucketTuner | None:
        return self._synchronizer.engine.options.tuner

    @property
    def _scatters(self) -> bool:
        """Whether each rank has shares of the means, and not the whole."""
        return self._synchronizer.reduction.scatters

    # -- the step --------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update parameters, and send what others need on its way. Collective, as every step of such a model is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_open()
        if self._synchronizer.engine.phase is Phase.DETACHED:
            raise MisuseError(
                "the engine that this optimizer shares out was detached from the model, or the model was given another "
                "process group. Make the optimizer anew, and load the state of this one"
            )
        if self._synchronizer.engine.switches.steps_locally and self._scatters:
            raise MisuseError(
                "a sharded optimizer cannot take local steps: every rank has the means of its own share only. Use a "
                "plain optimizer for them"
            )
        self.flush()
        # Before the update, of which an interrupt may not wait for the end.
        self._steps += 1
        self._update()
        for optimizer in self._stands_for:
            # Which schedulers look for.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    @contextmanager
    def told_to_others(self) -> Iterator[None]:
        """What raises in here raises on this rank alone, and the others go on: they must not wait for it."""
        try:
            yield
        except BaseException as error:
            wires = {self._wire, self._synchronizer.engine.communicator} if self._scatters else ()
            for wire in wires:
                wire.abort(f"its optimizer raised {type(error).__name__}: {error}")
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also of parameters that are in no group: of those, too, each rank has its share only."""
        given = {id(parameter) for parameter in indexed(self.param_groups)}
        for parameter in self._synchronizer.parameters:
            if id(parameter) not in given and isinstance(parameter.grad, SharedGradient):
                parameter.grad = None
        if set_to_none:
            _drop_gradients(indexed(self.param_groups))
        else:
            super().zero_grad(set_to_none=False)

    def _all_options(self) -> Options:
        return [self._group_options(number) for number in range(len(self.param_groups))]

    def _group_options(self, number: int) -> dict[str, Any]:
        return {key: value for key, value in self.param_groups[number].items() if key != "params"}

    # -- groups, and the end ---------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._is_closed:
            raise MisuseError("this optimizer was closed: its model's gradients are another's. Make an optimizer anew")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take further parameters of the model. All ranks must do so alike."""
        if not self._is_ready:
            super().add_param_group(param_group)
            return
        self._require_open()
        self._settle()
        given = param_group["params"]
        param_group = {**param_group, "params": [given] if isinstance(given, torch.Tensor) else list(given)}
        self._check_parameters([param_group])
        super().add_param_group(param_group)
        self._take_group(self.param_groups[-1])

    @abstractmethod
    def _take_group(self, group: dict[str, Any]) -> None:
        """A further group was added."""

    def __getstate__(self) -> dict[str, Any]:
        raise MisuseError(
            "a sharded optimizer cannot be copied or pickled: it belongs to the ranks of its model. Save its "
            "state_dict(), and load that into another"
        )

    def close(self) -> None:
        """Give the buckets back: gradients are whole means again, for an optimizer of any kind. On all ranks alike.

        Save the state before, if another optimizer is to go on with it.
        """
        if self._is_closed:
            return
        self._settle()
        if self._scatters and any(p.grad is not None for p in indexed(self.param_groups)):
            raise MisuseError(
                "a sharded optimizer was to be closed while gradients are there, of which every rank has its share "
                "only. Call step() and zero_grad() before close()"
            )
        self._is_closed = True
        self._synchronizer.engine.sharing.client = None
        if self.lives_in_buckets:
            if self._tuner is not None:
                self._tuner.fewest = 1
            self._synchronizer.reduce_with(self._reduction_before)


def constructor_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer like this one is made with, beside its parameters."""
    accepted = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in accepted}


def trained_parameters(model: Synchronized) -> list[nn.Parameter]:
    """What an optimizer takes that is given nothing else."""
    return [parameter for parameter in _synchronizer_of(model).parameters if parameter.requires_grad]


def _drop_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Parameters that are awaited would be asked about each of them. So their class is switched off, in one go: no code
    in Python runs meanwhile, and no signal handler, which may read parameters."""
    setting = map(torch.Tensor.grad.__set__, parameters, itertools.repeat(None))  # type: ignore[union-attr]
    torch._C._disabled_torch_function_impl(deque, (), (setting, 0), {})


def _synchronizer_of(model: Any) -> Synchronizer:
    synchronizer = getattr(model, "synchronizer", None)
    if not isinstance(synchronizer, Synchronizer):
        raise ConfigurationError(
            "this optimizer needs a model whose gradients gradsync averages: a DistributedDataParallel, or what "
            f"synchronize_gradients(model) returned; got {type(model).__name__}"
        )
    return synchronizer
