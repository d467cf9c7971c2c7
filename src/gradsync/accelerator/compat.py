"""Compatibility: Accelerate's names that scripts and libraries look up, those supported here and those that are not."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from gradsync.accelerator.plugins import DataLoaderConfiguration, require_steps
from gradsync.accelerator.process_control import DistributedType, ProcessControl
from gradsync.base.errors import ConfigurationError

__all__ = ["AbsentError", "Compatibility", "is_dynamo_off", "launched_settings", "refuse_absent"]

STEPS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
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
    "dynamo_backend": "Call torch.compile(model, backend=…) before or after accelerator.prepare(model)",
    "dynamo_plugin": "Call torch.compile(model, …) before or after accelerator.prepare(model)",
}

ABSENT = {
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
    return text is not None and text.strip().lower() in ("1", "true", "yes", "y", "t", "on")


def is_dynamo_off(value: Any) -> bool:
    """Whether ``value`` asks for no compiler: a backend of that name, or a plugin that has it, of any version."""
    backend = getattr(value, "backend", value)
    return str(getattr(backend, "value", backend)).rpartition(".")[2].lower() == "no"


def refuse_absent(arguments: Mapping[str, Any]) -> None:
    """Raise for an argument that would mean something else than data parallelism."""
    for name, advice in ABSENT_ARGUMENTS.items():
        value = arguments[name]
        if value is not None and not is_dynamo_off(value):
            raise ConfigurationError(f"{name}={value!r} is not supported by this Accelerator. {advice}")


class Compatibility(ProcessControl):
    """The attributes that let scripts written for Accelerate's Accelerator run unchanged."""

    dataloader_config: DataLoaderConfiguration

    # Asked by libraries that would treat a model in another way.
    deepspeed_plugin = None
    parallelism_config = None
    torch_device_mesh = None
    is_fsdp2 = False
    is_composable_parallelism_enabled = False
    has_lomo_optimizer = False
    fp8_backend = "NO"

    def __getattr__(self, name: str) -> Any:
        if name in ABSENT:
            raise AbsentError(f"Accelerator.{name} is not supported. {ABSENT[name]}")
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
    def split_batches(self) -> bool:
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Of loaders that will be prepared; see :class:`DataLoaderConfiguration`."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config = replace(self.dataloader_config, even_batches=value)

    @property
    def use_seedable_sampler(self) -> bool:
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        return self.dataloader_config.use_stateful_dataloader
