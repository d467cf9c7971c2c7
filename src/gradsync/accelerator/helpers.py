"""The counterpart of ``accelerate.utils``: collectives, seeds and memory, without an accelerator object.

Collectives run over the ranks of the default process group, which an Accelerator creates; over those of
:func:`gradsync.testing.run_ranks` in its threads; or in a world of one. An accelerator with its own communicator offers
them as methods.
"""

import functools
import gc
import inspect
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsync.accelerator import operations
from gradsync.base.environment import read_environment
from gradsync.base.errors import ConfigurationError, NoProcessGroupError
from gradsync.communicator import Communicator, InProcessWorld, choose_communicator

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "clear_device_cache",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "release_memory",
    "set_seed",
    "should_reduce_batch_size",
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


def _everyone() -> Communicator:
    try:
        return choose_communicator()
    except NoProcessGroupError:
        environment = read_environment()
        if environment.world_size > 1:
            raise ConfigurationError(
                f"rank {environment.rank} of {environment.world_size} has no process group yet. Make the Accelerator "
                "first; if it has a communicator of its own, use its methods of the same name"
            ) from None
        return InProcessWorld(1).communicator(0)


def gather(tensor: Any) -> Any:
    """Tensors of all processes, one after the other along the first dimension; also in nested structures."""
    return operations.gather(_everyone(), tensor)


def gather_object(object: Sequence[Any]) -> list[Any]:
    """The lists of all processes as one: of numbers, texts, tensors, and dicts, lists and tuples of such."""
    return operations.gather_object(_everyone(), object)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """The tensors of process ``from_process``, on all processes. The arguments are left alone."""
    return operations.broadcast(_everyone(), tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """The elements of process ``from_process``, put into the list of every process, which is returned too."""
    return operations.broadcast_object_list(_everyone(), object_list, from_process)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """The sum, mean or maximum of tensors over all processes."""
    return operations.reduce(_everyone(), tensor, reduction, scale)  # type: ignore[arg-type]


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Tensors made as long in ``dim`` as the longest of all processes."""
    return operations.pad_across_processes(_everyone(), tensor, dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Return when all processes have called this."""
    everyone = _everyone()
    token = torch.zeros(1, device=everyone.device)
    everyone.all_reduce(token).wait()
    token.cpu()  # on CUDA wait() only orders the stream


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, torch and, where it is in use, numpy. ``device_specific``: each process differently."""
    if device_specific:
        seed += _everyone().rank
    random.seed(seed)
    if "numpy" in sys.modules:  # who has not imported it draws nothing from it
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(rng_types: Sequence[str], generator: torch.Generator | None = None) -> None:
    """Give everybody process 0's random numbers: of ``"torch"``, ``"cuda"``, or of ``generator`` (``"generator"``)."""
    everyone = _everyone()
    for kind in rng_types:
        name = str(getattr(kind, "value", kind))
        if name == "torch":
            torch.set_rng_state(operations.broadcast(everyone, torch.get_rng_state()))
        elif name == "cuda":
            torch.cuda.set_rng_state(operations.broadcast(everyone, torch.cuda.get_rng_state()))
        elif name == "generator" and generator is not None:
            generator.set_state(operations.broadcast(everyone, generator.get_state()))
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
