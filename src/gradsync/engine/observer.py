"""What the engine tells whoever watches it. The engine calls an observer; it never imports one."""

from typing import Protocol

from gradsync.bucket.bucket import Bucket
from gradsync.communicator import Handle

__all__ = ["Observer", "Observers"]


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


class Observers:
    """Several that watch at once."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def backward_began(self, *, synchronizes: bool) -> None:
        for observer in self._observers:
            observer.backward_began(synchronizes=synchronizes)

    def bucket_ready(self, bucket: Bucket) -> None:
        for observer in self._observers:
            observer.bucket_ready(bucket)

    def bucket_started(self, bucket: Bucket, handle: Handle) -> None:
        for observer in self._observers:
            observer.bucket_started(bucket, handle)

    def backward_ended(self) -> None:
        for observer in self._observers:
            observer.backward_ended()

    def bucket_finished(self, bucket: Bucket) -> None:
        for observer in self._observers:
            observer.bucket_finished(bucket)

    def synchronization_finished(self) -> None:
        for observer in self._observers:
            observer.synchronization_finished()
