"""Local training of a wrapped model, without the other ranks, for a while: see :class:`~gradsync.LocalSteps`."""

import dataclasses
from typing import Any, Protocol

from gradsync.communicator import Choice, InProcessWorld
from gradsync.core.engine.policy import SyncPolicy
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.core.reduction import Mean

__all__ = ["TrainingAlone"]


class Reconnecting(Protocol):
    """A wrapper that can switch to a different communicator."""

    wire: Choice
    process_group: Any
    synchronizer: Synchronizer

    def current_policy(self) -> SyncPolicy: ...

    def reconnect(self, wire: Choice, policy: SyncPolicy) -> None: ...


class TrainingAlone:
    """Lets ``wrapper`` train without other ranks until :meth:`end`: windows, their weights and clipping are this rank's
    own, and nothing is sent. Parameters may diverge between ranks; the caller that ends it must make them equal.

    Not a context manager, and nothing happens if it is forgotten: the ranks must be together to go back.
    """

    def __init__(self, wrapper: Reconnecting) -> None:
        self._wrapper = wrapper
        self._wire, self._group, self._policy = wrapper.wire, wrapper.process_group, wrapper.current_policy()
        alone = Choice(communicator=InProcessWorld(1).communicator(0), reason="this rank trains by itself")
        # Communication hooks use their own group whatever the communicator is, and others may count windows.
        wrapper.reconnect(alone, dataclasses.replace(self._policy, reduction=Mean()))

    def end(self) -> None:
        """Average gradients over the previous ranks again. Collective, between two windows."""
        self._wrapper.reconnect(self._wire, self._policy)
        self._wrapper.process_group = self._group

    def give_up(self, reason: str) -> None:
        """Make the wrapper refuse to go on: ranks may not hold the same parameters. Not collective."""
        self._wrapper.synchronizer.refuse(reason)
