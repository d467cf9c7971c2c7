"""Ranks, and code that only some of them run: the same interface for a world and for an Accelerator."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import Any, ParamSpec, TypeVar

import torch

from gradsync.base.environment import ProcessEnvironment
from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator

__all__ = ["DistributedType", "ProcessControl"]

P = ParamSpec("P")
R = TypeVar("R")


class DistributedType(StrEnum):
    """Compares equal to Accelerate's members of the same name, and to their names."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"


class ProcessControl:
    """All ranks, as seen from one: its rank, its device, and what only some ranks do."""

    def __init__(self, communicator: Communicator, device: torch.device, environment: ProcessEnvironment) -> None:
        self.communicator = communicator
        self.device = device
        self.environment = environment

    def go_on_with(self, communicator: Communicator) -> None:
        """Become one of the ranks of ``communicator``, instead of the previous ranks."""
        self.communicator = communicator
        self.environment = replace(self.environment, rank=communicator.rank, world_size=communicator.world_size)

    @property
    def process_index(self) -> int:
        return self.communicator.rank

    @property
    def num_processes(self) -> int:
        return self.communicator.world_size

    @property
    def local_process_index(self) -> int:
        return self.environment.local_rank

    @property
    def use_distributed(self) -> bool:
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    @property
    def distributed_type(self) -> str:
        """A :class:`DistributedType`."""
        if self.num_processes == 1:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if self.device.type == "cuda" else DistributedType.MULTI_CPU

    def wait_for_everyone(self) -> None:
        """Return when all ranks have called this."""
        token = torch.zeros(1, device=self.communicator.device)
        self.communicator.all_reduce(token).wait()
        token.cpu()  # on CUDA wait() only orders the stream

    def main_process_first(self) -> AbstractContextManager[None]:
        """The others enter the block when rank 0 has left it, by an exception too."""
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """The others enter the block when the first rank of every node has left it."""
        return self._first(self.is_local_main_process)

    @contextmanager
    def _first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if first:
                self.wait_for_everyone()

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """A decorator: elsewhere the function does nothing and returns None."""
        return _only_if(self.is_main_process, function)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        return _only_if(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        return _only_if(self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int = 0) -> Callable[..., Any]:
        """A decorator for one rank, also as ``on_process(process_index=1)``. A world of one does the work of all."""
        chosen = self.num_processes == 1 or self.process_index == process_index
        return functools.partial(_only_if, chosen) if function is None else _only_if(chosen, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int = 0
    ) -> Callable[..., Any]:
        """The same for one rank of every node."""
        chosen = self.num_processes == 1 or self.local_process_index == local_process_index
        return functools.partial(_only_if, chosen) if function is None else _only_if(chosen, function)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's share of ``inputs``: a list, tuple or tensor, or a dict of such, all of the same length.

        The first ranks have one more where it does not come out even; with ``apply_padding`` the others repeat the
        last element of ``inputs`` to have as many. ``inputs`` itself is left alone.
        """
        yield inputs if self.num_processes == 1 else self._share(inputs, apply_padding)

    def _share(self, inputs: Any, apply_padding: bool) -> Any:
        if isinstance(inputs, Mapping):
            lengths = {key: _length(value) for key, value in inputs.items()}
            if len(set(lengths.values())) > 1:
                raise ConfigurationError(f"all values of the dict must be equally long, got lengths {lengths}")
            return {key: self._share(value, apply_padding) for key, value in inputs.items()}
        length = _length(inputs)
        each, extra = divmod(length, self.num_processes)
        start = self.process_index * each + min(self.process_index, extra)
        stop = start + each + (self.process_index < extra)
        missing = each + (extra > 0) - (stop - start)
        if _is_dataset(inputs):
            return inputs.select([*range(start, stop), *[length - 1] * (missing if apply_padding else 0)])
        share = inputs[start:stop]
        if not apply_padding or missing == 0:
            return share
        if isinstance(inputs, torch.Tensor):
            return torch.cat([share, *[inputs[-1:]] * missing])
        return share + inputs[-1:] * missing

    def print(self, *args: Any, **kwargs: Any) -> None:
        """The built-in, on the main process only."""
        if self.is_main_process:
            print(*args, **kwargs)


def _only_if(chosen: bool, function: Callable[P, R]) -> Callable[P, R | None]:
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if chosen else None

    return wrapper


def _is_dataset(inputs: Any) -> bool:
    """Whether it is one of Hugging Face's ``datasets``, whose rows are chosen by their numbers."""
    return callable(getattr(inputs, "select", None)) and hasattr(inputs, "__len__") and hasattr(inputs, "features")


def _length(inputs: Any) -> int:
    has_rows = isinstance(inputs, torch.Tensor) and inputs.ndim > 0
    if has_rows or isinstance(inputs, list | tuple) or _is_dataset(inputs):
        return len(inputs)
    raise ConfigurationError(
        "split_between_processes takes a list, a tuple, a tensor with at least one dimension, or a dict of such; got "
        f"{type(inputs).__name__}"
    )
