"""A module as one data-parallel replica: which parameters the engine manages, compared and synchronized over ranks."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from gradsync.base.errors import ConfigurationError, MisuseError
from gradsync.communicator import Communicator
from gradsync.communicator.agreement import require_agreement
from gradsync.communicator.device_stage import DeviceClock
from gradsync.core.bucket.layout import BucketCaps, ParameterSpec
from gradsync.core.bucket.precise import widened
from gradsync.core.bucket.sizes import BucketTuner, auto_caps
from gradsync.core.engine.policy import ParameterSwapper, SynchronizerOptions, SyncPolicy
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.core.reduction.measurement import measure_link
from gradsync.health.watch import set_watch, watch_model
from gradsync.observe.recording.attach import attach_recorder, choose_recorder, described, recorder_in
from gradsync.observe.recording.recorder import Recorder

__all__ = ["BATCH_BYTES", "MIB", "Replica", "agree_on_rank", "broadcast_tensors", "in_batches"]

T = TypeVar("T")

MIB = 1024 * 1024

# Where ranks must not communicate at set-up (init_sync=False) nothing can be measured; this is torch's own size.
UNMEASURED_CAP = 25 * MIB

# In a world of one nothing is sent, so there is nothing to hide: few buckets mean the least work.
LONE_CAP = 100 * MIB


class Replica:
    """The managed parameters and buffers of ``module``. Ignored names are left alone, delayed ones come last."""

    def __init__(self, module: nn.Module, *, ignored: set[str] | None = None, delayed: set[str] | None = None) -> None:
        self.module = module
        self.ignored = ignored or set()
        sparse = _sparse_parameters(module)
        named = [(name, p) for name, p in module.named_parameters() if name not in self.ignored]
        _check(module, named)
        self.parameters = [parameter for _, parameter in named]
        self.specs = [
            ParameterSpec.of(name, parameter, sparse=id(parameter) in sparse, delayed=name in (delayed or ()))
            for name, parameter in named
        ]
        self._places: list[tuple[nn.Module, str, str]] | None = None
        self._added: list[str] = []
        # Created at the first connect, and kept when the replica switches communicators.
        self.recorder: Recorder | None = None
        _watch_registrations(self, module)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The current buffers: modules may replace them."""
        current = (owner._buffers.get(name) for owner, name, _ in self._buffer_places)
        return list({id(buffer): buffer for buffer in current if buffer is not None}.values())

    @property
    def named_buffers(self) -> dict[str, torch.Tensor]:
        """The current buffers, each by its first name."""
        current = [(path, owner._buffers.get(name)) for owner, name, path in self._buffer_places]
        first = {id(buffer): path for path, buffer in reversed(current)}
        return {path: buffer for path, buffer in current if buffer is not None and first[id(buffer)] == path}

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def connect(
        self,
        communicator: Communicator,
        policy: SyncPolicy,
        *,
        init_sync: bool = True,
        sync_buffers: bool = True,
        swapper: ParameterSwapper | None = None,
    ) -> Synchronizer:
        """Compare with the other ranks, take rank 0's values, and attach the engine. Collective with init_sync."""
        if self.recorder is None or recorder_in(policy.observer) is not None:
            self.recorder = choose_recorder(policy.observer, self.device)
        if init_sync:
            require_agreement(communicator, "the wrapped module", self._described(policy))
            self._require_devices(communicator, sync_buffers)
            states = [*self.parameters, *(self.buffers if sync_buffers else [])]
            broadcast_tensors(states, communicator)
            set_watch(communicator)
        caps, tuner = self._caps(communicator, policy, init_sync)
        options = SynchronizerOptions(
            communicator=communicator,
            caps=caps,
            tuner=tuner,
            policy=policy,
            swapper=swapper,
            droppable=any(getattr(layer, "announces_absence", False) for layer in self.module.modules()),
            recorder=None if recorder_in(policy.observer) is not None else self.recorder,
        )
        synchronizer = Synchronizer(self.parameters, widened(self.specs, policy.accumulation_dtype), options)
        watch_model(synchronizer, communicator)
        attach_recorder(self.recorder, synchronizer, type(self.module).__name__, communicator, meets=init_sync)
        return synchronizer

    def _require_devices(self, communicator: Communicator, sync_buffers: bool) -> None:
        """Refuse what is on the CPU where ranks only exchange tensors on another device, as over NCCL."""
        if communicator.device.type == "cpu" or communicator.world_size == 1:
            return
        states = {spec.name: parameter for spec, parameter in zip(self.specs, self.parameters, strict=True)}
        buffers = self.named_buffers if sync_buffers else {}
        on_cpu = [f"parameter {name!r}" for name, each in states.items() if each.device.type == "cpu"]
        on_cpu += [f"buffer {name!r}" for name, each in buffers.items() if each.device.type == "cpu"]
        if on_cpu:
            found = f"{on_cpu[0]} is" if len(on_cpu) == 1 else f"{on_cpu[0]} and {len(on_cpu) - 1} more are"
            raise ConfigurationError(
                f"{found} on the CPU, but {communicator} exchanges only tensors on {communicator.device.type}. Move "
                "the whole module with module.to(device) before wrapping it, or initialize the process group with "
                'backend "cpu:gloo,cuda:nccl"'
            )

    def watch(self, wrapper: nn.Module) -> None:
        """Refuse parameters that are added to ``wrapper`` itself, too: they are not part of the module."""
        _watched.setdefault(wrapper, []).append(weakref.ref(self))

    def require_unchanged(self) -> None:
        """Raise if parameters were registered since wrapping: the engine does not know them."""
        if self._added:
            raise MisuseError(
                f"parameter {self._added[0]!r} was added to the module after it was wrapped, so its gradient would "
                "differ on every rank. Add parameters first and wrap (and make the optimizer) afterwards"
            )

    def _caps(
        self, communicator: Communicator, policy: SyncPolicy, measure: bool
    ) -> tuple[BucketCaps, BucketTuner | None]:
        """Bucket sizes, and the tuner that may change them: only measured sizes are tuned."""
        if policy.schedule == "naive":
            return BucketCaps.one_parameter_each(), None
        if policy.sizes is not None:
            return BucketCaps(caps=tuple(max(1, int(size * MIB)) for size in policy.sizes)), None
        if communicator.world_size == 1:
            return BucketCaps.uniform(LONE_CAP), None
        if not measure:
            return BucketCaps.uniform(UNMEASURED_CAP), None
        cost = measure_link(communicator, self.device)
        caps = auto_caps(cost, sum(spec.nbytes for spec in self.specs))
        tunable = cost.overlaps and self.device.type in ("cpu", "cuda") and policy.schedule == "overlapped"
        return caps, self._make_tuner() if tunable else None

    def _make_tuner(self) -> BucketTuner:
        if self.device.type == "cpu":
            return BucketTuner()
        clock = DeviceClock(self.device)
        return BucketTuner(clock, clock.seconds)

    def _described(self, policy: SyncPolicy) -> list[tuple[str, Any]]:
        return [*self.described_parameters, *policy.described(), *described(self.recorder)]

    @property
    def described_parameters(self) -> list[tuple[str, Any]]:
        """What two replicas must have in common, per parameter. Devices may differ."""
        return [
            (
                f"parameter {number} ({spec.name})",
                {
                    "shape": list(spec.shape),
                    "dtype": str(spec.dtype),
                    "stride": list(spec.stride),
                    "requires_grad": parameter.requires_grad,
                    "sparse": spec.sparse,
                    "delayed": spec.delayed,
                },
            )
            for number, (spec, parameter) in enumerate(zip(self.specs, self.parameters, strict=True))
        ]

    def note_registration(self, owner: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Note that ``owner`` is about to register ``parameter``; the name may be a path through a child module."""
        known = not parameter.requires_grad or any(parameter is each for each in self.parameters)
        if not known and not self._ignores(owner, name):
            self._added.append(f"{type(owner).__name__}.{name}")

    def note_module(self) -> None:
        """Forget where buffers are: a module was replaced by a different one, with buffers of its own."""
        self._places = None

    def _ignores(self, owner: nn.Module, name: str) -> bool:
        """Whether the name is to be ignored, whatever it refers to."""
        if not self.ignored:
            return False
        paths = [path for path, part in self.module.named_modules(remove_duplicate=False) if part is owner]
        return any((f"{path}.{name}" if path else name) in self.ignored for path in paths)

    @property
    def _buffer_places(self) -> list[tuple[nn.Module, str, str]]:
        """Owners of the managed buffers, with the short and the full name. Walking a large module takes longer than
        many a forward, so it is done once."""
        if self._places is None:
            named = [
                (owner, name, f"{path}.{name}" if path else name)
                for path, owner in self.module.named_modules()
                for name in owner._buffers
            ]
            self._places = [each for each in named if each[2] not in self.ignored]
        return self._places


def _check(module: nn.Module, named: list[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigurationError(
                f"parameter {name!r} is not initialized yet. Run a forward of the lazy module before you wrap it"
            )
        if parameter.device.type == "meta":
            raise ConfigurationError(
                f"parameter {name!r} is on the meta device, which holds no values. Move the module to a real device "
                "(module.to_empty(device=...)) and initialize it before you wrap it"
            )
    if not any(parameter.requires_grad for _, parameter in named):
        raise ConfigurationError(
            f"{type(module).__name__} has no parameter that requires a gradient, so there is nothing to synchronize. "
            "Use the module itself, or unfreeze a parameter before you wrap it"
        )
    kinds = sorted({parameter.device.type for _, parameter in named})
    if len(kinds) > 1:
        examples = {p.device.type: name for name, p in reversed(named)}
        raise ConfigurationError(
            "all parameters must be on one type of device, got "
            + ", ".join(f"{kind} ({examples[kind]!r})" for kind in kinds)
            + ". Move the whole module before you wrap it"
        )


def _sparse_parameters(module: nn.Module) -> set[int]:
    return {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }


# -- parameters added after wrapping ------------------------------------------------------------------------------

_watched: "weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Replica]]]" = weakref.WeakKeyDictionary()
_installed = False


def _watch_registrations(replica: Replica, module: nn.Module) -> None:
    global _installed
    if not _installed:
        register_module_parameter_registration_hook(_on_parameter)
        register_module_module_registration_hook(_on_module)
        _installed = True
    for child in module.modules():
        _watched.setdefault(child, []).append(weakref.ref(replica))


def _replicas_with(module: nn.Module) -> list[Replica]:
    # A module that only the compiler makes, such as a slice of a list of blocks.
    if torch.compiler.is_compiling():
        return []
    return [replica for reference in _watched.get(module, ()) if (replica := reference()) is not None]


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    for replica in _replicas_with(module):
        if parameter is not None:
            replica.note_registration(module, name, parameter)


def _on_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    for replica in _replicas_with(module):
        if child is not None:
            for path, parameter in child.named_parameters():
                replica.note_registration(module, f"{name}.{path}", parameter)
            replica.note_module()
            _watch_registrations(replica, child)


# -- broadcast, coalesced by dtype and device ---------------------------------------------------------------------

# At most this much is copied at a time: a model must not need room for a second copy of itself, and an allocator may
# keep for a long time whatever it was once asked for.
BATCH_BYTES = 8 * 1024 * 1024


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], communicator: Communicator, source: int = 0) -> None:
    """Overwrite the tensors with those of rank ``source``. Collective."""
    if communicator.world_size == 1:
        return
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            alike[(tensor.dtype, tensor.device)].append(tensor.detach())
    for group in alike.values():
        for batch in in_batches(group, lambda tensor: tensor.nbytes):
            _broadcast_batch(batch, communicator, source)


def in_batches(each_of: Iterable[T], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Lists of as many in a row as have at most :data:`BATCH_BYTES` together; what is larger comes alone."""
    batch: list[T] = []
    size = 0
    for each in each_of:
        if batch and size + nbytes(each) > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += nbytes(each)
    if batch:
        yield batch


def _broadcast_batch(tensors: list[torch.Tensor], communicator: Communicator, source: int) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        communicator.broadcast(_bytes_of(tensors[0]), source).wait()
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    communicator.broadcast(_bytes_of(flat), source).wait()
    if communicator.rank != source:
        for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(values.view(tensor.shape))
    # Gloo's threads hold the tensor until their next collective; its memory need not wait that long.
    # A tensor whose memory was exposed, as numpy() does, cannot be resized.
    storage = flat.untyped_storage()
    if storage.resizable():
        storage.resize_(0)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: values are copied, not computed with, and every backend supports bytes (not all, bool)."""
    return tensor.reshape(-1).view(torch.uint8)


def agree_on_rank(communicator: Communicator, *, candidate: bool) -> int:
    """The highest rank among the candidates. Collective."""
    rank = torch.tensor([communicator.rank if candidate else -1], device=communicator.device)
    communicator.all_reduce(rank, "max").wait()
    return int(rank)
