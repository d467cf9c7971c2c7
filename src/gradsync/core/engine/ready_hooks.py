"""Stop 1: hooks that say that gradients are ready.

A Python hook costs microseconds, and one runs for every parameter in every backward. There are two ways to do it:

*counting*: a hook on every parameter, which counts in its chunk and notes the order. Always right.

*by sight*: a hook on the parameter of each chunk that comes last in the learned order. When it runs, the chunk's
gradients are looked at, all at once. That works whenever no parameter had a gradient when the backward began (the
rule after ``zero_grad()``): those that have one now have received it. If one is still missing, the chunk is looked
at again at the next hook, and at the latest when backward ends: a changed order costs overlap, never correctness. A
gradient that comes after its chunk was settled is noticed by the version counter of the bucket's memory. One hook more,
on the parameter that comes first of all, tells of a backward that no output told of: through ``model.module(x)``, which
reaches the last layer first, whatever it leaves out afterwards.

Alternatives considered: ``torch.autograd.graph.register_multi_grad_hook`` has the batching, but must be registered
anew in every forward; hooks on a sample of parameters per chunk find out no more than the one on the last does.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from gradsync.core.bucket import Bucket
from gradsync.core.bucket.arrangement import Place
from gradsync.core.bucket.chunk import Chunk
from gradsync.core.engine.phase import Phases
from gradsync.core.engine.pipeline import Pipeline

__all__ = ["BackwardListener", "ReadyHooks"]

Hook = Callable[[torch.Tensor], None]


class BackwardListener(Protocol):
    """The engine, as hooks see it."""

    def begin_at_parameter(self, index: int) -> None:
        """No output told of this backward; its first gradient does, which is landed there: places may have changed."""

    def sparse_ready(self, index: int) -> None:
        """A gradient that has no place in a bucket is ready."""


class ReadyHooks:
    """Registers, and exchanges, the hooks of one engine's parameters."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], listener: BackwardListener, pipeline: Pipeline, phases: Phases
    ) -> None:
        self._parameters = parameters
        self._listener: Callable[[], Any] = weakref.ref(listener)
        self._pipeline = pipeline
        self._idle = phases.idle
        # Each with the dictionary in which torch keeps it. To ask a parameter for that one could mean to wait for it.
        self._registered: list[tuple[dict[int, Hook], Hook]] = []
        # One autograd thread per device: with several, what they share must be taken in turns.
        self._lock = threading.RLock() if len({p.device for p in parameters}) > 1 else None
        self.counting = False
        # Not while hooks are exchanged: an interrupt may leave that half done.
        self.whole = False
        self.arrivals: list[int] = []
        weakref.finalize(listener, _remove, self._registered).atexit = False

    def register(self, places: Sequence[Place | None], *, counting: bool) -> None:
        """Put hooks where ``places`` say (None: a parameter outside the buckets), in place of the former ones."""
        self.remove()
        self.counting = counting
        for index, (parameter, place) in enumerate(zip(self._parameters, places, strict=True)):
            if place is None:
                if not parameter.requires_grad:
                    continue
                hook = self._outside(index)
            elif counting:
                hook = self._counting(index, *place)
            elif place[2] == len(place[1].parameters) - 1:
                hook = self._by_sight(index, place[0], place[1])
            elif place[0].index == 0 and place[1].first + place[2] == 0:
                hook = self._first_of_all(index)
            else:
                continue
            self._register(parameter, self._in_turn(hook))
        self.whole = True

    def stay_last(self) -> None:
        """Let hooks that users registered meanwhile run first: what they make of a gradient is what is averaged."""
        for hooks, hook in self._registered:
            if hooks[next(reversed(hooks))] is not hook:
                for number in _numbers(hooks, hook):
                    hooks[number] = hooks.pop(number)

    def remove(self) -> None:
        self.whole = False
        _remove(self._registered)

    def _register(self, parameter: torch.nn.Parameter, hook: Hook) -> None:
        # torch refuses hooks on a parameter that is frozen at the moment; it may be trained again in the next backward.
        frozen = not parameter.requires_grad
        if frozen:
            parameter.requires_grad_(True)
        try:
            hooks: Any = parameter._post_accumulate_grad_hooks
            if hooks is None:
                hooks = parameter._post_accumulate_grad_hooks = OrderedDict()
            # Known before it is there: an interrupt in between must not leave a hook that nobody can remove.
            self._registered.append((hooks, hook))
            parameter.register_post_accumulate_grad_hook(hook)
        finally:
            if frozen:
                parameter.requires_grad_(False)

    # Hooks look nothing up: all they need is bound when they are made. They must not keep the listener alive.

    def _counting(self, index: int, bucket: Bucket, chunk: Chunk, slot: int) -> Hook:
        listener, idle, arrived = self._listener, self._idle, self.arrivals.append
        land, chunk_full = chunk.land, self._pipeline.chunk_full

        def on_gradient_ready(_: torch.Tensor) -> None:
            if idle:
                listener().begin_at_parameter(index)
                return
            arrived(index)
            if land(slot):
                chunk_full(bucket, chunk)

        return on_gradient_ready

    def _by_sight(self, index: int, bucket: Bucket, chunk: Chunk) -> Hook:
        listener, idle = self._listener, self._idle
        land_by_sight, chunk_full, chunk_overdue = (
            chunk.land_by_sight,
            self._pipeline.chunk_full,
            self._pipeline.chunk_overdue,
        )

        def on_last_gradient_ready(_: torch.Tensor) -> None:
            if idle:
                listener().begin_at_parameter(index)
                return
            if land_by_sight():
                chunk_full(bucket, chunk)
            else:
                chunk_overdue(bucket, chunk)

        return on_last_gradient_ready

    def _first_of_all(self, index: int) -> Hook:
        listener, idle = self._listener, self._idle

        def on_first_gradient_ready(_: torch.Tensor) -> None:
            if idle:
                listener().begin_at_parameter(index)

        return on_first_gradient_ready

    def _outside(self, index: int) -> Hook:
        listener, idle, arrived = self._listener, self._idle, self.arrivals.append

        def on_sparse_gradient_ready(_: torch.Tensor) -> None:
            if idle:
                listener().begin_at_parameter(index)
                return
            arrived(index)
            listener().sparse_ready(index)

        return on_sparse_gradient_ready

    def _in_turn(self, hook: Hook) -> Hook:
        lock = self._lock
        if lock is None:
            return hook

        def with_lock(parameter: torch.Tensor) -> None:
            with lock:
                hook(parameter)

        return with_lock


def _remove(registered: list[tuple[dict[int, Hook], Hook]]) -> None:
    while registered:
        hooks, hook = registered[-1]
        for number in _numbers(hooks, hook):
            del hooks[number]
        registered.pop()


def _numbers(hooks: dict[int, Hook], hook: Hook) -> list[int]:
    """Under which torch has ``hook`` among a parameter's ``hooks``."""
    return [number for number, each in hooks.items() if each is hook]
