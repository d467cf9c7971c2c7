"""Stage 1: autograd hooks that detect when gradients are ready.

A Python hook costs microseconds, and one runs for every parameter in every backward. There are two ways to do it:

*per-parameter hooks*: a hook on every parameter counts in its chunk and notes the order. Always correct.

*batched readiness check*: a hook only on the parameter of each chunk that comes last in the learned order.
When it runs, all gradients of the chunk are checked at once. This works if no parameter had a gradient when the
backward began (the rule after ``zero_grad()``): a gradient that exists now has arrived since. If one is still missing,
the chunk is checked again at the next hook, and at the latest when backward ends: a changed order costs overlap, never
correctness. A gradient that arrives after its chunk was scaled is detected by the version counter of the bucket's
memory. One more hook, on the very first parameter, detects a backward that no output announced: through
``model.module(x)``, which reaches the last layer first, whatever it leaves out afterwards.

Alternatives considered: ``torch.autograd.graph.register_multi_grad_hook`` does the batching, but must be registered
again in every forward; hooks on a sample of parameters per chunk find out no more than the one on the last does.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsync.core.bucket import Bucket
from gradsync.core.bucket.arrangement import Place
from gradsync.core.bucket.chunk import Chunk
from gradsync.core.engine.pipeline import Pipeline
from gradsync.core.engine.state import Phases

__all__ = ["ReadyHooks"]

Hook = Callable[[torch.Tensor], None]


class ReadyHooks:
    """Registers and replaces the hooks on one engine's parameters."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], listener: object, pipeline: Pipeline, phases: Phases
    ) -> None:
        self._parameters = parameters
        self._listener: Callable[[], Any] = weakref.ref(listener)
        self._pipeline = pipeline
        self._idle = phases.idle
        # Each hook with torch's dictionary that holds it: asking a parameter for the dictionary may wait for its value.
        self._registered: list[tuple[dict[int, Hook], Hook]] = []
        # One autograd thread per device: with several, access to shared data must be serialized.
        self._lock = threading.RLock() if len({p.device for p in parameters}) > 1 else None
        self.per_parameter = False
        # Not while hooks are being replaced: an interrupt may leave that half done.
        self.whole = False
        self.arrivals: list[int] = []
        weakref.finalize(listener, _remove, self._registered).atexit = False

    def register(self, places: Sequence[Place | None], *, per_parameter: bool) -> None:
        """Put hooks where ``places`` say (None: a parameter outside the buckets), replacing the former ones."""
        self.remove()
        self.per_parameter = per_parameter
        for index, (parameter, place) in enumerate(zip(self._parameters, places, strict=True)):
            if place is None:
                if not parameter.requires_grad:
                    continue
                hook = self._outside_hook(index)
            elif per_parameter:
                hook = self._per_parameter(index, *place)
            elif place.slot == len(place.chunk.parameters) - 1:
                hook = self._batched(index, place.bucket, place.chunk)
            elif place.bucket.index == 0 and place.chunk.first + place.slot == 0:
                hook = self._first_of_all(index)
            else:
                continue
            self._register(parameter, self._in_turn(hook))
        self.whole = True

    def stay_last(self) -> None:
        """Let hooks that users registered meanwhile run first: the gradient is averaged as they leave it."""
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
            # Recorded before it exists: an interrupt in between must not leave a hook that cannot be removed.
            self._registered.append((hooks, hook))
            parameter.register_post_accumulate_grad_hook(hook)
        finally:
            if frozen:
                parameter.requires_grad_(False)

    # Hooks look nothing up: everything they need is bound when they are made. They must not keep the listener alive.

    def _per_parameter(self, index: int, bucket: Bucket, chunk: Chunk, slot: int) -> Hook:
        listener, idle, arrived = self._listener, self._idle, self.arrivals.append
        mark_ready, chunk_full = chunk.mark_ready, self._pipeline.chunk_full

        def on_gradient_ready(_: torch.Tensor) -> None:
            if idle:
                listener().begin_at_parameter(index)
                return
            arrived(index)
            if mark_ready(slot):
                chunk_full(bucket, chunk)

        return on_gradient_ready

    def _batched(self, index: int, bucket: Bucket, chunk: Chunk) -> Hook:
        listener, idle = self._listener, self._idle
        check_all_ready, chunk_full, chunk_overdue = (
            chunk.check_all_ready,
            self._pipeline.chunk_full,
            self._pipeline.chunk_overdue,
        )

        def on_last_gradient_ready(_: torch.Tensor) -> None:
            if idle:
                listener().begin_at_parameter(index)
                return
            if check_all_ready():
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

    def _outside_hook(self, index: int) -> Hook:
        listener, idle, arrived = self._listener, self._idle, self.arrivals.append

        def on_sparse_gradient_ready(_: torch.Tensor) -> None:
            if idle:
                listener().begin_at_parameter(index)
                return
            arrived(index)
            listener().store.sparse.mark_ready(index)

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
    """The numbers under which torch has ``hook`` among a parameter's ``hooks``."""
    return [number for number, each in hooks.items() if each is hook]
