"""What the engine tells whoever watches it. The engine calls an observer; it never imports one."""

import logging
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from gradsync.bucket.bucket import Bucket
from gradsync.communicator import Handle

__all__ = ["GatherObserver", "Observer", "Observers"]

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


@runtime_checkable
class GatherObserver(Protocol):
    """An observer that is told of the gathers of a sharded optimizer, too. They come between two backwards, mostly."""

    def gather_started(self, bucket: Bucket, handle: Handle) -> None:
        """New parameters of the bucket are on their way to all ranks."""


class Observers:
    """All who watch one engine. One that raises is not told any more: watching must not be able to break a training,
    and least of all on one rank alone, in the middle of a synchronization that the others go on with."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

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

    def gather_started(self, bucket: Bucket, handle: Handle) -> None:
        told = [observer for observer in self._observers if isinstance(observer, GatherObserver)]
        self._tell("gather_started", bucket, handle, to=told)

    def _tell(self, event: str, *args: Any, to: Sequence[Any] | None = None, **kwargs: Any) -> None:
        for observer in self._observers if to is None else to:
            try:
                getattr(observer, event)(*args, **kwargs)
            except Exception:
                self._observers = tuple(each for each in self._observers if each is not observer)
                LOGGER.exception(
                    "the observer %r raised in %s, and is told nothing any more; training goes on", observer, event
                )
