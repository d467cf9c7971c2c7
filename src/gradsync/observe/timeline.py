"""An observer that records when each bucket was ready, started and finished, and explains what that means."""

import functools
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsync.observe.charts.canvas import PARTS
from gradsync.observe.charts.numbers import count, duration, size
from gradsync.observe.charts.page import Piece, frame, heading, legend, lines, strip, table
from gradsync.observe.recording.files import GatherTimes
from gradsync.observe.recording.marks import START, Gather, Marker, Marks, read_step

__all__ = ["BucketTimes", "StepTimes", "Timeline"]

NOTHING = "no synchronized backward recorded yet"


@dataclass(kw_only=True)
class BucketTimes:
    """The path of one bucket, in seconds since the backward began.

    ``reduced`` is when its collective was complete, ``finish`` when the engine had waited for it.
    """

    index: int
    nbytes: int
    ready: float | None = None
    start: float | None = None
    reduced: float | None = None
    finish: float | None = None


@dataclass(kw_only=True)
class StepTimes:
    """One synchronized backward, with the gathers of a sharded optimizer since the previous one: behind the forward, so
    their times are before zero."""

    buckets: list[BucketTimes] = field(default_factory=list)
    gathers: list[GatherTimes] = field(default_factory=list)
    backward_end: float = 0.0
    finished: float = 0.0

    @property
    def overlaps(self) -> bool:
        """Whether at least one collective was started while backward still computed."""
        return any(times.start is not None and times.start < self.backward_end for times in self.buckets)

    @property
    def exposed(self) -> float:
        """The seconds of synchronization that backward did not hide."""
        return self.finished - self.backward_end


class Timeline(Marker):
    """Records every synchronized backward: ``DistributedDataParallel(model, observer=Timeline())``.

    On the CPU, times are read from the clock. On CUDA the host runs ahead of the device, so events are recorded on the
    stream and read when you access :attr:`steps`.
    """

    def __init__(self, *, keep: int = 100) -> None:
        super().__init__()
        self._now = _now
        self._keep = keep
        self._recorded: list[tuple[Marks, list[Gather]]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy it without its records: the copy that a copied wrapper takes along has recorded nothing."""
        return (functools.partial(Timeline, keep=self._keep), ())

    @property
    def steps(self) -> list[StepTimes]:
        """The recorded steps, oldest first."""
        return [_read(*marks) for marks in self._recorded]

    @property
    def last(self) -> StepTimes | None:
        """The most recently recorded step."""
        return _read(*self._recorded[-1]) if self._recorded else None

    def take(self) -> list[StepTimes]:
        """Return :attr:`steps`, and forget them."""
        recorded, self._recorded = self._recorded, []
        return [_read(*marks) for marks in recorded]

    def backward_began(self, *, synchronizes: bool) -> None:
        self._marks = []
        super().backward_began(synchronizes=synchronizes)

    def synchronization_finished(self) -> None:
        super().synchronization_finished()
        self._recorded.append((self._marks, self._gathers))
        del self._recorded[: -self._keep]
        self._marks, self._gathers = [], []

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keep={self._keep}, {count(len(self._recorded), 'step')} recorded)"

    def __str__(self) -> str:
        last = self.last
        return NOTHING if last is None else render(last)

    def _repr_html_(self) -> str:
        """The last step as HTML for a notebook."""
        last = self.last
        return frame(lines([NOTHING])) if last is None else as_html(last)


def _now() -> Any:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def _read(marks: Marks, gathers: list[Gather]) -> StepTimes:
    origin = marks[0][2]

    def since(moment: Any) -> float:
        if isinstance(moment, float):
            return moment - float(origin)
        moment.synchronize()
        seconds: float = origin.elapsed_time(moment) / 1e3
        return seconds

    step = read_step(marks, gathers, read=since, number=0, layout=0, begin=origin)
    (part,) = step.synchronizations
    nbytes = {details[0]: details[1] for kind, details, _ in marks if kind == START}
    buckets = []
    for each in part.buckets:
        times = {name: moment for name, moment in vars(each).items() if name != "full"}
        buckets.append(BucketTimes(nbytes=nbytes[each.index], **times))
    ends = {"backward_end": part.backward_end, "finished": part.finished}
    return StepTimes(buckets=buckets, gathers=list(step.gathers), **ends)


def render(step: StepTimes, *, width: int = 60) -> str:
    """The step as text: ``·`` waiting for its turn, ``█`` under way, ``|`` the end of backward; and new parameters on
    their way, ``▒``, before backward began and after."""
    first = min([0.0, *(gather.start for gather in step.gathers)])
    total = max(step.finished - first, 1e-9)

    def column(seconds: float) -> int:
        return min(int((seconds - first) / total * width), width - 1)

    def fill(row: list[str], since: float | None, until: float | None, sign: str) -> None:
        if since is not None and until is not None:
            row[column(since) : column(until) + 1] = sign * (column(until) + 1 - column(since))

    rows = [_headline(step, first)]
    end = column(step.backward_end)
    for times in step.buckets:
        row = [" "] * width
        if times.ready is not None and times.start is not None:
            row[column(times.ready) : column(times.start)] = "·" * (column(times.start) - column(times.ready))
        for gather in step.gathers:
            if gather.index == times.index:
                fill(row, gather.start, gather.end, "▒")
        fill(row, times.start, times.finish if times.reduced is None else times.reduced, "█")
        for place, sign in ((column(0.0), "["), (end, "|")) if first < 0 else ((end, "|"),):
            if row[place] == " ":
                row[place] = sign
        rows.append(f"bucket {times.index:3d} {times.nbytes / 2**20:8.2f} MiB {''.join(row).rstrip()}")
    return "\n".join(rows)


def _headline(step: StepTimes, first: float) -> str:
    words = f"ends at {step.backward_end * 1e3:.2f} ms, synchronized at {step.finished * 1e3:.2f} ms"
    return f"gathers begin {-first * 1e3:.2f} ms before backward; it {words}" if first < 0 else f"backward {words}"


def as_html(step: StepTimes) -> str:
    """The step as HTML: what :func:`render` draws, in the colours of reports."""
    first = min([0.0, *(gather.start for gather in step.gathers)])
    total = max(step.finished - first, 1e-9)
    end = step.backward_end

    def piece(since: float, until: float, part: str, words: str) -> Piece:
        hint = f"{words}: {duration(max(until - since, 0.0))}"
        return (since - first) / total, (min(until, step.finished) - first) / total, PARTS[part], hint

    names = {"backward": "backward", "ready, waits": "waiting"}
    names |= {"hidden communication": "hidden", "exposed communication": "exposed"}
    rows = [("backward", "", strip([piece(0.0, end, "backward", "backward")]))]
    for times in step.buckets:
        pieces = []
        for gather in step.gathers:
            if gather.index == times.index and gather.end is not None:
                names["new parameters"] = "update"
                pieces.append(piece(gather.start, gather.end, "update", "new parameters"))
        reduced = times.finish if times.reduced is None else times.reduced
        if times.start is not None and reduced is not None:
            ready = times.start if times.ready is None else times.ready
            pieces.append(piece(ready, times.start, "waiting", "ready, waits"))
            pieces.append(piece(times.start, min(reduced, end), "hidden", "communication behind backward"))
            pieces.append(piece(max(times.start, end), reduced, "exposed", "communication after backward"))
        rows.append((f"bucket {times.index}", size(times.nbytes), strip(pieces, marks=[(end - first) / total])))
    colours = {name: PARTS[part] for name, part in names.items()}
    return frame(heading(_headline(step, first)), table(rows, right=(1,)), legend(colours))
