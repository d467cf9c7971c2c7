"""The wires over one group: who waits on them for a rank that has ended, and how that wait is ended."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gradsync.communicator import ProcessGroupCommunicator, Wire
from gradsync.communicator.collective import Fate
from gradsync.watch.judge import Ending
from gradsync.watch.standing import Wait

__all__ = ["Guards"]

# How long a wait must have lasted. A collective that a killed rank had done its part of ends by itself within that; one
# that left has told what it did.
GRACE_SECONDS = 0.4
LEFT_SECONDS = 0.1
MOST_WIRES = 64


class Guards:
    """Wires by their numbers, which are the same on all ranks: they come in one order, the group itself first."""

    def __init__(self, group: Any) -> None:
        self.fates: list[Fate] = []
        self._group = weakref.ref(group)
        self._wires: list[tuple[int, weakref.ref[Wire]]] = []
        # Those on which the host never waits: their collectives are ordered on a device.
        self._ahead: set[int] = set()

    def add(self, wire: Wire, witness: Callable[[str], str]) -> None:
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

    def stranded(self, endings: Sequence[tuple[Ending, float]], now: float) -> Iterator[tuple[int, Ending]]:
        """Wires on which somebody waits in vain, each with the ending by which it does, of those that were noticed at
        the given times."""
        for number, fate in enumerate(self.fates):
            # A copy is made in one go, whatever other threads do to it.
            waits = [(collective.place, since) for collective, since in fate.waits.copy().items()]
            if number in self._ahead:
                # What was started last waits on the device.
                waits.append((fate.started, 0.0))
            guilty = [
                ending
                for ending, noticed in endings
                if fate.failure is None and any(_in_vain(ending, number, wait, noticed, now) for wait in waits)
            ]
            if guilty:
                yield number, guilty[0]

    def lose(self, number: int, story: str) -> None:
        """Whoever waits on the wire raises ``story``, and so does whoever uses it later."""
        for wire in self._wires_of(number):
            wire.lose(story)

    def _wires_of(self, number: int) -> list[Wire]:
        wires = [wire for each, reference in self._wires if each == number and (wire := reference()) is not None]
        group = self._group()
        if number == 0 and group is not None:
            # Made for the moment: one that is kept would keep the group. One that is destroyed has none.
            with contextlib.suppress(ValueError, RuntimeError):
                wires.append(ProcessGroupCommunicator(group))
        return wires


def _in_vain(ending: Ending, number: int, wait: tuple[int, float], noticed: float, now: float) -> bool:
    place, began = wait
    grace = LEFT_SECONDS if ending.left else GRACE_SECONDS
    long_enough = now - max(began, noticed) >= grace
    return long_enough and ending.strands(Wait(wire=number, place=place, what="", seconds=0.0))
