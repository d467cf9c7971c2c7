"""The state of an engine: its phase, what users have switched, and what an interrupt would cut short.

::

                 ┌────────────── backward ends, nothing sent ──────────────┐
                 ▼                                                         │
    IDLE ── a backward begins ──▶ LOCAL ── its forward synchronizes ──▶ SYNCHRONIZING ── all buckets finished ──▶ IDLE
      │                             │                                      │
      ├── synchronize(), fail() ────┼──────────────────────────────────────┤
      └── its start fails ──────────┴──── backward fails ────▶ BROKEN ◀────┘  a rank or the link failed
                                                                 ├── gradients zeroed ──▶ IDLE
                                                                 └── the others must be notified ──▶ SYNCHRONIZING

    DETACHED: the hooks are gone for good.

[Note: an interrupt] Ctrl-C, or a signal handler that raises, may cut the engine short between any two lines. Between
two collectives the engine knows what it has started: the interrupt is handled like a failed backward. While one is
being started, or several follow each other, nothing shows which of them the other ranks will wait for. Going on could
pair a collective of this rank with a different one of theirs, and average two windows into one. So the communicator is
aborted then: every rank raises CommunicatorLostError at once.
"""

import enum
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

__all__ = ["CollectiveSection", "Phase", "Phases", "Switches"]

LOGGER = logging.getLogger("gradsync")


class Phase(enum.Enum):
    """The states of the engine."""

    IDLE = "no backward runs"
    LOCAL = "a backward runs, and its gradients stay on this rank"
    SYNCHRONIZING = "gradients are on their way to all ranks"
    BROKEN = "a backward failed, here or elsewhere, and gradients must be zeroed"
    DETACHED = "nothing is synchronized any more"


_NEXT = {
    Phase.IDLE: {Phase.LOCAL, Phase.SYNCHRONIZING, Phase.BROKEN, Phase.DETACHED},
    Phase.LOCAL: {Phase.SYNCHRONIZING, Phase.IDLE, Phase.BROKEN, Phase.DETACHED},
    Phase.SYNCHRONIZING: {Phase.IDLE, Phase.BROKEN, Phase.DETACHED},
    Phase.BROKEN: {Phase.IDLE, Phase.SYNCHRONIZING, Phase.BROKEN, Phase.DETACHED},
    Phase.DETACHED: {Phase.DETACHED},
}


class Phases:
    """The current phase of one engine, and the only way to change it."""

    def __init__(self) -> None:
        self.now = Phase.IDLE
        # The graph task of the running backward.
        self.task: int | None = None
        # Empty during a backward or a synchronization. Hooks hold the list itself: testing it is the cheapest check
        # there is, and one runs for every parameter.
        self.idle = [True]

    def enter(self, phase: Phase) -> None:
        # Not an assertion: under python -O the engine would continue in a phase that it is not in.
        if phase not in _NEXT[self.now]:
            raise RuntimeError(f"gradsync's engine cannot go from {self.now.name} to {phase.name}: this is a bug of it")
        LOGGER.debug("%s: %s", phase.name.lower(), phase.value)
        self.now = phase
        self.idle[:] = [] if self.busy else [True]

    def leave(self, phase: Phase) -> None:
        """Leave the phase: a backward or synchronization is over. A hook in it may have detached the engine."""
        if self.now is not Phase.DETACHED:
            self.enter(phase)

    @property
    def busy(self) -> bool:
        """Whether a backward or a synchronization runs."""
        return self.now is Phase.LOCAL or self.now is Phase.SYNCHRONIZING


class Switches:
    """Settings that users switch; read at the first sign of a backward, and before a step.

    ``enabled``: backwards synchronize. ``forced``: so do backwards of forwards that ran without. ``steps_locally``:
    optimizers may step on this rank's own gradients.
    """

    def __init__(self) -> None:
        self.enabled, self.forced, self.steps_locally = True, False, False

    def lets_synchronize(self, forward_synchronizes: bool) -> bool:
        """Whether a backward synchronizes, given whether the forward it reached does."""
        return self.enabled and (forward_synchronizes or self.forced)

    @contextmanager
    def set(
        self, *, enabled: bool | None = None, forced: bool | None = None, steps_locally: bool | None = None
    ) -> Iterator[None]:
        """Set the given switches for a while; they are restored even after an exception."""
        before = self.enabled, self.forced, self.steps_locally
        self.enabled = self.enabled if enabled is None else enabled
        self.forced = self.forced if forced is None else forced
        self.steps_locally = self.steps_locally if steps_locally is None else steps_locally
        try:
            yield
        finally:
            self.enabled, self.forced, self.steps_locally = before


class CollectiveSection:
    """Context manager around collectives that must run as a whole; :attr:`cut_short` if an interrupt hit it midway.

    An ordinary error does not count: whatever raises it knows which collectives it has started.
    """

    def __init__(self) -> None:
        # Only a section that ends clears its mark: an interrupt may come before, inside or after any line here.
        self._open = 0

    @property
    def cut_short(self) -> bool:
        return self._open > 0

    def reset(self) -> None:
        self._open = 0

    def __enter__(self) -> None:
        self._open += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, Exception):
            self._open -= 1
