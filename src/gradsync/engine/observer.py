"""What the engine tells whoever watches it. The engine calls an observer; it never imports one."""

import logging
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from gradsync.bucket.bucket import Bucket
from gradsync.communicator import Handle

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


@runtime_checkable
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

    def gather_started(self, bucket: Bucket, handle: Handle) -> None:
        self._tell("gather_started", bucket, handle, to=self._who_hear("gather_started"))

    def evaluation_began(self) -> None:
        self._tell("evaluation_began", to=self._who_hear("evaluation_began"))

    def forward_began(self) -> None:
        self._tell("forward_began", to=self._who_hear("forward_began"))

    def forward_ended(self) -> None:
        self._tell("forward_ended", to=self._who_hear("forward_ended"))

    def step_began(self) -> None:
        self._tell("step_began", to=self._who_hear("step_began"))

    def step_ended(self, optimizer: Any) -> None:
        self._tell("step_ended", optimizer, to=self._who_hear("step_ended"))

    def gather_needed(self, bucket: Bucket) -> None:
        self._tell("gather_needed", bucket, to=self._who_hear("gather_needed"))

    def gather_arrived(self, bucket: Bucket) -> None:
        self._tell("gather_arrived", bucket, to=self._who_hear("gather_arrived"))

    def _who_hear(self, event: str) -> list[Any]:
        """Those who want to know of what not everybody does."""
        return [observer for observer in self._observers if hasattr(observer, event)]

    def _tell(self, event: str, *args: Any, to: Sequence[Any] | None = None, **kwargs: Any) -> None:
        for observer in self._observers if to is None else to:
            try:
                getattr(observer, event)(*args, **kwargs)
            except Exception:
                self._observers = tuple(each for each in self._observers if each is not observer)
                LOGGER.exception(
                    "the observer %r raised in %s, and is told nothing any more; training goes on", observer, event
                )
