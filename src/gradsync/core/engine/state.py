"""The state of an engine: its phase, what users have switched, and this rank's part of the window.

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

[Note: the same window] A rank that abstains takes part at once, where its backward would have, and the other ranks have
ended the window. If it abstained a second time, or ran the backward of its forward after all, that would count as its
part in their next window, and from then on it would be one window ahead. So a further ``abstain()`` needs evidence that
the window has ended here too: a step, gradients that were zeroed, a forward, or a block of ``accumulate()``.

[Note: an interrupt] Ctrl-C, or a signal handler that raises, may cut the engine short between any two lines. Between
two collectives the engine knows what it has started: the interrupt is handled like a failed backward. While one is
being started, or several follow each other, nothing shows which of them the other ranks will wait for. Going on could
pair a collective of this rank with a different one of theirs, and average two windows into one. So the communicator is
aborted then: every rank raises CommunicatorLostError at once.
"""

import enum
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch

from gradsync.base.errors import MisuseError
from gradsync.core.bucket import Bucket
from gradsync.core.window import TamperCheck

__all__ = ["CollectiveSection", "Phase", "Phases", "Reported", "Switches", "WindowRecord"]

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
        """A backward or synchronization is over. A hook may have detached the engine in the middle of it."""
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

    def let_synchronize(self, forward_synchronizes: bool) -> bool:
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


class Reported(enum.Enum):
    """What this rank has reported to the others in the place of a backward."""

    FAILED = "its backward failed"
    ABSTAINED = "it abstains"


class WindowRecord:
    """This rank's part of a window: its forwards, how it ended, and what it has reported of it to the others.

    A parameter is absent from a window if every forward of the window has announced it as absent, as modules do that
    leave layers out.
    """

    def __init__(self) -> None:
        # Windows that all ranks have synchronized, and failures that all of them know of.
        self.synchronized = self.failed = 0
        # Whether no rank waits for this one in the running synchronization any more, however it ends here.
        self.exchanged = False
        # What the others know of the window that has ended last, if nothing has begun since.
        self.reported: Reported | None = None
        # How often this rank has abstained. The backwards of forwards that ran before the last time are refused.
        self.abstentions = 0
        # It has abstained, and what the window left behind shows whether it was zeroed since.
        self._abstained = False
        self._left = TamperCheck()
        # Whether a forward ran in this window, and in the running micro-batch of accumulate().
        self.any_forward = self.any_in_block = False
        # A forward has begun, whether or not it completed, and no backward has ended since.
        self.awaits_backward = False
        # None once its backward has ended.
        self.last_synchronizes: bool | None = None
        self._absent_now: set[int] | None = None
        self._absent: set[int] | None = None

    @property
    def ends(self) -> int:
        """How many synchronizations have ended, successfully or not."""
        return self.synchronized + self.failed

    # -- forwards --------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        self.any_forward = self.any_in_block = self.awaits_backward = True
        self._absent_now = set()

    def end_forward(self, *, synchronizes: bool) -> None:
        self.last_synchronizes = synchronizes
        if self._absent_now is not None:
            self._absent = self._absent_now if self._absent is None else self._absent & self._absent_now
            self._absent_now = None

    def miss_forward(self) -> None:
        """This rank has taken part in a forward of the others without running one of its own."""
        self.any_forward = self.any_in_block = True

    def announce_absent(self, indices: Iterable[int]) -> None:
        """The running forward leaves these parameters out. Has no effect outside a forward."""
        if self._absent_now is not None:
            self._absent_now.update(indices)

    def announce_all_absent(self, count: int) -> None:
        """A rank without data leaves out all parameters."""
        self._absent = set(range(count))

    @property
    def absent(self) -> set[int]:
        """The parameters that no forward of the window has used."""
        return self._absent or set()

    def close_backward(self) -> None:
        self.awaits_backward = False
        self.last_synchronizes = None

    def close_window(self) -> None:
        self.any_forward = self.awaits_backward = False
        self._absent = None

    # -- abstaining: see [Note: the same window] -------------------------------------------------------------------

    def abstained(self, buckets: Sequence[Bucket], outside: Iterable[torch.nn.Parameter]) -> None:
        """All ranks know that this one abstains, and the window is over for them."""
        self.abstentions += 1
        self._abstained, self.reported = True, Reported.ABSTAINED
        self._left.note(buckets, outside)

    def begin_another(self) -> None:
        """Everything from here on belongs to a window that the other ranks do not know of."""
        self.reported = None
        self.end_abstention()

    def end_abstention(self) -> None:
        """Everything from here on belongs to a window after the one from which this rank has abstained."""
        self._abstained = False
        self._left.forget()

    @property
    def has_abstained(self) -> bool:
        """Whether this rank may no longer contribute to the window."""
        if self._abstained and (self._left.has_lost or self._left.has_changed):
            self.end_abstention()
        return self._abstained

    def refuse_second_abstention(self) -> None:
        if self.has_abstained:
            raise MisuseError(
                "abstain() was called a second time in one window, of which all ranks know by the first, or by "
                "an error in backward. If it is meant for the next window, end this one first: call optimizer.step() "
                "on this rank as on the others (it changes nothing where the window is skipped), or zero_grad()"
            )

    def refuse_backward(self) -> None:
        """Refuse the backward of a forward that ran before the abstention."""
        raise MisuseError(
            "a backward has reached a forward from which this rank has abstained: abstain() stands in the place of the "
            "backward, and the other ranks have ended the window by now. Drop this loss, and end the window on this "
            "rank as on the others, with optimizer.step() or zero_grad()"
        )


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
