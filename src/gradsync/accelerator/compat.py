"""What an Accelerator offers under Accelerate's names besides training: collectives, uneven inputs, trackers, and
attributes that scripts and libraries look up.

``log_with`` takes Accelerate's trackers (TensorBoard, wandb, …), which need the ``accelerate`` package. Its objects ask
its ``PartialState``, one per process, which rank this is. By itself it would read a launcher's variables and might
create a process group; so :func:`register_accelerator` sets it. That also serves ``accelerate.logging.get_logger`` and
any other part of Accelerate that a script keeps using.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable

from gradsync.accelerator import operations
from gradsync.accelerator.saving import Prepared
from gradsync.accelerator.settings import ABSENT_ATTRIBUTES, AbsentError, DataLoaderConfiguration, ProjectConfiguration
from gradsync.accelerator.windows import GradientState, ModelWindows
from gradsync.accelerator.world import DistributedType, ProcessControl
from gradsync.base.errors import ConfigurationError
from gradsync.core.engine.backward_watch import tensors_in

__all__ = ["Compatibility", "register_accelerator"]

_OURS = "_set_by_gradsync"


def _configured(name: str) -> Any:
    """A field of ``dataloader_config``, to read."""
    return property(lambda self: getattr(self.dataloader_config, name))


class Compatibility(ProcessControl):
    """Lets scripts written for Accelerate's Accelerator run unchanged. All processes must call the collectives."""

    dataloader_config: DataLoaderConfiguration
    gradient_state: GradientState
    windows: ModelWindows
    prepared: Prepared
    project_configuration: ProjectConfiguration
    mixed_precision: Any
    log_with: list[Any]
    trackers: list[Any]

    _triggered = False

    # Asked by libraries that would treat a model in another way.
    deepspeed_plugin = None
    parallelism_config = None
    torch_device_mesh = None
    is_fsdp2 = False
    is_composable_parallelism_enabled = False
    has_lomo_optimizer = False
    fp8_backend = "NO"

    def __getattr__(self, name: str) -> Any:
        if name in ABSENT_ATTRIBUTES:
            raise AbsentError(f"Accelerator.{name} is not supported. {ABSENT_ATTRIBUTES[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each with an accelerator of its own."""
        return self.distributed_type is DistributedType.MULTI_GPU

    @property
    def data_parallel_rank(self) -> int:
        return self.process_index

    @property
    def should_save_model(self) -> bool:
        return self.is_local_main_process

    @property
    def even_batches(self) -> bool:
        """The ``even_batches`` of loaders that will be prepared; see :class:`DataLoaderConfiguration`."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config = replace(self.dataloader_config, even_batches=value)

    split_batches = _configured("split_batches")
    dispatch_batches = _configured("dispatch_batches")
    use_seedable_sampler = _configured("use_seedable_sampler")
    non_blocking = _configured("non_blocking")
    use_stateful_dataloader = _configured("use_stateful_dataloader")

    # -- over processes --------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes, one after the other along the first dimension; also in nested structures."""
        return operations.gather(tensor, communicator=self.communicator)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """:meth:`gather` without the samples that only completed the last batch: each sample of the data once.

        What is no structure of tensors alone must be a list with an element a sample.
        """
        state = self.gradient_state
        return operations.gather_for_metrics(self.communicator, input_data, state, objects=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, or mean, of tensors over all processes."""
        if reduction == "mean":
            self.windows.local.averaged(tensors_in(tensor))
        return operations.reduce(tensor, reduction, scale, communicator=self.communicator)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors made as long in ``dim`` as the longest of all processes."""
        return operations.pad_across_processes(tensor, dim, pad_index, pad_first, communicator=self.communicator)

    def set_trigger(self) -> None:
        """Raise the flag that :meth:`check_trigger` asks for: here alone, at any time."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any process has raised its flag since the last time; all flags go down again."""
        flag = torch.tensor([int(self._triggered)], device=self.communicator.device)
        self.communicator.all_reduce(flag, "max").wait()
        self._triggered = False
        return bool(flag.item())

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Processes in here may have different numbers of batches; those that run out shadow the others.

        Nothing of that is needed, or done, where batches are even; ``even_batches`` changes it for prepared loaders.
        """
        if self.distributed_type not in list(DistributedType):
            warnings.warn(
                "joining uneven inputs is only supported for multi-GPU and multi-CPU training, and distributed_type is "
                f"{self.distributed_type}: join_uneven_inputs() has no effect",
                stacklevel=3,
            )
            yield
            return
        if even_batches is not None and not self.prepared.loaders:
            raise ConfigurationError("even_batches changes prepared loaders, and none has been prepared")
        uneven = not (self.even_batches if even_batches is None else even_batches)
        joined = [each for each in joinables if isinstance(each, Joinable) and self.use_distributed and uneven]
        with ExitStack() as stack:
            if even_batches is not None:
                self._change_loaders(stack, even=even_batches)
            if joined:
                self.windows.joining = True
                stack.callback(setattr, self.windows, "joining", False)
                stack.enter_context(Join(joined, enable=True, throw_on_early_termination=False))
            yield

    def _change_loaders(self, stack: ExitStack, *, even: bool) -> None:
        for loader in self.prepared.loaders:
            stack.enter_context(loader.evening(even))
        if self.use_distributed and any(loader.distributes_streams for loader in self.prepared.loaders):
            warnings.warn(
                f"even_batches={even} holds for iterable and dispatched loaders too. In Accelerate overriding it is "
                "only supported for map-style datasets: there these loaders keep what they were prepared with",
                stacklevel=4,
            )

    # -- trackers; they live on the main process, elsewhere these methods do nothing ---------------------------------

    def _choose_trackers(self, log_with: Any, logging_dir: str | Path | None) -> None:
        self.trackers = []
        self.log_with = []
        if log_with is None or log_with == []:
            return
        try:
            self.log_with = _trackers_of_accelerate().filter_trackers(log_with, logging_dir)
        except ValueError as error:
            raise ConfigurationError(f"log_with={log_with!r}: {error}") from error
        if not self.log_with:
            warnings.warn(
                f"`log_with={log_with}` was passed but no supported trackers are currently installed.", stacklevel=4
            )

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Begin a run with every tracker of ``log_with``. ``init_kwargs`` has arguments for each, by its name."""
        if not self.log_with or not self.is_main_process:
            return
        tracking = _trackers_of_accelerate()
        register_accelerator(self, self.mixed_precision)
        for wanted in self.log_with:
            if isinstance(wanted, tracking.GeneralTracker):
                self.trackers.append(wanted)
                continue
            kind = tracking.LOGGER_TYPE_TO_CLASS[str(wanted)]
            places = [self.project_configuration.logging_dir] if kind.requires_logging_directory else []
            self.trackers.append(kind(project_name, *places, **(init_kwargs or {}).get(str(wanted), {})))
        for tracker in self.trackers:
            tracker.start()
            if config is not None:
                tracker.store_init_configuration(dict(config))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of that name, or with ``unwrap`` the object of its library."""
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if not self.trackers:
            return _Blank()
        names: Sequence[str] = [tracker.name for tracker in self.trackers]
        raise ConfigurationError(f"{name} is not an available tracker stored inside the `Accelerator`: it has {names}")

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Give numbers and texts to all trackers. ``log_kwargs`` has arguments for each, by its name."""
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def _finish_trackers(self) -> None:
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []


# -- the package accelerate -------------------------------------------------------------------------------------------


def register_accelerator(control: ProcessControl, mixed_precision: str) -> None:
    """Tell Accelerate's state, if it is loaded and knows nothing better, which process this is."""
    module = sys.modules.get("accelerate.state")
    if module is None:
        return
    known: Any = module.PartialState._shared_state
    if known and _OURS not in known:
        return
    known.update(
        {
            "_cpu": control.device.type == "cpu",
            "backend": dist.get_backend() if dist.is_initialized() else None,
            "device": control.device,
            "debug": False,
            "distributed_type": module.DistributedType(str(control.distributed_type)),
            "num_processes": control.num_processes,
            "process_index": control.process_index,
            "local_process_index": control.local_process_index,
            "fork_launched": False,
            _OURS: True,
        }
    )
    whole: Any = module.AcceleratorState._shared_state
    if whole and _OURS not in whole:
        return
    whole.clear()
    plugin = sys.modules["accelerate.utils"].TorchDynamoPlugin()
    try:
        module.AcceleratorState(mixed_precision, cpu=known["_cpu"], dynamo_plugin=plugin, _from_accelerator=True)
    except Exception:
        # A version that needs more arguments. It raises by itself when it is used.
        whole.clear()


def _trackers_of_accelerate() -> Any:
    try:
        from accelerate import tracking  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise ConfigurationError(
            "log_with uses the trackers of the package accelerate, which is not here. Run: pip install accelerate. Or "
            "leave log_with away, and use the tracker's own package where accelerator.is_main_process"
        ) from error
    return tracking


class _Blank:
    """A tracker for processes that have none: every call does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None
