"""A wrapped model that trains without the other ranks for a while: see :class:`~gradsync.LocalSteps`."""

import dataclasses
from typing import Any, Protocol

from gradsync.communicator import Choice, InProcessWorld
from gradsync.core.engine.policy import SyncPolicy
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.core.reduction import Mean

__all__ = ["TrainingAlone"]


class Reconnecting(Protocol):
    """A wrapper that can go on over another wire."""

    wire: Choice
    process_group: Any
    synchronizer: Synchronizer

    def current_policy(self) -> SyncPolicy: ...

    def reconnect(self, wire: Choice, policy: SyncPolicy) -> None: ...


class TrainingAlone:
    """Until :meth:`end` there is no other rank for ``wrapper``: windows, their weights and clipping are this rank's
    own, and nothing is sent. Parameters may come to differ between ranks; whoever ends it makes them equal.

    Not a context, and nothing happens when it is forgotten: to go back ranks must be together.
    """

    def __init__(self, wrapper: Reconnecting) -> None:
        self._wrapper = wrapper
        self._wire, self._group, self._policy = wrapper.wire, wrapper.process_group, wrapper.current_policy()
        alone = Choice(communicator=InProcessWorld(1).communicator(0), reason="this rank trains by itself")
        # Communication hooks speak to their group whatever the communicator is, and others may count windows.
        wrapper.reconnect(alone, dataclasses.replace(self._policy, reduction=Mean()))

    def end(self) -> None:
        """Average gradients over the ranks of before again. Collective, between two windows."""
        self._wrapper.reconnect(self._wire, self._policy)
        self._wrapper.process_group = self._group

    def give_up(self, reason: str) -> None:
        """Let the wrapper refuse to go on: nobody knows whether ranks hold the same parameters. Not collective."""
        self._wrapper.synchronizer.refuse(reason)
