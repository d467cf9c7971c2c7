"""Base class of optimizers that use the engine's buckets between two backwards: attach, step and detach.

Between two backwards such an optimizer has the mean of this rank's share of every bucket, and the buckets' memory
(:mod:`gradsync.core.engine.gradient_store`). What it does with them is defined in
:mod:`gradsync.optim.sharded.optimizer` and :mod:`gradsync.optim.sharded.overlapped`.
"""

import itertools
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args, overload

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradsync.base.errors import ConfigurationError, MisuseError
from gradsync.communicator import Handle, scattering_over
from gradsync.core.bucket import Bucket, BucketCaps
from gradsync.core.bucket.sizes import SMALLEST_BUCKET
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.core.reduction import Cast, Mean, Reduction, ScatteredMean
from gradsync.core.reduction.shared_gradient import SharedGradient
from gradsync.optim.sharded.compiled_regions import await_before_regions
from gradsync.optim.sharded.gather import AwaitedParameter, Gathers, await_before_forward
from gradsync.optim.sharded.mode import ChosenMode, Mode
from gradsync.optim.sharded.share import is_narrow
from gradsync.optim.sharded.states import indexed
from gradsync.parallel.accumulation import Accumulation

__all__ = ["BucketOptimizer", "Options", "refuse_original", "require_optimizer"]

# One entry per parameter group.
Options = list[dict[str, Any]]

# Minimum number of buckets on an asynchronous transport: a forward should not wait for parameters it does not need.
MIN_BUCKETS = 11
# How many buckets there are at first, before any size has been tried.
INITIAL_BUCKETS = 16


class BucketOptimizer(torch.optim.Optimizer):
    """An optimizer of ``groups`` of ``model``'s parameters that uses the engine's buckets between two backwards, unless
    its ``mode`` is plain."""

    _is_ready = False
    _is_closed = False

    def __init__(self, model: Accumulation, groups: Options, defaults: dict[str, Any], mode: Mode) -> None:
        if mode not in get_args(Mode):
            raise ConfigurationError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
        self.mode = mode
        self._synchronizer = _synchronizer_in(model)
        super().__init__(groups, defaults)
        self._check_parameters(self.param_groups)
        self._steps = 0
        # The optimizers that this one replaces, and the hooks that refuse further use of them.
        self._originals: list[torch.optim.Optimizer] = []
        self._guards: list[RemovableHandle] = []
        self._plain_caps: BucketCaps | None = None
        device = self._synchronizer.parameters[0].device
        self._scatter_communicator = scattering_over(self._synchronizer.communicator, device)
        self._gathers = Gathers(device)
        self._attach()
        await_before_forward(model.replica.module)
        self._is_ready = True

    def _guard_originals(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Refuse to step or save the originals: their state is here now, so both would silently do nothing useful."""
        for optimizer in optimizers:
            self._originals.append(optimizer)
            self._guards.append(optimizer.register_step_pre_hook(refuse_original))
            self._guards.append(optimizer.register_state_dict_pre_hook(refuse_original))
            self._guards.append(optimizer.register_load_state_dict_pre_hook(refuse_original))

    # -- what the subclasses do ------------------------------------------------------------------------------------

    @abstractmethod
    def _update(self) -> None:
        """Update parameters with the means. Everything from the previous step has arrived."""

    @abstractmethod
    def _take_group(self, group: dict[str, Any]) -> None:
        """Take over a further group that was added."""

    @abstractmethod
    def release_buckets(self) -> None:
        """See :class:`~gradsync.core.engine.gradient_store.BucketClient`."""

    @abstractmethod
    def buckets_rebuilt(self, buckets: Sequence[Bucket]) -> None:
        """See :class:`~gradsync.core.engine.gradient_store.BucketClient`. Collective."""

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

    def _attach(self) -> None:
        synchronizer = self._synchronizer
        if synchronizer.bucket_client is not None:
            raise ConfigurationError(
                "another sharded optimizer has this model's parameters. Give all parameter groups to one optimizer, or "
                "close() the other one"
            )
        narrow = any(is_narrow(p, bucket) for bucket in synchronizer.buckets for p in bucket.parameters)
        self._reduction_before = synchronizer.reduction
        reduction = self._reduction(needs_shares=narrow)
        # A single rank has nothing to share: steps are plain, if that is precise enough.
        in_buckets = reduction is not None and (synchronizer.communicator.world_size > 1 or narrow)
        self.uses_buckets = False
        synchronizer.bucket_client = self
        if reduction is None or not in_buckets:
            return
        if reduction.scatters and synchronizer.tuner is not None:
            synchronizer.tuner.fewest = MIN_BUCKETS
        try:
            synchronizer.reduce_with(reduction)
        except BaseException:
            synchronizer.bucket_client = None
            raise
        self.uses_buckets = True

    def _reduction(self, *, needs_shares: bool) -> Reduction | None:
        """The reduction to use in this mode; None if it stays as it is."""
        if self.mode == "plain":
            return None
        before = self._reduction_before
        if not isinstance(before, Mean | Cast | ScatteredMean):
            raise ConfigurationError(
                f"{type(self).__name__} needs means, or shares of them, and {before!r} sends something else. Wrap the "
                "model without it"
            )
        scattered = ScatteredMean(None if isinstance(before, Mean) else before.dtype, self._scatter_communicator)
        # The precise copies of narrow parameters exist in shares only.
        if self.mode == "next-forward" or needs_shares:
            return scattered
        # Parameter hooks hold the reduction. They must not hold the optimizer, whose engine removes them.
        return ChosenMode(self.whole, scattered, partial(type(self)._mode_changed, weakref.proxy(self)))

    def flush(self) -> None:
        """Wait until all parameters have their new values: the buckets are free for gradients then."""
        self._gathers.finish()

    def before_forward(self, module: nn.Module, *, is_compiled: bool) -> None:
        """Have compiled code find ordinary parameters: :class:`~gradsync.core.engine.gradient_store.BucketClient`."""
        if is_compiled:
            self.flush()
        else:
            await_before_regions(module)

    @property
    def whole(self) -> Reduction:
        """What the model uses without this optimizer: :class:`~gradsync.core.engine.gradient_store.BucketClient`."""
        before = self._reduction_before
        return before.whole if isinstance(before, ScatteredMean) else before

    @property
    def choice(self) -> ChosenMode | None:
        """The choice that ``mode="auto"`` makes, and why, once that is decided; None in other modes."""
        reduction = self._synchronizer.reduction
        return reduction if isinstance(reduction, ChosenMode) else None

    def _mode_changed(self, scatters: bool) -> None:
        """Set bucket sizes when buckets are about to be rebuilt for shares, or for whole means again."""
        synchronizer = self._synchronizer
        if not scatters:
            if self._plain_caps is not None:
                synchronizer.caps = self._plain_caps
            return
        self._plain_caps = caps = synchronizer.caps
        total = sum(plan.numel * plan.dtype.itemsize for plan in synchronizer.layout.buckets)
        # Sizes that were requested stay; and so do those on transports that are not asynchronous.
        if synchronizer.tuner is not None and caps.from_the_end and max(caps.caps) > total // MIN_BUCKETS:
            cap = max(total // INITIAL_BUCKETS, SMALLEST_BUCKET)
            synchronizer.caps = BucketCaps.tapered(cap, least=SMALLEST_BUCKET)

    @property
    def _scatters(self) -> bool:
        """Whether each rank has shares of the means instead of the whole."""
        return self._synchronizer.reduction.scatters

    def _start_gather(self, bucket: Bucket, gathered: torch.Tensor, own: torch.Tensor) -> Handle:
        """Have all ranks gather what belongs to this bucket."""
        handle = self._synchronizer.communicator.all_gather(gathered, own)
        observer = self._synchronizer.observer
        if observer is not None:
            observer.gather_started(bucket, handle)
        return handle

    def _await_gather(self, bucket: Bucket, handle: Handle) -> None:
        observer = self._synchronizer.observer
        if observer is not None:
            observer.gather_needed(bucket)
        handle.wait()
        if observer is not None:
            observer.gather_arrived(bucket)

    # -- the step --------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update parameters, and start sending what others need. Collective, like every step of such a model."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_open()
        if self._synchronizer.is_detached:
            raise MisuseError(
                "the engine that this optimizer shares out was detached from the model, or the model was given another "
                "process group. Make a new optimizer, and load the state of this one"
            )
        if self._synchronizer.steps_locally and self._scatters:
            raise MisuseError(
                "a sharded optimizer cannot take local steps: every rank has the means of its own share only. Use a "
                "plain optimizer for them"
            )
        self.flush()
        # Before the update, because an interrupt may not wait for its end.
        self._steps += 1
        self._update()
        for optimizer in self._originals:
            # Schedulers look for this.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    @contextmanager
    def _aborting_on_error(self) -> Iterator[None]:
        """Abort the communicators after an error inside, which this rank alone raises: the others must not wait."""
        try:
            yield
        except BaseException as error:
            in_use = {self._scatter_communicator, self._synchronizer.communicator} if self._scatters else ()
            for communicator in in_use:
                communicator.abort(f"its optimizer raised {type(error).__name__}: {error}")
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, even of parameters that are in no group: each rank has only its share of those, too."""
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

    def _load_options(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take the options of saved groups, which are like these."""
        for group, options in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})

    def _group_options(self, number: int) -> dict[str, Any]:
        return {key: value for key, value in self.param_groups[number].items() if key != "params"}

    # -- groups, and the end ---------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._is_closed:
            raise MisuseError("this optimizer was closed: its model's gradients are another's. Make a new optimizer")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add further parameters of the model. All ranks must do the same."""
        if not self._is_ready:
            super().add_param_group(param_group)
            return
        self._require_open()
        self.flush()
        given = param_group["params"]
        param_group = {**param_group, "params": [given] if isinstance(given, torch.Tensor) else list(given)}
        self._check_parameters([param_group])
        super().add_param_group(param_group)
        self._take_group(self.param_groups[-1])

    def __getstate__(self) -> dict[str, Any]:
        raise MisuseError(
            "a sharded optimizer cannot be copied or pickled: it belongs to the ranks of its model. Save its "
            "state_dict(), and load that into another"
        )

    def close(self) -> None:
        """Give the buckets back: gradients are whole means again, for any kind of optimizer. Call it on all ranks.

        Save the state first, if another optimizer is to continue with it.
        """
        if self._is_closed:
            return
        self.flush()
        if self._scatters and any(p.grad is not None for p in indexed(self.param_groups)):
            raise MisuseError(
                "a sharded optimizer was to be closed while gradients are there, of which every rank has its share "
                "only. Call step() and zero_grad() before close()"
            )
        self._is_closed = True
        self._synchronizer.bucket_client = None
        if self.uses_buckets:
            if self._synchronizer.tuner is not None:
                self._synchronizer.tuner.fewest = 1
            self._synchronizer.reduce_with(self._reduction_before)


def _drop_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Awaited parameters would each be asked before access. So their class is switched off, all in one call: no Python
    code runs meanwhile, and so no signal handler, which may read parameters."""
    setting = map(torch.Tensor.grad.__set__, parameters, itertools.repeat(None))  # type: ignore[union-attr]
    torch._C._disabled_torch_function_impl(deque, (), (setting, 0), {})


def refuse_original(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    raise MisuseError(
        f"this {type(optimizer).__name__} was given to a sharded or overlapped optimizer, which has its state. Step, "
        "save and load that one instead"
    )


def require_optimizer(optimizer: Any, taker: str) -> None:
    """Raise unless ``optimizer``, the first argument of the class ``taker``, is a plain optimizer."""
    if isinstance(optimizer, BucketOptimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} works in the buckets already. {taker} takes plain optimizers"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        got = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
        raise ConfigurationError(
            f"{taker} takes an optimizer of the model's parameters, and the model, got {got} as the optimizer. Write "
            f"{taker}(torch.optim.AdamW(model.parameters()), model)"
        )


def _synchronizer_in(model: Any) -> Synchronizer:
    """The synchronizer of a model that was wrapped, or of an attachment."""
    synchronizer = getattr(model, "synchronizer", None)
    if not isinstance(synchronizer, Synchronizer):
        raise ConfigurationError(
            "this optimizer needs a model whose gradients gradsync averages: a DistributedDataParallel, or what "
            f"synchronize_gradients(model) returned; got {type(model).__name__}"
        )
    return synchronizer
