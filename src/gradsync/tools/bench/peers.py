"""The wrappers compared: gradsync, its schedules, and those people use today, all with the same model and optimizer.

A :class:`Peer` wraps a model and returns a :class:`WrappedModel`, with the few things a training loop needs. After a
window every peer has the same gradient: the mean over ranks and micro-batches. Peers that are not part of torch are
imported on demand.
"""

import importlib
import importlib.util
import inspect
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.optim import Optimizer

from gradsync.communicator import Communicator
from gradsync.core.bucket.sizes import TUNED_AFTER
from gradsync.core.engine.observer import Observer
from gradsync.core.engine.policy import Schedule
from gradsync.core.reduction.auto import DECIDED_AFTER as REDUCTION_DECIDED_AFTER
from gradsync.optim.local_steps import LocalSteps
from gradsync.optim.sharded import OverlappedOptimizer, ShardedOptimizer
from gradsync.optim.sharded.mode import DECIDED_AFTER as MODE_DECIDED_AFTER
from gradsync.optim.sharded.mode import Mode
from gradsync.parallel.data_parallel import DistributedDataParallel

__all__ = [
    "ALONE",
    "AUTO",
    "DDP",
    "FSDP2",
    "OURS",
    "OVERLAPPED",
    "PEERS",
    "SHARDED",
    "STOCK",
    "TUNED",
    "ZERO",
    "Accelerate",
    "FSDP2Replicate",
    "Gradsync",
    "GradsyncLocal",
    "MakeOptimizer",
    "NoWrapper",
    "OuterSGD",
    "Peer",
    "TorchDDP",
    "TorchFT",
    "WrappedModel",
    "blocks_of",
    "torchft_manager",
    "tuned_options",
]

ALONE, STOCK, TUNED, OURS, AUTO = "no wrapper", "DDP stock", "DDP tuned", "gradsync", "auto"
SHARDED, OVERLAPPED, ZERO = "gradsync sharded", "gradsync overlapped", "DDP tuned + ZeRO"
TorchDDP = nn.parallel.DistributedDataParallel
# Made after wrapping: some peers put other parameters into the model.
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
# What is made of the way that ranks have gone by themselves, by DiLoCo's settings.
OuterSGD = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
POWER_RANK = 4
TORCHFT_TIMEOUT = timedelta(seconds=60)


@dataclass(kw_only=True)
class WrappedModel:
    """A model that synchronizes, and its optimizer, as the loop of its users handles them."""

    model: nn.Module
    optimizer: Any
    backward: Callable[[torch.Tensor], Any]
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    # Frames a micro-batch; gets whether it is the last of its window. None: this peer has no such thing.
    accumulate: Callable[[bool], AbstractContextManager[Any]] | None = None
    # In there, where it divides by the length of the window itself; None: as outside.
    framed_backward: Callable[[torch.Tensor], Any] | None = None
    # Waits for what a step has left under way.
    flush: Callable[[], object] = lambda: None


class Peer(ABC):
    """A way to synchronize. ``window`` is the number of micro-batches in a window, for those that must know it."""

    name: str
    # The module it comes from, if that may be missing.
    needs = ""
    # Windows until it has chosen what it was not told, and is as it will be for the rest of a training.
    windows_to_settle = 0

    def absent(self) -> str | None:
        """Why it cannot run here, or None."""
        if not self.needs or importlib.util.find_spec(self.needs) is not None:
            return None
        return "not in this torch" if self.needs.startswith("torch.") else "not installed"

    @abstractmethod
    def wrap(self, model: nn.Module, optimizer: MakeOptimizer, *, window: int = 1) -> WrappedModel: ...


@dataclass(frozen=True, kw_only=True)
class NoWrapper(Peer):
    """No synchronization: the time of the computation alone."""

    name: str = ALONE

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer, *, window: int = 1) -> WrappedModel:
        return _summing(model, optimizer, window, accumulate=lambda last: nullcontext())


@dataclass(frozen=True, kw_only=True)
class Gradsync(Peer):
    """gradsync's wrapper, with one of its schedules; ``communicator`` makes the one it takes, if not its own.

    With ``gathers`` its optimizer is sharded, of the class and the options of the one that others get, and works by
    that mode. With ``late_means`` every rank runs the whole optimizer, when means come behind the next forward.
    """

    name: str = OURS
    schedule: Schedule = "overlapped"
    bucket_mb: float | None = None
    observer: Observer | None = None
    communicator: Callable[[], Communicator] | None = None
    reduction: str | None = None
    gathers: Mode | None = None
    late_means: bool = False
    # Further ones of the wrapper.
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def windows_to_settle(self) -> int:  # type: ignore[override]
        """Until bucket sizes are chosen, and after them the reduction or the mode of the optimizer."""
        if self.bucket_mb is not None or self.schedule != "overlapped":
            return 0
        if self.reduction == AUTO:
            return REDUCTION_DECIDED_AFTER + 1
        return (MODE_DECIDED_AFTER if self.gathers == AUTO else TUNED_AFTER[-1]) + 1

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer, *, window: int = 1) -> WrappedModel:
        wrapper = DistributedDataParallel(
            model,
            bucket_cap_mb=self.bucket_mb,
            communicator=None if self.communicator is None else self.communicator(),
            schedule=self.schedule,
            observer=self.observer,
            reduction=self.reduction,
            **self.settings,
        )
        wrapped = _summing(
            wrapper,
            optimizer,
            window,
            no_sync=wrapper.no_sync,
            accumulate=lambda last: wrapper.accumulate(last=last),
            framed_backward=wrapper.backward,
        )
        if self.gathers is not None:
            wrapped.optimizer = ShardedOptimizer(wrapped.optimizer, wrapper, mode=self.gathers)
        elif self.late_means:
            wrapped.optimizer = OverlappedOptimizer(wrapped.optimizer, wrapper)
        wrapped.flush = getattr(wrapped.optimizer, "flush", wrapped.flush)
        return wrapped


@dataclass(frozen=True, kw_only=True)
class GradsyncLocal(Peer):
    """gradsync's local steps: every rank trains locally, and ``arguments`` of LocalSteps say how they are merged."""

    name: str = "gradsync local"
    arguments: Callable[[], Mapping[str, Any]]

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer, *, window: int = 1) -> WrappedModel:
        wrapped = NoWrapper().wrap(model, optimizer, window=window)
        local = LocalSteps(model, wrapped.optimizer, **self.arguments())
        # Nothing else holds it.
        wrapped.flush = local.synchronize
        return wrapped


@dataclass(frozen=True, kw_only=True)
class DDP(Peer):
    """torch's DistributedDataParallel, as it comes or with everything that makes it faster switched on.

    ``hook`` is one of its own that send fewer bytes. With ``shares_state`` its ZeroRedundancyOptimizer shares out the
    state; gradients and what is sent are the same.
    """

    name: str = STOCK
    tuned: bool = False
    bucket_mb: float | None = None
    hook: Literal["fp16", "powersgd"] | None = None
    shares_state: bool = False

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer, *, window: int = 1) -> WrappedModel:
        options: dict[str, Any] = tuned_options() if self.tuned else {}
        if self.bucket_mb is not None:
            options["bucket_cap_mb"] = self.bucket_mb
        wrapper: Any = TorchDDP(model, **options)
        if self.hook is not None:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=POWER_RANK, start_powerSGD_iter=2)
            hooks = {"fp16": (None, default_hooks.fp16_compress_hook), "powersgd": (state, powerSGD_hook.powerSGD_hook)}
            wrapper.register_comm_hook(*hooks[self.hook])
        wrapped = _summing(wrapper, optimizer, window, no_sync=wrapper.no_sync)
        if self.shares_state:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            common = {key: wrapped.optimizer.defaults[key] for key in ("lr", "foreach")}
            wrapped.optimizer = ZeroRedundancyOptimizer(
                model.parameters(), type(wrapped.optimizer), parameters_as_bucket_view=True, **common
            )
        return wrapped


@dataclass(frozen=True, kw_only=True)
class Accelerate(Peer):
    """Hugging Face Accelerate, which wraps torch's DistributedDataParallel."""

    name: str = "Accelerate"
    bucket_mb: float | None = None
    needs = "accelerate"

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer, *, window: int = 1) -> WrappedModel:
        accelerate: Any = importlib.import_module("accelerate")
        # Its counting of micro-batches is one for the whole process, so windows of other lengths need other processes.
        size = 25 if self.bucket_mb is None else self.bucket_mb
        options = accelerate.DistributedDataParallelKwargs(bucket_cap_mb=size)
        on_cpu = _device_of(model).type == "cpu"
        accelerator = accelerate.Accelerator(cpu=on_cpu, gradient_accumulation_steps=window, kwargs_handlers=[options])
        wrapper, prepared = accelerator.prepare(model, optimizer(model.parameters()))
        return WrappedModel(
            model=wrapper,
            optimizer=prepared,
            no_sync=lambda: accelerator.no_sync(wrapper),
            accumulate=lambda last: accelerator.accumulate(wrapper),
            backward=accelerator.backward,
        )


@dataclass(frozen=True, kw_only=True)
class Fabric(Peer):
    """Lightning Fabric's strategy ``ddp``."""

    name: str = "Lightning Fabric"
    needs = "lightning_fabric"

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer, *, window: int = 1) -> WrappedModel:
        lightning: Any = importlib.import_module("lightning_fabric")
        environments: Any = importlib.import_module("lightning_fabric.plugins.environments")
        here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        fabric = lightning.Fabric(
            accelerator=_device_of(model).type,
            strategy="ddp",
            devices=here,
            num_nodes=dist.get_world_size() // here,
            plugins=[environments.TorchElasticEnvironment()],
        )
        fabric.launch()
        wrapper, prepared = fabric.setup(model, optimizer(model.parameters()))

        return WrappedModel(
            model=wrapper,
            optimizer=prepared,
            no_sync=lambda: fabric.no_backward_sync(wrapper),
            accumulate=lambda last: fabric.no_backward_sync(wrapper, enabled=not last),
            backward=lambda loss: fabric.backward(loss / window),
        )


@dataclass(frozen=True, kw_only=True)
class FSDP2(Peer):
    """torch's ``fully_shard`` on every block, keeping parameters whole between forward and backward."""

    name: str = "FSDP2"
    needs = "torch.distributed.fsdp"

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer, *, window: int = 1) -> WrappedModel:
        from torch.distributed.fsdp import fully_shard

        sharded = _by_block(fully_shard, model, reshard_after_forward=False)
        return _summing(sharded, optimizer, window)


@dataclass(frozen=True, kw_only=True)
class FSDP2Replicate(Peer):
    """``replicate`` of torch's FSDP2: replicas without sharding, on FSDP's engine; every block a group of its own.

    It synchronizes a group from hooks on the forward of the modules in it. A container that has no forward is never
    called, so a group of it would never be synchronized, and nothing says so: what it contains goes into groups in its
    place.
    """

    name: str = "FSDP2 replicate"
    needs = "torch.distributed._composable.replicate_with_fsdp"

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer, *, window: int = 1) -> WrappedModel:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        replicated = _by_block(replicate, model, names=("replicate",))

        @contextmanager
        def no_sync() -> Iterator[None]:
            replicated.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                replicated.set_requires_gradient_sync(True)

        return _summing(replicated, optimizer, window, no_sync=no_sync)


@dataclass(frozen=True, kw_only=True)
class TorchFT(Peer):
    """torchft's DiLoCo, with its own lighthouse, managers and quorums: every rank is a replica group
    of its own, and all of them are needed for a quorum."""

    name: str = "torchft"
    every: int
    needs = "torchft"

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer, *, window: int = 1) -> WrappedModel:
        wrapped = NoWrapper().wrap(model, optimizer, window=window)
        local_sgd: Any = importlib.import_module("torchft.local_sgd")
        manager = _diloco_manager()
        diloco = local_sgd.DiLoCo(
            manager, [model], wrapped.optimizer, OuterSGD(model.parameters()), sync_every=self.every, pin_memory=False
        )
        diloco.__enter__()
        # It lives as long as the wrapped model.
        wrapped.flush = lambda: diloco and None
        return wrapped


def _diloco_manager() -> Any:
    coordination: Any = importlib.import_module("torchft.coordination")
    rank, ranks, here = dist.get_rank(), dist.get_world_size(), _own_address()
    lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=ranks) if rank == 0 else None
    address = [None if lighthouse is None else f"http://{here}:{urlsplit(lighthouse.address()).port}"]
    dist.broadcast_object_list(address)
    manager = torchft_manager(
        here,
        timeout=TORCHFT_TIMEOUT,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=ranks,
        use_async_quorum=False,
        lighthouse_addr=address[0],
        replica_id=f"rank{rank}",
        init_sync=False,
    )
    manager.belongings.append(lighthouse)
    return manager


def torchft_manager(host: str, *, timeout: timedelta, **options: Any) -> Any:
    """torchft's manager of a rank that is a replica group of its own, reached by others at ``host``."""
    torchft: Any = importlib.import_module("torchft")
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timeout),
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        hostname=host,
        **options,
    )
    # They end when nothing holds them.
    manager.belongings = [store]
    return manager


def _own_address() -> str:
    """The address by which other hosts reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        address: str = probe.getsockname()[0]
        return address


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def tuned_options() -> dict[str, Any]:
    """Everything that makes torch's wrapper faster, as far as this torch has it."""
    wanted = {"gradient_as_bucket_view": True, "batched_grad_copy": True}
    known = inspect.signature(TorchDDP).parameters
    return {key: value for key, value in wanted.items() if key in known}


def _summing(model: nn.Module, optimizer: MakeOptimizer, window: int, **others: Any) -> WrappedModel:
    """A peer that adds up micro-batches and leaves the mean to its users."""

    def backward(loss: torch.Tensor) -> None:
        (loss / window).backward()

    return WrappedModel(model=model, optimizer=optimizer(model.parameters()), backward=backward, **others)


def _by_block(apply: Callable[..., Any], model: nn.Module, names: tuple[str, ...] | None = None, **options: Any) -> Any:
    """A wrapper of FSDP2 on every block of the model, and on what is left of it."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(_device_of(model).type, (dist.get_world_size(),), mesh_dim_names=names)
    for group in blocks_of(model):
        apply(group, mesh=mesh, **options)
    return apply(model, mesh=mesh, **options)


def blocks_of(model: nn.Module) -> list[list[nn.Module]]:
    """What FSDP2 synchronizes together: the modules of every block, a child of the model or of a container in it."""
    blocks = [block for child in model.children() for block in ([child] if _is_called(child) else child.children())]
    groups = [[module for module in _called_in(block) if any(True for _ in module.parameters())] for block in blocks]
    return [group for group in groups if group]


def _called_in(module: nn.Module) -> list[nn.Module]:
    if _is_called(module):
        return [module]
    return [called for child in module.children() for called in _called_in(child)]


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


# By name, in the order in which tables show them.
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        NoWrapper(),
        Gradsync(name="naive", schedule="naive"),
        DDP(),
        DDP(name=TUNED, tuned=True),
        Accelerate(),
        Fabric(),
        FSDP2Replicate(),
        Gradsync(),
    )
}
