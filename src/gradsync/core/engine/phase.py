"""State machine of the engine, and the switches that wrappers have set.

::

                 ┌────────────── backward ends, nothing sent ──────────────┐
                 ▼                                                         │
    IDLE ── a backward begins ──▶ LOCAL ── its forward synchronizes ──▶ SYNCHRONIZING ── all buckets finished ──▶ IDLE
      │                             │                                      │
      ├── synchronize(), fail() ────┼──────────────────────────────────────┤
      └── its start fails ──────────┴──── backward fails ────▶ BROKEN ◀────┘  a rank or the link failed
                                                                 ├── gradients zeroed ──▶ IDLE
                                                                 └── the others must be told ──▶ SYNCHRONIZING

    DETACHED: the hooks are gone for good.
"""

import enum
import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Phase", "Phases", "Switches"]

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

    def let_synchronize(self, forward_synchronizes: bool) -> bool:
        """Whether a backward synchronizes, given whether the forward it reached does."""
        return self.enabled and (forward_synchronizes or self.forced)

    @contextmanager
    def set(
        self, *, enabled: bool | None = None, forced: bool | None = None, steps_locally: bool | None = None
    ) -> Iterator[None]:
        """Set the given switches temporarily."""
        before = self.enabled, self.forced, self.steps_locally
        self.enabled = self.enabled if enabled is None else enabled
        self.forced = self.forced if forced is None else forced
        self.steps_locally = self.steps_locally if steps_locally is None else steps_locally
        try:
            yield
        finally:
            self.enabled, self.forced, self.steps_locally = before
