"""Repairs that ``make attack ARGS="--mutants"`` takes out one by one: the programs must find each of them missing.

Most go back to what was there before, in as few lines as bring the fault back. Where parameters change is one design
(:mod:`gradsync.optim.sharded.update_thread`), which repaired several faults at once: there a mutant takes away the part
of it that repaired one of them.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from gradsync.communicator.background import Task
from gradsync.core.engine.step_guard import StepGuard
from gradsync.optim.sharded import bucket_optimizer, gather, overlapped
from gradsync.optim.sharded.bucket_optimizer import BucketOptimizer
from gradsync.optim.sharded.gather import Gathers
from gradsync.optim.sharded.overlapped import OverlappedOptimizer
from gradsync.optim.sharded.states import indexed
from gradsync.optim.sharded.update_thread import UpdateThread

__all__ = ["MUTANTS", "Mutant", "taken_out"]

Patches = Iterator[Any]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A repair that is taken out. ``fault``: what is wrong without it; ``kinds``: the optimizers that show it."""

    fault: str
    kinds: tuple[str, ...]
    patches: Callable[[], Patches]


@contextmanager
def taken_out(name: str | None) -> Iterator[None]:
    """Inside, this process is without the repair of that name."""
    with ExitStack() as stack:
        for patch in MUTANTS[name].patches() if name is not None else ():
            stack.enter_context(patch)
        yield


@contextmanager
def _in_an_action() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        yield


def _without_turns() -> Patches:
    def run(self: UpdateThread, action: Callable[[], None]) -> None:
        with _in_an_action():
            action()

    yield mock.patch.object(UpdateThread, "run", run)


def _on_the_main_thread() -> Patches:
    """Other threads still take turns."""

    def run(self: UpdateThread, action: Callable[[], None]) -> None:
        if self._lock.owner == threading.get_ident():
            with _in_an_action():
                action()
        else:
            self._lock.run(action)

    yield mock.patch.object(UpdateThread, "run", run)


def _class_switched_off() -> Patches:
    def drop(parameters: Sequence[torch.nn.Parameter]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in parameters:
                parameter.grad = None

    yield mock.patch.object(bucket_optimizer, "_drop_gradients", drop)


def _added_groups_lost() -> Patches:
    take = OverlappedOptimizer._take_group

    def take_group(self: OverlappedOptimizer, group: dict[str, Any]) -> None:
        take(self, group)
        self._originals[-1].param_groups.pop()

    def close(self: OverlappedOptimizer) -> None:
        BucketOptimizer.close(self)
        for handle in self._guards:
            handle.remove()
        for original, inner in zip(self._originals, self._inner, strict=True):
            mine = {id(self._shadows[id(p)].itself): p for p in indexed(original.param_groups)}
            original.state = defaultdict(dict)
            original.state.update({mine[id(twin)]: state for twin, state in inner.state.items() if id(twin) in mine})

    yield mock.patch.object(OverlappedOptimizer, "_take_group", take_group)
    yield mock.patch.object(OverlappedOptimizer, "close", close)


def _interrupts_kept() -> Patches:
    """As the waiting thread did: it ran the wait itself, and kept whatever ended it."""

    def wait(self: Task) -> None:
        if not self.ended:
            self._queue.run_until(self)
        if self._error is not None:
            raise self._error

    yield from _on_the_main_thread()
    yield mock.patch.object(Task, "wait", wait)
    for module in (gather, overlapped):
        yield mock.patch.object(module, "error_for_later", lambda error: error)


def _flush_without_a_turn() -> Patches:
    def finish(self: Gathers, then: Callable[[], None] | None = None) -> None:
        self._gathers = list(self._gathers)
        while self._gathers:
            self._gathers[0].finish()
            self._gathers.pop(0)
        if then is not None:
            then()

    yield mock.patch.object(Gathers, "finish", finish)


def _asked_before_the_closure() -> Patches:
    before_step = StepGuard.before_step

    def ask_first(self: StepGuard, *, by_closure: bool, gated: bool) -> torch.Tensor | None:
        if by_closure and not self.window.has_means and not self.engine.switches.steps_locally:
            self._synchronize_if_due()
        return before_step(self, by_closure=by_closure, gated=gated)

    yield mock.patch.object(StepGuard, "before_step", ask_first)


IN_BUCKETS = ("sharded", "overlapped")
MUTANTS = {
    "turns": Mutant(
        fault="threads that read run updates at the same time", kinds=("overlapped",), patches=_without_turns
    ),
    "update-thread": Mutant(
        fault="a handler comes in the middle of an update", kinds=IN_BUCKETS, patches=_on_the_main_thread
    ),
    "zero-grad": Mutant(
        fault="a handler inherits that parameters do not wait", kinds=IN_BUCKETS, patches=_class_switched_off
    ),
    "added-groups": Mutant(
        fault="close() loses groups that were added", kinds=("overlapped",), patches=_added_groups_lost
    ),
    "interrupts": Mutant(fault="an interrupt is stored, and raised again", kinds=IN_BUCKETS, patches=_interrupts_kept),
    "flush": Mutant(
        fault="flush() from two threads takes from an empty list",
        kinds=IN_BUCKETS,
        patches=_flush_without_a_turn,
    ),
    "closure": Mutant(
        fault="step(closure) after no_sync() is refused",
        kinds=("plain", *IN_BUCKETS),
        patches=_asked_before_the_closure,
    ),
}
