"""``GradsyncStrategy`` for Lightning's Trainer, and ``GradsyncFabricStrategy`` for Fabric.

Both are Lightning's DDP strategy with gradsync's wrapper instead of torch's. Launchers, process groups, precision,
checkpoints and accumulation are Lightning's. docs/lightning-tests.md lists the differences.

[Note: manual optimization] A Trainer runs ``training_step`` as the forward of the wrapper. In manual optimization
backwards and steps therefore run inside a forward. For torch's DDP, Lightning switches synchronization off until that
forward returns, and prepares torch's reducer before each backward. Here each backward decides whether it synchronizes.
The engine only needs to know the loss, which takes the place of an output of the forward.
"""

import inspect
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from gradsync.accelerator.optimizer import Overlap, Overlapping
from gradsync.base.errors import ConfigurationError, GradsyncError
from gradsync.core.engine.policy import SyncPolicy
from gradsync.parallel.data_parallel import DistributedDataParallel
from gradsync.tools.integrations.lightning.packages import class_for, package_in_use, register_when_imported

__all__ = ["GradsyncFabricStrategy", "GradsyncStrategy", "register_strategies"]

# Lightning's DDP strategy, which comes after these classes in the method resolution order.
_Base: Any = object


def register_strategies() -> None:
    """Register the strategies with every package of Lightning, now or when it is imported."""
    for kind in (GradsyncStrategy, GradsyncFabricStrategy):
        register_when_imported(kind, kind.modules, kind.registry)


class _Strategy(_Base):
    """What the two strategies have in common. An instance belongs to a subclass made for the package in use."""

    # The modules of strategies that Lightning's packages have, and the name of the registry in them.
    modules: ClassVar[tuple[str, ...]]
    registry: ClassVar[str]
    # The class as it is written, and the module of the package it was made for.
    made_for: ClassVar[tuple[type, str] | None] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Strategy":
        made: type = cls if cls.made_for is not None else class_for(cls, package_in_use(cls.modules))
        return object.__new__(made)

    def __init__(
        self, *args: Any, shard_optimizer: bool = False, overlap: Overlap | None = None, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self._overlapping = Overlapping(shards=shard_optimizer, overlap=overlap)
        _check(self._ddp_kwargs)
        self._models: list[weakref.ref[DistributedDataParallel]] = []

    def __reduce__(self) -> Any:
        # Launchers that spawn ranks pickle the strategy, and its class was made by a call.
        assert self.made_for is not None
        return _make, self.made_for, self.__getstate__()

    def _wrap(self, module: nn.Module, device_ids: list[int] | None) -> DistributedDataParallel:
        wrapped = DistributedDataParallel(module, device_ids=device_ids, **self._ddp_kwargs)
        self._models = [each for each in self._models if each() is not None] + [weakref.ref(wrapped)]
        return wrapped

    def _apply_overlap(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer, sharded or overlapped as it was asked for."""
        models = [each() for each in self._models]
        return self._overlapping.apply(optimizer, [each for each in models if each is not None])


class GradsyncStrategy(_Strategy):
    """The strategy ``"gradsync"`` of Lightning's ``Trainer``.

    Takes the arguments of Lightning's ``DDPStrategy``, those of :class:`gradsync.DistributedDataParallel` (such as
    ``reduction``, ``on_bad_step``, ``replica_check`` and ``policy``), and:

    shard_optimizer
        each rank updates its share of the parameters, and keeps that share of the optimizer's state.
    overlap
        as in :class:`gradsync.Accelerator`: ``"next-forward"`` or ``"auto"``.
    """

    # Of Lightning's class.
    model: Any
    optimizers: list[Any]

    modules = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")
    registry = "StrategyRegistry"

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return self._wrap(model, self.determine_ddp_device_ids())

    def _register_ddp_hooks(self) -> None:
        if self._ddp_comm_hook is not None:
            wrap = self._ddp_comm_wrapper or (lambda hook: hook)
            self.model.register_comm_hook(self._ddp_comm_state, wrap(self._ddp_comm_hook))

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self.optimizers = [self._apply_overlap(optimizer) for optimizer in self.optimizers]

    def pre_backward(self, closure_loss: Any) -> None:
        """Announce a backward inside the forward: see [Note: manual optimization]."""
        model = self.model
        if isinstance(model, DistributedDataParallel) and not self.lightning_module.automatic_optimization:
            model.synchronizer.end_forward(closure_loss)

    def teardown(self) -> None:
        """Give the module back, unwrapped. A sharded optimizer keeps its state, which may be saved after training."""
        model = self.model
        if isinstance(model, DistributedDataParallel):
            is_shared = model.synchronizer.bucket_client is not None
            # After an error parameters may never arrive, and the error is what the user has to see.
            with suppress(GradsyncError):
                model.synchronizer.detach()
                if is_shared:
                    # The step has used their memory for new parameters.
                    model.zero_grad()
            self.model = self.lightning_module
        super().teardown()


class GradsyncFabricStrategy(_Strategy):
    """The strategy ``"gradsync"`` of Lightning's ``Fabric``, with the arguments of :class:`GradsyncStrategy`."""

    modules = ("lightning.fabric.strategies", "lightning_fabric.strategies")
    registry = "STRATEGY_REGISTRY"

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._backward_sync_control = _BackwardSyncControl()

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        return self._wrap(module, self._determine_ddp_device_ids())

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return self._apply_overlap(super().setup_optimizer(optimizer))

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        state: dict[str, Any] = super().get_module_state_dict(_unwrapped(module))
        return state

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(_unwrapped(module), state_dict, strict)


class _BackwardSyncControl:
    """What Fabric's ``no_backward_sync`` asks."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            return nullcontext()
        if not isinstance(module, DistributedDataParallel):
            raise TypeError(
                "no_backward_sync() needs a module that fabric.setup() has wrapped in gradsync's "
                f"DistributedDataParallel, got {type(module).__name__}"
            )
        return module.no_sync()


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _make(kind: Any, module: str) -> Any:
    """An instance without a state, for one that was pickled."""
    return object.__new__(class_for(kind, module))


_TORCHS = frozenset(inspect.signature(DistributedDataParallel).parameters) - {"settings"}


def _check(options: dict[str, Any]) -> None:
    """Refuse unknown and wrong options at once, and not when a module is wrapped."""
    for name in ("module", "device_ids"):
        if name in options:
            raise ConfigurationError(f"{name} is chosen by Lightning: leave it out of the strategy's arguments")
    own: Any = {name: value for name, value in options.items() if name not in _TORCHS}
    SyncPolicy.chosen(options.get("policy"), own, wrapper="GradsyncStrategy")
