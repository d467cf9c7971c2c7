"""What scripts import from ``accelerate.utils``: ``from gradsync.utils import gather_object, set_seed``."""

import functools
import gc
import inspect
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsync.accelerator.compiling import TorchDynamoPlugin
from gradsync.accelerator.models import extract_model_from_parallel
from gradsync.accelerator.operations import (
    broadcast,
    broadcast_object_list,
    concatenate,
    everyone,
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
from gradsync.base.errors import ConfigurationError
from gradsync.communicator.agreement import gather_bytes

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
    "TorchDynamoPlugin",
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

SHRINKS_BY = 0.9

# What errors say that a smaller batch may avoid. torch.OutOfMemoryError is a RuntimeError too.
SIGNS = (
    "out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "DefaultCPUAllocator: can't allocate memory",
)


def wait_for_everyone() -> None:
    """Return when all processes have called this."""
    gather_bytes(everyone(), b"")


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, torch and, where it is in use, numpy. ``device_specific``: each process differently."""
    if device_specific:
        seed += everyone().rank
    random.seed(seed)
    if "numpy" in sys.modules:  # who has not imported it draws nothing from it
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(rng_types: Sequence[str], generator: torch.Generator | None = None) -> None:
    """Give all ranks rank 0's random numbers: of ``"torch"``, ``"cuda"``, or of ``generator`` (``"generator"``)."""
    for kind in rng_types:
        name = str(getattr(kind, "value", kind))
        if name == "torch":
            torch.set_rng_state(broadcast(torch.get_rng_state()))
        elif name == "cuda":
            torch.cuda.set_rng_state(broadcast(torch.cuda.get_rng_state()))
        elif name == "generator" and generator is not None:
            generator.set_state(broadcast(generator.get_state()))
        else:
            raise ConfigurationError(
                f"synchronize_rng_states knows 'torch', 'cuda', and 'generator' with a generator; got {name!r}"
            )


# -- memory -----------------------------------------------------------------------------------------------------------


class BatchSizeGivenError(ConfigurationError, TypeError):
    """The caller passed the argument that the decorator supplies. Accelerate raises a TypeError there."""


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """A decorator: ``function(batch_size, ...)`` is called without the batch size, which shrinks until it fits.

    It starts with ``starting_batch_size`` and goes on with nine tenths of it, or with what ``reduce_batch_size_fn()``
    returns, whenever memory runs out. A size that was found is the first that a later call tries. On several ranks all
    of them must run out alike, as they do with batches of one size: prepare everything again inside the function, after
    ``accelerator.free_memory()``.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    size = starting_batch_size

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        _refuse_batch_size(function, len(args))
        clear_device_cache(garbage_collection=True)
        while size > 0:
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            # Outside of the handler, where the traceback keeps no tensors alive.
            clear_device_cache(garbage_collection=True)
            size = int(size * SHRINKS_BY) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise RuntimeError(
            f"No executable batch size found, reached zero: {function.__qualname__} ran out of memory with every one "
            f"from {starting_batch_size} on"
        )

    return run


def _refuse_batch_size(function: Callable[..., Any], given: int) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    takes = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
    if given >= takes and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        raise BatchSizeGivenError(
            f"Batch size was passed into {function.__qualname__} as the first argument when called, or it takes none: "
            f"it got {given} arguments and takes {takes}, of which the first is the batch size. Leave that one out"
        )


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether ``exception`` says that memory ran out."""
    return isinstance(exception, RuntimeError) and any(sign in str(exception) for sign in SIGNS)


def release_memory(*objects: Any) -> list[None]:
    """A None for each of ``objects``, to overwrite them with; memory that nobody holds any more is given back."""
    clear_device_cache(garbage_collection=True)
    return [None] * len(objects)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give back the memory that the allocator of the GPU keeps for later."""
    if garbage_collection:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
