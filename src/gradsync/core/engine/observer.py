"""What the engine tells whoever watches it. The engine calls an observer; it never imports one."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from gradsync.communicator import Handle
from gradsync.core.bucket.bucket import Bucket

__all__ = ["GatherObserver", "LoopObserver", "Observer", "Observers"]

LOGGER = logging.getLogger("gradsync")


class Observer(Protocol):
    """Called at the stops of a gradient's walk. Must be quick: it runs inside backward."""

    def backward_began(self, *, synchronizes: bool) -> None:
        """The first sign of a backward."""

    def bucket_ready(self, bucket: Bucket) -> None:
        """The last gradient of the bucket has landed."""

    def bucket_started(self, bucket: Bucket, handle: Handle) -> None:
        """The bucket was put on the wire; ``handle`` is what the engine will wait for."""

    def backward_ended(self) -> None:
        """Autograd has nothing left to compute; what is not finished now is exposed."""

    def bucket_finished(self, bucket: Bucket) -> None:
        """The engine has waited for the bucket: the mean lies in it."""

    def synchronization_finished(self) -> None:
        """All gradients are means."""


class GatherObserver(Protocol):
    """An observer that is told of the gathers of a sharded optimizer, too. They come between two backwards, mostly."""

    def gather_started(self, bucket: Bucket, handle: Handle) -> None:
        """New parameters of the bucket are on their way to all ranks."""


class LoopObserver(Protocol):
    """What an observer may hear besides: what the loop does around its backwards. It need not have all methods."""

    def evaluation_began(self) -> None:
        """A forward without gradients is about to run."""

    def forward_began(self) -> None:
        """A forward with gradients is about to run."""

    def forward_ended(self) -> None:
        """It has run."""

    def chunk_full(self, bucket: Bucket) -> None:
        """All gradients of a chunk of the bucket are there, and are about to land."""

    def step_began(self) -> None:
        """An optimizer is about to update parameters of the model; their gradients are means."""

    def step_ended(self, optimizer: Any) -> None:
        """It has, as far as it does so in its step."""

    def gather_needed(self, bucket: Bucket) -> None:
        """Somebody wants to read a parameter of the bucket that is on its way, and waits from now on."""

    def gather_arrived(self, bucket: Bucket) -> None:
        """The parameters of the bucket are there, and whoever has waited goes on."""


class Observers:
    """All who watch one engine. One that raises is not told any more: watching must not be able to break a training,
    and least of all on one rank alone, in the middle of a synchronization that the others go on with."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers
        # Who is told of an event, by which method: looking that up takes longer than most of them.
        self._listeners: dict[str, list[tuple[Observer, Callable[..., None]]]] = {}

    @property
    def members(self) -> tuple[Observer, ...]:
        return self._observers

    def without(self, observer: Observer) -> "Observers | None":
        """All others, if there are any."""
        others = [each for each in self._observers if each is not observer]
        return Observers(*others) if others else None

    def backward_began(self, *, synchronizes: bool) -> None:
        self._tell("backward_began", synchronizes=synchronizes)

    def bucket_ready(self, bucket: Bucket) -> None:
        self._tell("bucket_ready", bucket)

    def bucket_started(self, bucket: Bucket, handle: Handle) -> None:
        self._tell("bucket_started", bucket, handle)

    def backward_ended(self) -> None:
        self._tell("backward_ended")

    def bucket_finished(self, bucket: Bucket) -> None:
        self._tell("bucket_finished", bucket)

    def synchronization_finished(self) -> None:
        self._tell("synchronization_finished")

    # What not everybody wants to know.

    def gather_started(self, bucket: Bucket, handle: Handle) -> None:
        self._tell("gather_started", bucket, handle)

    def evaluation_began(self) -> None:
        self._tell("evaluation_began")

    def forward_began(self) -> None:
        self._tell("forward_began")

    def forward_ended(self) -> None:
        self._tell("forward_ended")

    def chunk_full(self, bucket: Bucket) -> None:
        self._tell("chunk_full", bucket)

    def step_began(self) -> None:
        self._tell("step_began")

    def step_ended(self, optimizer: Any) -> None:
        self._tell("step_ended", optimizer)

    def gather_needed(self, bucket: Bucket) -> None:
        self._tell("gather_needed", bucket)

    def gather_arrived(self, bucket: Bucket) -> None:
        self._tell("gather_arrived", bucket)

    def _tell(self, event: str, *args: Any, **kwargs: Any) -> None:
        listeners = self._listeners.get(event)
        if listeners is None:
            listeners = [(each, getattr(each, event)) for each in self._observers if hasattr(each, event)]
            self._listeners[event] = listeners
        for observer, hear in listeners:
            try:
                hear(*args, **kwargs)
            except Exception:
                self._observers = tuple(each for each in self._observers if each is not observer)
                # Another dictionary: another thread may be looking at this one.
                self._listeners = {}
                LOGGER.exception(
                    "the observer %r raised in %s, and is told nothing any more; training goes on", observer, event
                )
