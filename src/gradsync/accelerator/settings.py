"""What the constructor of an Accelerator takes: configurations and ``kwargs_handlers`` with Accelerate's names and
defaults, variables that ``accelerate launch`` sets, and what is absent here.

Accelerate's own objects are accepted as well, recognised by their class names or fields, so code that imports them from
there needs no change.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.core.engine.policy import SyncPolicy

__all__ = [
    "ABSENT_ATTRIBUTES",
    "AbsentError",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ProfileKwargs",
    "ProjectConfiguration",
    "adopted",
    "checked_rng_types",
    "chosen_loaders",
    "chosen_plugin",
    "chosen_project",
    "launched_settings",
    "refuse_absent",
    "require_steps",
    "settings_of",
]

T = TypeVar("T")

CHOICES = {
    "divide_by": ("window", "num_steps"),
    "scheduler_steps": ("per_process", "once"),
    "windows": ("per_model", "shared"),
}


def require_steps(name: str, steps: object) -> None:
    """Refuse a number of steps below 1. ``name``: the argument through which the caller passed it."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigurationError(f"{name} must be a whole number of at least 1, got {steps!r}")


@dataclass(frozen=True)
class GradientAccumulationPlugin:
    """Settings for how micro-batches become windows.

    num_steps
        micro-batches per window.
    adjust_scheduler
        accepted but without effect, as in Accelerate 1.15, which never reads a value other than False.
    sync_with_dataloader
        the last batch of a prepared loader ends the window, however short it is.
    sync_each_batch
        synchronize in every micro-batch: more traffic, the same result.
    divide_by
        ``"window"``: the mean over the micro-batches that the window really had. ``"num_steps"``: every loss is divided
        by ``num_steps``, as in Accelerate, so the gradients of a short last window are too small.
    scheduler_steps
        how far a prepared scheduler moves per window. ``"per_process"``: once per process (once in all with
        ``split_batches``), for a schedule that counts the batches of one process. ``"once"``: one step, for a schedule
        that counts windows.
    windows
        ``"per_model"``: ``accumulate(a)`` and ``accumulate(b)`` in one loop count separate windows. ``"shared"``: one
        count of all micro-batches, as in Accelerate.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    divide_by: Literal["window", "num_steps"] = "window"
    scheduler_steps: Literal["per_process", "once"] = "per_process"
    windows: Literal["per_model", "shared"] = "per_model"

    @classmethod
    def like_accelerate(cls, num_steps: int | None = None, **options: Any) -> "GradientAccumulationPlugin":
        """Accelerate's own arithmetic, for runs that must not differ from earlier ones."""
        return cls(num_steps, **{"divide_by": "num_steps", "windows": "shared", **options})

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            require_steps("num_steps", self.num_steps)
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigurationError(f"{name} must be {' or '.join(map(repr, known))}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class DataLoaderConfiguration:
    """Settings for how a prepared loader distributes batches among the ranks.

    split_batches
        the loader's batch size is that of all ranks together, and each rank takes its part of every batch.
    dispatch_batches
        only rank 0 reads; it sends the others their parts. Default: every rank reads, also from iterable datasets.
    even_batches
        every rank gets the same number of batches of equal size; missing samples are repeated from the beginning.
    use_seedable_sampler
        shuffle by a seed and the epoch alone, whatever else draws random numbers.
    data_seed
        that seed; by default the initial seed of torch's generator on rank 0.
    non_blocking
        copy batches to the device without waiting; needs ``pin_memory=True`` in the loader.
    use_stateful_dataloader
        use torchdata's ``StatefulDataLoader`` underneath.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class ProjectConfiguration:
    """Settings for where a run keeps its files.

    project_dir, logging_dir
        the folder of the run, and the folder of trackers that write files (default: ``project_dir``).
    automatic_checkpoint_naming, total_limit, iteration
        ``save_state()`` writes ``project_dir/checkpoints/checkpoint_<iteration>``, and keeps at most ``total_limit``.
    save_on_each_node
        ``accelerator.save`` writes once per node, not once in all.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.logging_dir = self.project_dir if self.logging_dir is None else self.logging_dir


def adopted(kind: type[T], given: Any) -> T:
    """``given``, or an object of ``kind`` with the fields of Accelerate's object of that name."""
    if isinstance(given, kind):
        return given
    names = [field.name for field in dataclasses.fields(cast(Any, kind))]
    found = {name: getattr(given, name) for name in names if hasattr(given, name)}
    if not found:
        raise ConfigurationError(f"a {kind.__name__} was expected, ours or Accelerate's, got {type(given).__name__}")
    return kind(**found)


# -- kwargs_handlers -------------------------------------------------------------------------------------------------


@dataclass
class DistributedDataParallelKwargs:
    """Arguments for the wrapper of prepared models; see :class:`gradsync.DistributedDataParallel`.

    ``policy`` goes beyond torch's arguments: a :class:`gradsync.SyncPolicy`. ``comm_hook`` names one of torch's
    communication hooks ("fp16", "bf16", "power_sgd", "batched_power_sgd"), ``comm_wrapper`` ("fp16", "bf16") the type
    in which its data is sent, and ``comm_state_option`` holds arguments for PowerSGD's state.
    """

    dim: int = 0
    broadcast_buffers: bool | None = None
    bucket_cap_mb: Any = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: Any = "no"
    comm_wrapper: Any = "no"
    comm_state_option: dict[str, Any] = field(default_factory=dict)
    policy: SyncPolicy | None = None


@dataclass
class GradScalerKwargs:
    """Arguments for the scaler of ``mixed_precision="fp16"``; see ``torch.amp.GradScaler``."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class AutocastKwargs:
    """Arguments for autocast; see ``torch.autocast``."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class InitProcessGroupKwargs:
    """Arguments for the process group, if the accelerator creates it."""

    timeout: timedelta | None = None


@dataclass
class ProfileKwargs:
    """Arguments for ``accelerator.profile()``; see ``torch.profiler.profile``. Activities are "cpu" and "cuda"."""

    activities: Sequence[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch.profiler.profile:
        """A profiler with these settings."""
        known = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}
        for name in self.activities or ():
            if name not in known:
                raise ConfigurationError(f"a profiler's activities are {' and '.join(map(repr, known))}, got {name!r}")
        names = ("on_trace_ready", "record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
        return torch.profiler.profile(
            activities=None if self.activities is None else [known[name] for name in self.activities],
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            **{name: getattr(self, name) for name in names},
        )


_HANDLERS = (DistributedDataParallelKwargs, GradScalerKwargs, AutocastKwargs, InitProcessGroupKwargs, ProfileKwargs)


def settings_of(handlers: Iterable[Any] | None) -> dict[str, dict[str, Any]]:
    """The fields of each handler that differ from their defaults, by the name of its class."""
    settings: dict[str, dict[str, Any]] = {known.__name__: {} for known in _HANDLERS}
    for handler in handlers or ():
        name = type(handler).__name__
        if name == "TorchDynamoPlugin":
            # See compiling.py.
            continue
        if name not in settings:
            raise ConfigurationError(
                f"kwargs_handlers knows {', '.join(settings)}, got {name}. Leave it out: nothing here would use it"
            )
        defaults = type(handler)()
        changed = {field: value for field, value in vars(handler).items() if value != getattr(defaults, field)}
        kind = next(each for each in _HANDLERS if each.__name__ == name)
        known = {field.name for field in dataclasses.fields(cast(Any, kind))}
        if unknown := sorted(changed.keys() - known):
            raise ConfigurationError(
                f"{name}({unknown[0]}={changed[unknown[0]]!r}) means nothing here; known are "
                f"{', '.join(sorted(known))}. For a process group with settings of its own, call "
                "torch.distributed.init_process_group before the Accelerator is made, which then uses it"
            )
        settings[name].update(changed)
    return settings


# -- arguments, the environment, what is absent ----------------------------------------------------------------------


def checked_rng_types(rng_types: Sequence[Any] | None) -> list[str]:
    """What loaders synchronize: their generators."""
    names = ["generator"] if rng_types is None else [str(getattr(each, "value", each)) for each in rng_types]
    if names not in (["generator"], []):
        raise ConfigurationError(
            f"rng_types={names}: prepared loaders give all processes the same order and leave other random numbers "
            "alone. Call gradsync.utils.synchronize_rng_states(['torch']) at the start of an epoch for the rest"
        )
    return names


def chosen_plugin(steps: int, plugin: Any, launched: int | None) -> GradientAccumulationPlugin:
    """The plugin, from one of either library or from a number: the launcher's, as in Accelerate, or the argument's."""
    if plugin is None:
        if launched is None:
            require_steps("gradient_accumulation_steps", steps)
        return GradientAccumulationPlugin(steps if launched is None else launched)
    chosen = adopted(GradientAccumulationPlugin, plugin)
    if steps not in (1, chosen.num_steps):
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps} and a plugin with num_steps={chosen.num_steps}: pass one of them"
        )
    return chosen


def chosen_loaders(configuration: Any, split: bool, even: bool, dispatch: bool | None) -> DataLoaderConfiguration:
    """The configuration of loaders, from one of either library or from single arguments."""
    if configuration is None:
        return DataLoaderConfiguration(split_batches=split, even_batches=even, dispatch_batches=dispatch)
    if split or not even or dispatch is not None:
        raise ConfigurationError(
            "split_batches, even_batches and dispatch_batches belong into dataloader_config when that is given"
        )
    return adopted(DataLoaderConfiguration, configuration)


def chosen_project(configuration: Any, project_dir: Any) -> ProjectConfiguration:
    """The configuration of the project, from one of either library, with ``project_dir`` where it has none."""
    chosen = ProjectConfiguration() if configuration is None else adopted(ProjectConfiguration, configuration)
    if project_dir is not None and chosen.project_dir is None:
        chosen.project_dir = str(project_dir)
        chosen.logging_dir = chosen.logging_dir or str(project_dir)
    return chosen


STEPS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
# What a variable says that is on.
TRUE = ("1", "true", "yes", "y", "t", "on")
_SHARDED = "Every process holds the whole model here. Accelerate itself, or torch's fully_shard, shards it"
_PARALLEL = "Here there is data parallelism alone: process_index is the place in it, of num_processes"
_BIG = "Load the model whole on every process; accelerate.dispatch_model spreads it over devices for inference"

# Arguments of the constructor that would mean another kind of training, and what to do instead.
ABSENT_ARGUMENTS = {
    "deepspeed_plugin": _SHARDED,
    "deepspeed_plugins": _SHARDED,
    "fsdp_plugin": _SHARDED,
    "torch_tp_plugin": _PARALLEL,
    "megatron_lm_plugin": _PARALLEL,
    "parallelism_config": _PARALLEL,
}

# The same for attributes.
ABSENT_ATTRIBUTES = {
    "context_parallel_rank": _PARALLEL,
    "data_parallel_shard_rank": _PARALLEL,
    "deepspeed_engine_wrapped": _SHARDED,
    "deepspeed_ulysses_dl_adapter": _SHARDED,
    "lomo_backward": "Use an optimizer that steps after backward: LOMO's updates parameters inside it, before their "
    "gradients could be averaged",
    "maybe_context_parallel": _PARALLEL,
    "pipeline_parallel_rank": _PARALLEL,
    "tensor_parallel_rank": _PARALLEL,
    "verify_device_map": _BIG,
}


class AbsentError(ConfigurationError, AttributeError):
    """A feature of Accelerate that is absent here on purpose; the message names the alternative."""


class Launched(NamedTuple):
    """The settings that ``accelerate launch`` passes to the processes it starts."""

    mixed_precision: str | None
    steps: int | None
    cpu: bool


def launched_settings(variables: Mapping[str, str] = os.environ) -> Launched:
    """Settings in the environment, which the constructor's arguments come before."""
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        if _is_true(variables.get(f"ACCELERATE_USE_{name}")):
            raise ConfigurationError(f"ACCELERATE_USE_{name} is set, and not supported by this Accelerator. {_SHARDED}")
    return Launched(
        variables.get("ACCELERATE_MIXED_PRECISION"),
        _steps(variables.get(STEPS)),
        _is_true(variables.get("ACCELERATE_USE_CPU")),
    )


def _steps(text: str | None) -> int | None:
    if text is None:
        return None
    number = int(text) if text.strip().isdecimal() else text
    require_steps(STEPS, number)
    return int(number)


def _is_true(text: str | None) -> bool:
    return text is not None and text.strip().lower() in TRUE


def refuse_absent(arguments: Mapping[str, Any]) -> None:
    """Raise for an argument that would mean something else than data parallelism."""
    for name, advice in ABSENT_ARGUMENTS.items():
        value = arguments[name]
        if value is not None:
            raise ConfigurationError(f"{name}={value!r} is not supported by this Accelerator. {advice}")
