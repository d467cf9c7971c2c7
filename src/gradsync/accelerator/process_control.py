"""Who this process is, and what only some processes do: the part of an Accelerator that does not train."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch

from gradsync.accelerator.world import DistributedType, World

__all__ = ["ProcessControl"]

P = ParamSpec("P")
R = TypeVar("R")


class ProcessControl:
    """Passes questions about processes on to the :class:`World`."""

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def state(self) -> World:
        """Under this name Accelerate keeps what here is the world."""
        return self.world

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def process_index(self) -> int:
        return self.world.process_index

    @property
    def local_process_index(self) -> int:
        return self.world.local_process_index

    @property
    def num_processes(self) -> int:
        return self.world.num_processes

    @property
    def distributed_type(self) -> DistributedType:
        return self.world.distributed_type

    @property
    def use_distributed(self) -> bool:
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        return self.world.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        return self.world.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        return self.world.is_last_process

    def wait_for_everyone(self) -> None:
        """Return when all processes have come here."""
        self.world.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the main process only."""
        self.world.print(*args, **kwargs)

    def main_process_first(self) -> AbstractContextManager[None]:
        """The main process runs the block before all others, for downloads and caches."""
        return self.world.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        return self.world.local_main_process_first()

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorator: the function runs on the main process only."""
        return self.world.on_main_process(function)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        return self.world.on_local_main_process(function)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        return self.world.on_last_process(function)

    def on_process(self, process_index: int) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
        return self.world.on_process(process_index)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """This process's share of ``inputs``, for inference."""
        return self.world.split_between_processes(inputs, apply_padding)
