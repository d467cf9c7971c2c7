"""Detects when a backward runs, when it has ended, and that it has failed.

Autograd calls back at the end of a *graph task*. Reentrant activation checkpointing runs graph tasks inside graph
tasks, and the inner one ends first, when only some of the gradients are there. So the end callback is requested from a
hook on the outputs of the module, which runs in the outer task. Requesting it from a parameter's hook is the fallback
for outputs that cannot be watched, and is refused inside an inner task.
"""

import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from gradsync.communicator.logs import LOGGER

__all__ = [
    "NO_TASK",
    "accumulates",
    "call_at_end",
    "current_task",
    "inside_inner_task",
    "tensors_in",
    "watch_backward",
    "watch_failures",
    "watch_outputs",
]

NO_TASK = -1


def current_task() -> int:
    """The number of the graph task this thread is running, or :data:`NO_TASK`."""
    return torch._C._current_graph_task_id()


# What receives the events of a backward: a :class:`~gradsync.core.engine.backward.BackwardEngine`.
Watcher = Any


def call_at_end(action: Callable[[], None]) -> None:
    """Call ``action`` when the running graph task has nothing left to do; not if it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def watch_backward(watcher: Watcher) -> None:
    """Tell ``watcher`` when the running graph task ends, or fails.

    Autograd drops its callbacks without a word when a backward fails. See :func:`watch_failures`.
    """
    call_at_end(watcher.backward_ended)
    call = _running_call()
    if call is not None:
        call.begun.append(watcher)


# Where a node of the graph keeps the watchers to notify; torch itself keeps traces there.
_MARK = "gradsync"


def watch_outputs(output: Any, watcher: Watcher, forward_synchronizes: bool, abstentions: int) -> None:
    """Notify ``watcher`` when a backward reaches the output of a forward, which has just run.

    It is also notified of one that fails on its way there, unless this rank has abstained since, which it had done
    ``abstentions`` times.
    """
    task, reference = current_task(), weakref.ref(watcher)

    def hook(_: torch.Tensor) -> None:
        listener = reference()
        if listener is not None:
            listener.on_output_gradient(forward_synchronizes, task, abstentions)

    for tensor in tensors_in(output):
        node: Any = tensor.grad_fn if tensor.requires_grad else None
        if node is not None:
            tensor.register_hook(hook)
            if task == NO_TASK:
                # Several, where one module returns what another has put out.
                node.metadata.setdefault(_MARK, []).append((reference, forward_synchronizes, abstentions))


class _Call:
    """A running call of ``backward()`` or ``autograd.grad()``."""

    def __init__(self, *, accumulates: bool) -> None:
        self.accumulates = accumulates
        self.begun: list[Watcher] = []

    def notify(self, error: BaseException, roots: "Iterable[torch.Tensor | GradientEdge]") -> None:
        """Notify the watchers that the call has raised.

        First those that have begun, in the order in which they would have been notified of the end; then those that the
        call would have reached, in the order in which it would have.
        """
        marks = _marks_below(roots)
        synchronizing = [watcher for watcher, forward_synchronizes in marks if forward_synchronizes]
        unreported: list[Callable[[], None]] = [
            functools.partial(watcher.backward_failed, watcher in synchronizing) for watcher in self.begun
        ]
        unreached = dict.fromkeys(watcher for watcher, _ in marks if watcher not in self.begun)
        unreported += [functools.partial(watcher.output_unreached, watcher in synchronizing) for watcher in unreached]
        for report in unreported:
            try:
                report()
            except Exception as another:
                error.add_note(f"gradsync could not tell the other ranks of it: {another}")


def _marks_below(roots: "Iterable[torch.Tensor | GradientEdge]") -> list[tuple[Watcher, bool]]:
    """The watchers marked in the graph below ``roots``. Autograd runs the youngest nodes first."""
    found: list[tuple[int, Watcher, bool]] = []
    nodes = (root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots)
    ahead: list[Any] = [node for node in nodes if node is not None]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        for reference, forward_synchronizes, abstentions in node.metadata.get(_MARK, ()):
            watcher = reference()
            if watcher is not None and abstentions == watcher.window.abstentions:
                found.append((node._sequence_nr(), watcher, forward_synchronizes))
        following = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= following
        ahead.extend(following)
    return [(watcher, synchronizes) for _, watcher, synchronizes in sorted(found, key=lambda mark: -mark[0])]


# The calls each thread is in: several, nested, where checkpoints are reentrant.
_calls: dict[int, list[_Call]] = {}


def _running_call() -> _Call | None:
    """The outermost call of backward that this thread works for, where that can be determined.

    On an accelerator, hooks run in autograd's threads, which do not know their caller.
    """
    calls = _calls.get(threading.get_ident())
    if calls:
        return calls[0]
    others = list(_calls.values())
    return others[0][0] if len(others) == 1 and others[0] else None


def accumulates() -> bool:
    """Whether the running backward leaves gradients in parameters: ``autograd.grad`` only returns them."""
    call = _running_call()
    return call is None or call.accumulates


def watch_failures() -> None:
    """Have every backward of this process report when it raises, on the thread that called it.

    Autograd has no hook for that. Its single entry point is wrapped once, when the first engine is made.

    Alternative considered: to notice, in their ``__del__``, that autograd drops its callbacks. Errors cannot be raised
    there, and collectives would run wherever the last reference happens to go.

    A backward that was called in another way is noticed when the engine is next touched.
    """
    inner = getattr(torch.autograd, "_engine_run_backward", None)
    if inner is None:
        _say_unwatched()
        return
    if hasattr(inner, "_reports_to_gradsync"):
        return

    @functools.wraps(inner)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        call, thread = _Call(accumulates=kwargs.get("accumulate_grad", True)), threading.get_ident()
        try:
            if current_task() == NO_TASK:
                # Left behind by an interrupt.
                _calls.pop(thread, None)
            _calls.setdefault(thread, []).append(call)
            return inner(*args, **kwargs)
        except BaseException as error:
            if call.accumulates and _calls.get(thread, [call])[0] is call:
                call.notify(error, args[0])
            raise
        finally:
            calls = _calls.get(thread, [])
            if call in calls:
                calls.remove(call)
            if not calls:
                _calls.pop(thread, None)

    run_backward._reports_to_gradsync = True  # type: ignore[attr-defined]
    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]


@functools.cache
def _say_unwatched() -> None:
    LOGGER.warning(
        "torch %s has no torch.autograd._engine_run_backward, by which gradsync notices a backward that raises: the "
        "other ranks learn of it only when this rank next runs a forward or a step, and wait until then",
        torch.__version__,
    )


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
