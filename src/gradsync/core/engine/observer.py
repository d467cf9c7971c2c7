"""Observer interface: the events that the engine reports. The engine calls observers; it never imports one."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from gradsync.communicator import Handle
from gradsync.core.bucket.bucket import Bucket

__all__ = ["LoopObserver", "Observer", "Observers"]

LOGGER = logging.getLogger("gradsync")


class Observer(Protocol):
    """Called at the stages of a gradient's path. Must be quick: it runs inside backward."""

    def backward_began(self, *, synchronizes: bool) -> None:
        """Called at the first sign of a backward."""

    def bucket_ready(self, bucket: Bucket) -> None:
        """Called when the last gradient of the bucket was gathered."""

    def bucket_started(self, bucket: Bucket, handle: Handle) -> None:
        """Called when the bucket's reduction was started; ``handle`` is what the engine will wait for."""

    def backward_ended(self) -> None:
        """Called when autograd has nothing left to compute; communication that has not finished by now is exposed."""

    def bucket_finished(self, bucket: Bucket) -> None:
        """Called when the engine has waited for the bucket, which now holds the mean."""

    def synchronization_finished(self) -> None:
        """Called when all gradients are means."""


class LoopObserver(Protocol):
    """Further, optional events: what the training loop, and a sharded optimizer, do between backwards."""

    def evaluation_began(self) -> None:
        """Called when a forward without gradients is about to run."""

    def forward_began(self) -> None:
        """Called when a forward with gradients is about to run."""

    def forward_ended(self) -> None:
        """Called when the forward has run."""

    def chunk_full(self, bucket: Bucket) -> None:
        """Called when all gradients of a chunk of the bucket are there, and are about to be gathered."""

    def step_began(self) -> None:
        """Called when an optimizer is about to update parameters of the model; their gradients are means."""

    def step_ended(self, optimizer: Any) -> None:
        """Called when the optimizer has updated them, as far as it does so in its step."""

    def step_skipped(self) -> None:
        """Called when all ranks have agreed that the optimizer's step on this window changes nothing."""

    def gather_started(self, bucket: Bucket, handle: Handle) -> None:
        """Called when new parameters of the bucket are being gathered on all ranks."""

    def gather_needed(self, bucket: Bucket) -> None:
        """Called when a reader needs a parameter of the bucket that is still being gathered, and waits from now on."""

    def gather_arrived(self, bucket: Bucket) -> None:
        """Called when the parameters of the bucket are there, and the waiting readers go on."""


def _event(name: str) -> Callable[..., None]:
    """A method that passes the event on to all observers that have it."""

    def notify(self: "Observers", *args: Any, **kwargs: Any) -> None:
        self._notify(name, *args, **kwargs)

    return notify


class Observers:
    """All observers of one engine, called one after the other.

    One that raises is not called again: observing must not be able to break training, least of all on one rank alone,
    in the middle of a synchronization that the others go on with.
    """

    def __init__(self, *observers: Any) -> None:
        self._observers = observers
        # The methods to call per event: looking them up takes longer than most of them run.
        self._listeners: dict[str, list[tuple[Any, Callable[..., None]]]] = {}

    @property
    def members(self) -> tuple[Any, ...]:
        return self._observers

    def without(self, observer: object) -> "Observers | None":
        """The observers other than this one, if there are any."""
        others = [each for each in self._observers if each is not observer]
        return Observers(*others) if others else None

    # Of Observer.
    backward_began = _event("backward_began")
    bucket_ready = _event("bucket_ready")
    bucket_started = _event("bucket_started")
    backward_ended = _event("backward_ended")
    bucket_finished = _event("bucket_finished")
    synchronization_finished = _event("synchronization_finished")
    # Of LoopObserver.
    evaluation_began = _event("evaluation_began")
    forward_began = _event("forward_began")
    forward_ended = _event("forward_ended")
    chunk_full = _event("chunk_full")
    step_began = _event("step_began")
    step_ended = _event("step_ended")
    step_skipped = _event("step_skipped")
    gather_started = _event("gather_started")
    gather_needed = _event("gather_needed")
    gather_arrived = _event("gather_arrived")

    def _notify(self, event: str, *args: Any, **kwargs: Any) -> None:
        listeners = self._listeners.get(event)
        if listeners is None:
            listeners = [(each, getattr(each, event)) for each in self._observers if hasattr(each, event)]
            self._listeners[event] = listeners
        for observer, notify in listeners:
            try:
                notify(*args, **kwargs)
            except Exception:
                self._observers = tuple(each for each in self._observers if each is not observer)
                # Build a new dictionary: another thread may be reading this one.
                self._listeners = {}
                LOGGER.exception(
                    "the observer %r raised in %s, and is not notified any more; training goes on", observer, event
                )
