"""Guards the communicators over one group: finds waits for a rank that has exited, or that last too long, and ends
them.

On a device it is the stream that waits. Where the backend reports which collectives the device has finished
(:mod:`gradsync.communicator.transport_state`), this rank waits for the oldest outstanding one. Where the backend does
not report it, the rank may be waiting for the last collective that it started.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from gradsync.communicator import BaseCommunicator, ProcessGroupCommunicator
from gradsync.communicator.transport_state import PendingWait, StartedCollective, TransportState
from gradsync.health.watch.detector import ExitRecord

__all__ = ["Guards"]

# How long a wait must have lasted. A collective that a killed rank had done its part of ends by itself within that; one
# that left has reported what it did.
GRACE_SECONDS = 0.4
LEFT_SECONDS = 0.1
# The same on a device, of what the rank that left had started: its device ends it a moment later, or not at all.
LEFT_ON_DEVICE_SECONDS = 5.0
MOST_COMMUNICATORS = 64


class Guards:
    """The guarded communicators of one group, by number.

    All ranks use the same numbers: they register in one order, the group itself first.
    """

    def __init__(self, group: Any, device_timeout: float = math.inf) -> None:
        self.states: list[TransportState] = []
        self._device_timeout = device_timeout
        self._group = weakref.ref(group)
        self._communicators: list[tuple[int, weakref.ref[BaseCommunicator]]] = []
        # Those on which the host never waits: their collectives are ordered on a device.
        self._ahead: set[int] = set()

    def add(
        self,
        communicator: BaseCommunicator,
        complete_message: Callable[[str], str],
        report_given_up: Callable[[int, str], None],
    ) -> None:
        state = communicator.state
        if state not in self.states and len(self.states) < MOST_COMMUNICATORS:
            # Another list: the thread of the watch may be looking at this one.
            self.states = [*self.states, state]
        if state not in self.states:
            return
        number = self.states.index(state)
        if all(each() is not communicator for _, each in self._communicators):
            alive = [each for each in self._communicators if each[1]() is not None]
            self._communicators = [*alive, (number, weakref.ref(communicator))]
        if communicator.device.type != "cpu":
            self._ahead.add(number)
        state.complete_message = complete_message
        state.report_given_up = partial(report_given_up, number)
        state.device_timeout = self._device_timeout

    def find_stranded(self, exits: Sequence[tuple[ExitRecord, float]], now: float) -> Iterator[tuple[int, ExitRecord]]:
        """Communicators on which somebody waits in vain, each with the exit record that causes it.

        Only for exits noticed at the given times.
        """
        for number, state in enumerate(self.states):
            if state.failure is not None:
                continue
            waits = state.pending_waits()
            if state.outstanding is None and number in self._ahead:
                # What was started last waits on the device, for all that is known.
                waits = [PendingWait(state.started, 0.0, str)]
            for exit_record, noticed in exits:
                if any(_in_vain(exit_record, number, wait, noticed, now) for wait in waits):
                    yield number, exit_record
                    break

    def refuse_new(self, exit_record: ExitRecord, message: str) -> None:
        """Refuse collectives on a device from now on: a rank has ended, and those it has no part in cannot end."""
        for number, state in enumerate(self.states):
            started = exit_record.status.started
            lost_after = started[number] if exit_record.left and number < len(started) else 0
            if state.lost_rank is None or lost_after < state.lost_after:
                state.lost_after, state.lost_rank = lost_after, message

    # -- on a device, where no wait of the host ends by itself ---------------------------------------------------------

    def deadline(self) -> float:
        """The time at which the device will have been running a collective for too long."""
        return min((each.started_at + self._device_timeout for _, each in self._on_devices()), default=math.inf)

    def overdue(self, now: float) -> list[tuple[int, StartedCollective]]:
        """Collectives that have been under way for too long, with their communicator's number.

        Time counts as in torch: since the host has started them, however long the device took to come to them.
        """
        return [(number, each) for number, each in self._on_devices() if now - each.started_at >= self._device_timeout]

    def given_up(self, number: int, message: str) -> None:
        """Lose a communicator that another rank has given up. On the CPU its own connections tell, and tell more."""
        if not 0 <= number < len(self.states):
            return
        state = self.states[number]
        if state.failure is None and (number in self._ahead or state.outstanding is not None):
            self.lose(number, message)

    def _on_devices(self) -> Iterator[tuple[int, StartedCollective]]:
        for number, state in enumerate(self.states):
            oldest = None if state.outstanding is None or state.failure is not None else state.outstanding.oldest()
            if oldest is not None:
                yield number, oldest[0]

    def lose(self, number: int, message: str) -> None:
        """Raise ``message`` in every wait on the communicator, and in every later use."""
        lost = [made for each, reference in self._communicators if each == number and (made := reference()) is not None]
        group = self._group()
        if number == 0 and group is not None:
            # Made for the moment: one that is kept would keep the group. One that is destroyed has none.
            with contextlib.suppress(ValueError, RuntimeError):
                lost.append(ProcessGroupCommunicator(group))
        for communicator in lost:
            communicator.lose(message)


def _in_vain(exit_record: ExitRecord, number: int, wait: PendingWait, noticed: float, now: float) -> bool:
    waited = now - max(wait.since, noticed)
    if exit_record.strands(number, wait.place):
        return wait.has_failed or waited >= (LEFT_SECONDS if exit_record.left else GRACE_SECONDS)
    # On a device, to have started something is not to have done it.
    return wait.on_device and (wait.has_failed or waited >= LEFT_ON_DEVICE_SECONDS)
