"""How the engine learns that a backward runs, and when it has ended.

Autograd calls back at the end of a *graph task*. Reentrant activation checkpointing runs graph tasks inside graph
tasks, and the inner one ends first, when only part of the gradients is there. So the end is asked for from a hook on
the outputs of the module, which runs in the outer task; asking from a parameter's hook is the second choice, for
outputs that cannot be watched, and refuses inside an inner task.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

__all__ = ["NO_TASK", "at_end_of_backward", "current_task", "inside_inner_task", "tensors_in"]

NO_TASK = -1


def current_task() -> int:
    """The number of the graph task this thread is running, or :data:`NO_TASK`."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(ended: Callable[[], None], failed: Callable[[], None]) -> None:
    """Run ``ended`` when the current graph task has nothing left to do, or ``failed`` when it raises.

    Autograd drops its callbacks without a word when a backward fails. But it does drop them, before the error reaches
    the caller of ``backward()``, and that can be noticed.
    """
    torch.autograd.Variable._execution_engine.queue_callback(_Outcome(ended, failed))


class _Outcome:
    """Called when a backward ends well; otherwise its deletion says that it did not."""

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        self._ended, self._failed = ended, failed
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._ended()

    def __del__(self) -> None:
        if not self._called:
            self._failed()


def inside_inner_task() -> bool:
    """Whether the running backward was started by the backward of a custom function, as reentrant checkpoints do."""
    frame: FrameType | None = sys._getframe()
    apply = BackwardCFunction.apply.__code__
    while frame is not None:
        if frame.f_code is apply:
            return True
        frame = frame.f_back
    return False


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """All tensors in a forward's output: tensors, sequences, mappings, dataclasses, and their nestings."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, list | tuple | set | frozenset):
        for element in output:
            yield from tensors_in(element)
    elif isinstance(output, Mapping):
        for element in output.values():
            yield from tensors_in(element)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name))
