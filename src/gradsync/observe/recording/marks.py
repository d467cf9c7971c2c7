"""Marks: what is noted during a step, and the step that is read from them later.

During a step only marks are kept, because a recorder is always on and must cost nearly nothing; they are interpreted
when somebody asks.

Between two marks a rank does one thing. Which one is known at the latest from the mark that ends it:

- fetching a batch, as loaders report, is ``data``;
- other time between an optimizer's step (or a micro-batch) and the next forward is the ``loop``'s own code, or
  ``other`` if the model was evaluated there;
- time between a backward and the optimizer's step, such as clipping, is ``other``;
- a loss that is computed after the forward, and its own backward, are part of ``forward``.
"""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

from gradsync.communicator import Handle
from gradsync.core.bucket.bucket import Bucket
from gradsync.observe.recording.files import GatherTimes, RecordedBucket, Span, Step, Synchronization

__all__ = ["Gather", "Marker", "Marks", "Read", "no_core_time", "read_step"]

# What a mark says. Plain numbers: looking up a member of an enumeration takes as long as all the rest of a mark.
EVALUATION, FORWARD, FORWARD_END, BACKWARD, BACKWARD_END, STEP, STEP_END, LOADING, LOADED = range(9)
FULL, READY, START, FINISH, SYNCHRONIZED, NEEDED, ARRIVED = range(9, 16)

# Kind, details, moment. Details are a bucket's index and bytes, for START also when it was reduced (a mark must not
# keep gradients alive); for the two of a backward how long its thread had been on a core.
Marks = list[tuple[int, Any, Any]]
# A bucket's index and bytes, and when its gather started, ended, was needed and arrived.
Gather = list[Any]
# A moment, as marks have it, in seconds.
Read = Callable[[Any], float]


def no_core_time() -> None:
    """Measure no time on a core: nobody asks for it, or backwards run on threads of their own, as on a GPU."""


class Marker:
    """Notes when a backward and its buckets reached each stage: the part of an observer that recorders and timelines
    have in common.

    Several threads call it. There is no lock: a signal handler that reads a parameter in here waits for another thread,
    which would wait for this one.
    """

    def __init__(self) -> None:
        self._now: Callable[[], Any] = time.perf_counter
        # Seconds that this thread has been on a core, where they tell something.
        self._on_core: Callable[[], float | None] = no_core_time
        self._marks: Marks = []
        # Those that were started since the last step; by bucket, those that nobody has waited for yet.
        self._gathers: list[Gather] = []
        self._waiting: dict[int, Gather] = {}

    def backward_began(self, *, synchronizes: bool) -> None:
        self._marks.append((BACKWARD, self._on_core(), self._now()))

    def bucket_ready(self, bucket: Bucket) -> None:
        self._marks.append((READY, (bucket.index, bucket.buffer.nbytes), self._now()))

    def bucket_started(self, bucket: Bucket, handle: Handle) -> None:
        details = [bucket.index, bucket.buffer.nbytes, None]
        self._marks.append((START, details, self._now()))
        # On the transport's own thread, and on CUDA on a stream that is ordered after the collective.
        handle.when_done(functools.partial(self._note_end, details, 2))

    def backward_ended(self) -> None:
        self._marks.append((BACKWARD_END, self._on_core(), self._now()))

    def bucket_finished(self, bucket: Bucket) -> None:
        self._marks.append((FINISH, (bucket.index, bucket.buffer.nbytes), self._now()))

    def synchronization_finished(self) -> None:
        self._marks.append((SYNCHRONIZED, None, self._now()))

    def gather_started(self, bucket: Bucket, handle: Handle) -> None:
        gather: Gather = [bucket.index, bucket.buffer.nbytes, self._now(), None, None, None]
        self._gathers.append(gather)
        self._waiting[bucket.index] = gather
        handle.when_done(functools.partial(self._note_end, gather, 3))

    def _note_end(self, details: list[Any], place: int) -> None:
        details[place] = self._now()


def read_step(marks: Marks, gathers: Iterable[Gather], *, read: Read, number: int, layout: int, begin: Any) -> Step:
    """The step that the marks describe. The last mark is its end."""
    first, last = read(begin), read(marks[-1][2])
    reader = _StepReader(first)
    for kind, details, moment in marks:
        if kind == EVALUATION:
            reader.evaluated = True
        elif kind == START:
            index, _, reduced = details
            reader.started(index, read(moment), None if reduced is None else read(reduced))
        else:
            reader.marked(kind, details, read(moment))
    reader.end_span(last)
    times = []
    for index, nbytes, start, *rest in gathers:
        began, (end, needed, arrived) = read(start), (None if each is None else read(each) for each in rest)
        times.append(GatherTimes(index=index, nbytes=nbytes, start=began, end=end, needed=needed, arrived=arrived))
    return Step(
        number=number,
        layout=layout,
        begin=first,
        end=last,
        micro_batches=reader.micro_batches,
        spans=tuple(reader.spans),
        synchronizations=tuple(reader.synchronizations),
        gathers=tuple(times),
    )


# What goes on where no mark says so: it is named by what follows.
_GAP = "gap"
# A backward has ended; if a synchronization follows it has begun.
_ENDING = "ending"
# What a mark begins, where it always begins the same.
_BEGINS = {FORWARD: "forward", BACKWARD: "backward", BACKWARD_END: _ENDING, STEP: "optimizer", STEP_END: _GAP}
_BEGINS |= {NEEDED: "gather", LOADING: "data"}


class _StepReader:
    """Reads a step mark by mark, and cuts it into spans."""

    def __init__(self, begin: float) -> None:
        self.spans: list[Span] = []
        self.synchronizations: list[Synchronization] = []
        self.micro_batches = 0
        self.evaluated = False
        self._cursor = begin
        self._doing = _GAP
        # By the mark that ends it, what was interrupted.
        self._before: dict[int, str] = {}
        self._in_step = False
        self._reset()

    def _reset(self) -> None:
        """Forget the last synchronization: there is no backward yet since then."""
        self._began: float | None = None
        self._on_core: float | None = None
        self._busy: float | None = None
        self._ended: float | None = None
        self._seen: dict[int, dict[int, float]] = {FULL: {}, READY: {}, FINISH: {}}
        self._started: dict[int, tuple[float, float | None]] = {}

    def end_span(self, now: float, gap: str = "other") -> None:
        """End the span of what was done until now."""
        name = gap if self._doing in (_GAP, _ENDING) else self._doing
        if now > self._cursor:
            last = self.spans[-1] if self.spans else None
            if last is not None and last.name == name:
                self.spans[-1] = Span(name=name, begin=last.begin, end=now)
            else:
                self.spans.append(Span(name=name, begin=self._cursor, end=now))
            self._cursor = now

    def marked(self, kind: int, details: Any, now: float) -> None:
        """Read the next mark."""
        if kind in self._seen:
            self._seen[kind][details[0]] = now
        elif kind == SYNCHRONIZED:
            self._synchronized(now)
        elif kind != FORWARD_END and (kind != LOADED or self._doing == "data"):
            # What precedes a forward, or the loading of a batch, is the loop's own code.
            before_forward = kind in (FORWARD, LOADING) and not self.evaluated
            self.end_span(now, gap="loop" if before_forward else "other")
            if kind in (NEEDED, LOADING):
                self._before[ARRIVED if kind == NEEDED else LOADED] = self._doing
            self._doing = self._before.get(kind, _GAP) if kind in (ARRIVED, LOADED) else _BEGINS[kind]
            if kind == FORWARD:
                self.evaluated = False
            elif kind in (STEP, STEP_END):
                self._in_step = kind == STEP
            elif kind == BACKWARD:
                self.micro_batches += 1
                self._seen[FULL].clear()
                self._seen[READY].clear()
                self._began, self._ended = now, None
                self._on_core, self._busy = details, None
            elif kind == BACKWARD_END:
                self._ended = now
                if details is not None and self._on_core is not None:
                    self._busy = details - self._on_core

    def started(self, index: int, start: float, reduced: float | None) -> None:
        """Note that a bucket's collective was started."""
        self._started[index] = (start, reduced)
        if self._doing == _GAP:
            # Without a backward: by synchronize(), or for want of one on this rank.
            self.end_span(start)
            self._began = self._ended = self._cursor
            self._doing = _ENDING

    def _synchronized(self, now: float) -> None:
        if self._doing == _ENDING:
            self._doing = "synchronization"
        self.end_span(now)
        begin = now if self._began is None else self._began
        end = now if self._ended is None else self._ended
        full, ready, finish = self._seen.values()
        buckets = tuple(
            RecordedBucket(
                index=index,
                full=full.get(index),
                ready=ready.get(index),
                start=start,
                reduced=reduced,
                finish=finish.get(index),
            )
            for index, (start, reduced) in sorted(self._started.items())
        )
        # Negative if it has ended on a different thread than it began on. Two clocks are read one after the other.
        busy = None if self._busy is None or self._busy < 0 else min(self._busy, end - begin)
        self.synchronizations.append(
            Synchronization(begin=begin, backward_end=end, finished=now, buckets=buckets, busy=busy)
        )
        self._reset()
        self._doing = "optimizer" if self._in_step else _GAP
