"""Converts marks to steps. During a step only marks are kept; they are interpreted when somebody asks.

Between two marks a rank does one thing. Which one is known at the latest from the mark that ends it:

- fetching a batch, as loaders report, is ``data``;
- other time between an optimizer's step (or a micro-batch) and the next forward is the ``loop``'s own code, or
  ``other`` if the model was evaluated there;
- time between a backward and the optimizer's step, such as clipping, is ``other``;
- a loss that is computed after the forward, and its own backward, are part of ``forward``.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

from gradsync.observe.recording.steps import BucketTimes, GatherTimes, Span, Step, Synchronization

__all__ = ["Kind", "Marks", "Read", "read_step"]


class Kind(enum.IntEnum):
    """What a mark says."""

    EVALUATION = enum.auto()
    FORWARD = enum.auto()
    FORWARD_END = enum.auto()
    BACKWARD = enum.auto()
    FULL = enum.auto()
    READY = enum.auto()
    START = enum.auto()
    BACKWARD_END = enum.auto()
    FINISH = enum.auto()
    SYNCHRONIZED = enum.auto()
    STEP = enum.auto()
    STEP_END = enum.auto()
    NEEDED = enum.auto()
    ARRIVED = enum.auto()
    LOADING = enum.auto()
    LOADED = enum.auto()


# What, of what (a bucket's index, or what becomes of it on the wire: index, start, and when it was reduced; of a
# backward how long its thread had been on a core), when.
Marks = list[tuple[Kind, Any, Any]]

# A moment, as marks have it, in seconds.
Read = Callable[[Any], float]

# What goes on where no mark says so: it is named by what follows.
_GAP = "gap"
# A backward has ended; if a synchronization follows it has begun.
_ENDING = "ending"


class _Walk:
    """Goes from mark to mark, and cuts the step into spans."""

    def __init__(self, begin: float) -> None:
        self.spans: list[Span] = []
        self.synchronizations: list[Synchronization] = []
        self.micro_batches = 0
        self._cursor = begin
        self._doing = _GAP
        self._before_gather = self._before_loading = _GAP
        self._in_step = self._evaluated = False
        self._forget()

    def _forget(self) -> None:
        self._began: float | None = None
        self._on_core: float | None = None
        self._busy: float | None = None
        self._ended: float | None = None
        self._full: dict[int, float] = {}
        self._ready: dict[int, float] = {}
        self._started: dict[int, Any] = {}
        self._finished: dict[int, float] = {}

    def _until(self, now: float, gap: str = "other") -> None:
        """What was done until now is over."""
        name = gap if self._doing in (_GAP, _ENDING) else self._doing
        if now > self._cursor:
            last = self.spans[-1] if self.spans else None
            if last is not None and last.name == name:
                self.spans[-1] = Span(name=name, begin=last.begin, end=now)
            else:
                self.spans.append(Span(name=name, begin=self._cursor, end=now))
            self._cursor = now

    @property
    def _gap(self) -> str:
        """What precedes a forward, or the loading of a batch."""
        return "other" if self._evaluated else "loop"

    @property
    def _idle(self) -> str:
        return "optimizer" if self._in_step else _GAP

    def pass_by(self, kind: Kind, what: Any, now: float) -> None:
        """The next mark."""
        if kind is Kind.FORWARD:
            self._until(now, gap=self._gap)
            self._doing, self._evaluated = "forward", False
        elif kind is Kind.BACKWARD:
            self._until(now)
            self._doing = "backward"
            self.micro_batches += 1
            self._full.clear()
            self._ready.clear()
            self._began, self._ended = now, None
            self._on_core, self._busy = what, None
        elif kind is Kind.BACKWARD_END:
            self._until(now)
            self._doing, self._ended = _ENDING, now
            if what is not None and self._on_core is not None:
                self._busy = what - self._on_core
        elif kind is Kind.STEP:
            self._until(now)
            self._doing, self._in_step = "optimizer", True
        elif kind is Kind.STEP_END:
            self._until(now)
            self._doing, self._in_step = _GAP, False
        elif kind is Kind.NEEDED:
            self._until(now)
            self._before_gather, self._doing = self._doing, "gather"
        elif kind is Kind.ARRIVED:
            self._until(now)
            self._doing = self._before_gather
        elif kind is Kind.LOADING:
            self._until(now, gap=self._gap)
            self._before_loading, self._doing = self._doing, "data"
        elif kind is Kind.LOADED and self._doing == "data":
            self._until(now)
            self._doing = self._before_loading
        elif kind is Kind.FULL:
            self._full[what] = now
        elif kind is Kind.READY:
            self._ready[what] = now
        elif kind is Kind.FINISH:
            self._finished[what] = now
        elif kind is Kind.SYNCHRONIZED:
            self._synchronized(now)

    def evaluated(self) -> None:
        """The model ran without gradients."""
        self._evaluated = True

    def start(self, entry: Any, read: Read) -> None:
        """A bucket was put on the wire."""
        index, start, reduced = entry
        self._started[index] = (read(start), None if reduced is None else read(reduced))
        if self._doing == _GAP:
            # Without a backward: by synchronize(), or for want of one on this rank.
            self._until(self._started[index][0])
            self._began = self._ended = self._cursor
            self._doing = _ENDING

    def _synchronized(self, now: float) -> None:
        if self._doing == _ENDING:
            self._doing = "synchronization"
        self._until(now)
        begin = now if self._began is None else self._began
        buckets = tuple(
            BucketTimes(
                index=index,
                full=self._full.get(index),
                ready=self._ready.get(index),
                start=start,
                reduced=reduced,
                finish=self._finished.get(index),
            )
            for index, (start, reduced) in sorted(self._started.items())
        )
        end = now if self._ended is None else self._ended
        # Less than nothing: it has ended on another thread than it began on. Two clocks are read one after the other.
        busy = None if self._busy is None or self._busy < 0 else min(self._busy, end - begin)
        self.synchronizations.append(
            Synchronization(begin=begin, backward_end=end, finished=now, buckets=buckets, busy=busy)
        )
        self._forget()
        self._doing = self._idle

    def end(self, now: float) -> None:
        self._until(now)


def read_step(
    marks: Marks, gathers: Sequence[Sequence[Any]], *, read: Read, number: int, layout: int, begin: Any
) -> Step:
    """The step that the marks describe. The last mark is its end."""
    first, last = read(begin), read(marks[-1][2])
    walk = _Walk(first)
    for kind, what, moment in marks:
        if kind is Kind.START:
            walk.start(what, read)
        elif kind is Kind.EVALUATION:
            walk.evaluated()
        else:
            walk.pass_by(kind, what, read(moment))
    walk.end(last)
    return Step(
        number=number,
        layout=layout,
        begin=first,
        end=last,
        micro_batches=walk.micro_batches,
        spans=tuple(walk.spans),
        synchronizations=tuple(walk.synchronizations),
        gathers=tuple(
            GatherTimes(
                index=index,
                nbytes=nbytes,
                start=read(start),
                **{
                    name: None if moment is None else read(moment)
                    for name, moment in zip(("end", "needed", "arrived"), rest, strict=True)
                },
            )
            for index, nbytes, start, *rest in gathers
        ),
    )
