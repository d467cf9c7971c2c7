"""What scripts import from ``accelerate.utils``: ``from gradsync.utils import gather_object, set_seed``."""

from gradsync.accelerator.helpers import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    set_seed,
    should_reduce_batch_size,
    synchronize_rng_states,
    wait_for_everyone,
)
from gradsync.accelerator.models import extract_model_from_parallel
from gradsync.accelerator.operations import (
    broadcast,
    broadcast_object_list,
    concatenate,
    find_batch_size,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    send_to_device,
    slice_tensors,
)
from gradsync.accelerator.settings import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from gradsync.accelerator.world import DistributedType

__all__ = [
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ProfileKwargs",
    "ProjectConfiguration",
    "broadcast",
    "broadcast_object_list",
    "clear_device_cache",
    "concatenate",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "should_reduce_batch_size",
    "slice_tensors",
    "synchronize_rng_states",
    "wait_for_everyone",
]
