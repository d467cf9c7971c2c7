"""A rank's status, as it reports it once a second: what its engine does, and which collective it waits for.

Nothing is recorded on the path of backward: a thread of the watch reads, without a lock, the state that engines and
communicators keep anyway. What it sees may be slightly old, or half of one moment and half of the next.
"""

import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradsync.communicator.transport_state import TransportState
from gradsync.health.watch.pace_meter import PaceMeter

__all__ = ["MOST_LETTERS", "UNKNOWN", "Model", "Position", "RankStatus", "Sampler", "Wait", "stack_of"]

# Messages about one rank stay short, whatever is named in them.
MOST_LETTERS = 300
MOST_WAITS = 8
MOST_FRAMES = 8


@dataclass(frozen=True, kw_only=True)
class Position:
    """What an engine is doing: ``windows`` it has synchronized, the name of its phase, its buckets' progress."""

    windows: int
    phase: str
    progress: str
    busy: bool


class Model(Protocol):
    """The part of a synchronizer that the watch uses."""

    def position(self) -> Position:
        """The position of its engine. May be called on any thread, at any time."""

    def describe(self) -> str:
        """The position at length, in lines."""

    @property
    def pace(self) -> PaceMeter:
        """The meter that has measured its windows."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A collective that a rank waits for: the ``place``-th that it started on the communicator of that number."""

    communicator: int
    place: int
    what: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What a rank reports of itself.

    ``seconds``: how long the status has been the same; ``started``: the number of collectives, by communicator.
    """

    windows: int
    phase: str
    progress: str
    seconds: float
    started: tuple[int, ...] = ()
    waits: tuple[Wait, ...] = ()
    stack: tuple[str, ...] = ()


# Of a rank that has reported nothing yet, or nothing that can be read.
UNKNOWN = RankStatus(windows=0, phase="", progress="", seconds=0.0)


class Sampler:
    """Reads the status of this rank: of the models over one group, and of the group's communicators.

    ``states`` are the states of these, by their numbers.
    """

    def __init__(
        self, states: Callable[[], Sequence[TransportState]], *, shows_stack_after: float | None = None
    ) -> None:
        self._states = states
        # By the order in which they came, which is the same on all ranks.
        self._models: list[tuple[int, weakref.ref[Model]]] = []
        self._added = 0
        self._shows_stack_after = shows_stack_after
        self._seen: tuple[object, ...] = ()
        self._last = Position(windows=0, phase="idle", progress="no model is wrapped", busy=False)
        self._since = time.monotonic()

    def add(self, model: Model) -> None:
        if all(each() is not model for _, each in self._models):
            alive = [(number, each) for number, each in self._models if each() is not None]
            self._models = [*alive, (self._added, weakref.ref(model))]
            self._added += 1

    @property
    def models(self) -> list[Model]:
        return [model for _, each in self._models if (model := each()) is not None]

    @property
    def meter(self) -> tuple[int, PaceMeter] | None:
        """The meter of the first model that is left, with the model's number.

        Always the first: ranks look at different moments, and would compare two models else.
        """
        return next(((number, model.pace) for number, each in self._models if (model := each()) is not None), None)

    def sample(self, now: float) -> RankStatus:
        model = self._current()
        started = tuple(state.started for state in self._states())
        waits = self._waits(now)
        # A rank that has only started, or finished, a collective has moved on, too.
        seen = (model, started, *((wait.communicator, wait.place) for wait in waits))
        if seen != self._seen:
            self._seen, self._since = seen, now
        seconds = now - self._since
        limit = self._shows_stack_after
        return RankStatus(
            windows=model.windows,
            phase=model.phase,
            progress=model.progress[:MOST_LETTERS],
            seconds=round(seconds, 1),
            started=started,
            waits=waits,
            stack=tuple(stack_of()[-MOST_FRAMES:]) if limit is not None and seconds >= limit else (),
        )

    def _current(self) -> Position:
        """The position of the model which is at work, or else has come furthest."""
        seen = []
        for model in self.models:
            try:
                seen.append(model.position())
            except Exception:  # it is changed at this very moment; the next look comes in a second
                continue
        # A script that ends has released its models before its exit message is sent.
        self._last = max(seen, key=lambda each: (each.busy, each.windows), default=self._last)
        return self._last

    def _waits(self, now: float) -> tuple[Wait, ...]:
        waits = [
            Wait(
                communicator=number,
                place=each.place,
                what=each.describe()[:MOST_LETTERS],
                seconds=round(max(0.0, now - each.since), 1),
            )
            for number, state in enumerate(self._states())
            for each in state.pending_waits()
        ]
        return tuple(waits[:MOST_WAITS])


def stack_of(thread: int | None = None) -> list[str]:
    """The Python stack of a thread, by default the main one, a line a frame, the innermost last."""
    number = threading.main_thread().ident if thread is None else thread
    frame = sys._current_frames().get(number or 0)
    frames: Sequence[traceback.FrameSummary] = traceback.extract_stack(frame) if frame is not None else []
    return [f"{each.filename}:{each.lineno} {each.name}"[-MOST_LETTERS:] for each in frames]
