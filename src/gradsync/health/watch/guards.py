"""Guards the communicators over one group: finds waits for a rank that has exited, or that last too long, and ends
them.

On a device it is the stream that waits. Where the backend reports which collectives the device has finished
(:mod:`gradsync.communicator.outstanding`), this rank waits for the oldest outstanding one. Where the backend does not
report it, the rank may be waiting for the last collective that it started.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from gradsync.communicator import BaseCommunicator, ProcessGroupCommunicator
from gradsync.communicator.collective import Fate
from gradsync.health.watch.detector import ExitRecord
from gradsync.health.watch.status import Wait

__all__ = ["Guards", "Overdue"]

# How long a wait must have lasted. A collective that a killed rank had done its part of ends by itself within that; one
# that left has told what it did.
GRACE_SECONDS = 0.4
LEFT_SECONDS = 0.1
# The same on a device, of what the rank that left had started: its device ends it a moment later, or not at all.
LEFT_ON_DEVICE_SECONDS = 5.0
MOST_WIRES = 64


class Overdue(NamedTuple):
    """A collective that the device has been running for too long, on the communicator of that number."""

    wire: int
    what: str
    seconds: float


class _Waiting(NamedTuple):
    """A wait on a communicator: at which place, and since when. On a device, also whether its collective has failed."""

    place: int
    since: float
    on_device: bool = False
    has_failed: bool = False


class Guards:
    """Communicators by number. All ranks use the same numbers: they register in one order, the group itself first."""

    def __init__(self, group: Any, device_timeout: float = math.inf) -> None:
        self.fates: list[Fate] = []
        self._device_timeout = device_timeout
        self._group = weakref.ref(group)
        self._wires: list[tuple[int, weakref.ref[BaseCommunicator]]] = []
        # Those on which the host never waits: their collectives are ordered on a device.
        self._ahead: set[int] = set()

    def add(self, wire: BaseCommunicator, witness: Callable[[str], str]) -> None:
        if all(fate is not wire.fate for fate in self.fates) and len(self.fates) < MOST_WIRES:
            # Another list: the thread of the watch may be looking at this one.
            self.fates = [*self.fates, wire.fate]
        for number in [number for number, fate in enumerate(self.fates) if fate is wire.fate]:
            if all(each() is not wire for _, each in self._wires):
                alive = [each for each in self._wires if each[1]() is not None]
                self._wires = [*alive, (number, weakref.ref(wire))]
            if wire.device.type != "cpu":
                self._ahead.add(number)
            wire.fate.witness = witness
            wire.fate.device_timeout = self._device_timeout

    def stranded(self, exits: Sequence[tuple[ExitRecord, float]], now: float) -> Iterator[tuple[int, ExitRecord]]:
        """Communicators on which somebody waits in vain, each with the exit record that causes it.

        Only for exits noticed at the given times.
        """
        for number, fate in enumerate(self.fates):
            waits = self._waits_on(number, fate)
            guilty = [
                exit_record
                for exit_record, noticed in exits
                if fate.failure is None and any(_in_vain(exit_record, number, wait, noticed, now) for wait in waits)
            ]
            if guilty:
                yield number, guilty[0]

    def _waits_on(self, number: int, fate: Fate) -> list[_Waiting]:
        # A copy is made in one go, whatever other threads do to it.
        waits = [_Waiting(collective.place, since) for collective, since in fate.waits.copy().items()]
        if fate.outstanding is not None:
            oldest = fate.outstanding.oldest()
            if oldest is not None:
                waits.append(_Waiting(oldest[0].place, oldest[1], on_device=True, has_failed=oldest[0].has_failed))
        elif number in self._ahead:
            # What was started last waits on the device, for all that is known.
            waits.append(_Waiting(fate.started, 0.0))
        return waits

    def refuse_new(self, exit_record: ExitRecord, message: str) -> None:
        """A rank has ended: what is started on a device from now on cannot end, unless it has taken part in that."""
        for number, fate in enumerate(self.fates):
            started = exit_record.status.started
            lost_after = started[number] if exit_record.left and number < len(started) else 0
            if fate.lost_rank is None or lost_after < fate.lost_after:
                fate.lost_after, fate.lost_rank = lost_after, message

    # -- on a device, where no wait of the host ends by itself ---------------------------------------------------------

    def deadline(self) -> float:
        """The time at which the device will have been running a collective for too long."""
        limit = self._device_timeout
        return min((started_at + limit for _, started_at, _ in self._on_devices()), default=math.inf)

    def overdue(self, now: float) -> list[Overdue]:
        """Collectives that have been under way for too long. As torch counts it: since the host has started them,
        however long the device took to come to them."""
        limit = self._device_timeout
        return [
            Overdue(number, what, now - started_at)
            for number, started_at, what in self._on_devices()
            if now - started_at >= limit
        ]

    def _on_devices(self) -> Iterator[tuple[int, float, str]]:
        for number, fate in enumerate(self.fates):
            oldest = None if fate.outstanding is None or fate.failure is not None else fate.outstanding.oldest()
            if oldest is not None:
                yield number, oldest[0].started_at, oldest[0].describe()

    def lose(self, number: int, story: str) -> None:
        """Raise ``story`` in every wait on the communicator, and in every later use."""
        for wire in self._wires_of(number):
            wire.lose(story)

    def _wires_of(self, number: int) -> list[BaseCommunicator]:
        wires = [wire for each, reference in self._wires if each == number and (wire := reference()) is not None]
        group = self._group()
        if number == 0 and group is not None:
            # Made for the moment: one that is kept would keep the group. One that is destroyed has none.
            with contextlib.suppress(ValueError, RuntimeError):
                wires.append(ProcessGroupCommunicator(group))
        return wires


def _in_vain(exit_record: ExitRecord, number: int, wait: _Waiting, noticed: float, now: float) -> bool:
    waited = now - max(wait.since, noticed)
    if exit_record.strands(Wait(wire=number, place=wait.place, what="", seconds=0.0)):
        return wait.has_failed or waited >= (LEFT_SECONDS if exit_record.left else GRACE_SECONDS)
    # On a device, to have started something is not to have done it.
    return wait.on_device and (wait.has_failed or waited >= LEFT_ON_DEVICE_SECONDS)
