"""Out-of-memory handling: retry with a smaller batch, and release memory that is not needed."""

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]

SHRINKS_BY = 0.9
# What errors say that a smaller batch may avoid. torch.OutOfMemoryError is a RuntimeError too.
SIGNS = (
    "out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "DefaultCPUAllocator: can't allocate memory",
)


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
