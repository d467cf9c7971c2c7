"""The counterpart of ``accelerate.utils``: collectives and helpers that need no accelerator object.

They run over the ranks of the default process group, which an Accelerator creates; over those of
:func:`gradsync.testing.run_ranks` in its threads; or in a world of one. An accelerator with its own communicator offers
them as methods.
"""

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gradsync.accelerator import operations
from gradsync.accelerator.precision import plain_forward
from gradsync.base.environment import read_environment
from gradsync.base.errors import ConfigurationError, NoProcessGroupError
from gradsync.communicator import Communicator, InProcessWorld, choose_communicator
from gradsync.parallel.data_parallel import DistributedDataParallel

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "extract_model_from_parallel",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "set_seed",
    "synchronize_rng_states",
    "wait_for_everyone",
]


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


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """The model as it was before ``prepare``; without autocast around its forward, or uncompiled, if so wished."""
    compiled: Any = getattr(model, "_orig_mod", model)
    inner = compiled
    while isinstance(inner, DistributedDataParallel | nn.parallel.DistributedDataParallel):
        inner = inner.module
    bare: nn.Module = getattr(inner, "_orig_mod", inner)
    if not keep_fp32_wrapper:
        plain_forward(bare)
    if not keep_torch_compile:
        return bare
    # What was compiled around a wrapper is not what the model was.
    return model if inner is compiled else inner
