"""The parts of a recording.

All times are seconds on the clock of the rank that wrote them (``time.perf_counter``); with :class:`Clock` they become
rank 0's.
"""

from dataclasses import dataclass, field, is_dataclass
from typing import Any

__all__ = [
    "ACTIVITIES",
    "BucketPart",
    "BucketTimes",
    "Clock",
    "GatherTimes",
    "Header",
    "Recording",
    "Span",
    "Step",
    "Synchronization",
]

# What a span may be called. "synchronization" lies between the end of a backward and the last mean, "gather" is waiting
# for parameters that are on their way, "data" is waiting for a loader, "loop" what else precedes the forward of a
# micro-batch: code of the training's own.
ACTIVITIES = ("data", "loop", "forward", "backward", "synchronization", "gather", "optimizer", "other")


# Of a synchronization: the one number of seconds that no clock has shown.
DURATION = "busy"


@dataclass(frozen=True, kw_only=True)
class Clock:
    """``time + offset`` is the time on rank 0's clock, to within ``error``; None if that was not measured."""

    offset: float = 0.0
    error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Span:
    """The rank did ``name`` from ``begin`` to ``end``."""

    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class BucketTimes:
    """One bucket's walk. ``full`` is when its last chunk was, and began to land, ``ready`` when that was done,
    ``reduced`` when the wire was done with it, ``finish`` when the engine had waited for it; None is what nobody told
    of."""

    index: int
    ready: float | None = None
    start: float
    reduced: float | None = None
    finish: float | None = None
    full: float | None = None


@dataclass(frozen=True, kw_only=True)
class GatherTimes:
    """New parameters of one bucket in flight, for a sharded optimizer.

    ``needed`` and ``arrived`` delimit the time that a rank waited for them.
    """

    index: int
    nbytes: int
    start: float
    end: float | None = None
    needed: float | None = None
    arrived: float | None = None


@dataclass(frozen=True, kw_only=True)
class Synchronization:
    """One synchronized backward, or a synchronization without one: then it begins and ends at once.

    ``busy`` is how many seconds of the backward its thread was on a core; None where that is unknown. A thread that
    sleeps waits for the device that computes: what it does for buckets meanwhile costs nothing.
    """

    begin: float
    backward_end: float
    finished: float
    buckets: tuple[BucketTimes, ...]
    busy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """From the end of one optimizer step to that of the next. ``spans`` fill it without a gap.

    ``layout`` says which of the recording's layouts its buckets belong to. ``gathers`` are those whose parameters this
    step used: most of them were started in the previous step.
    """

    number: int
    layout: int
    begin: float
    end: float
    micro_batches: int
    spans: tuple[Span, ...]
    synchronizations: tuple[Synchronization, ...] = ()
    gathers: tuple[GatherTimes, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def collectives(self) -> int:
        """How many the engine has started for it, gathers included."""
        return sum(len(each.buckets) for each in self.synchronizations) + len(self.gathers)

    def spent(self, name: str) -> float:
        """Seconds of all spans of that name."""
        return sum(span.seconds for span in self.spans if span.name == name)

    def shifted(self, seconds: float) -> "Step":
        """The same step, on a clock that is that many seconds ahead."""
        moved: Step = _moved(self, seconds)
        return moved


def _moved(value: Any, seconds: float) -> Any:
    """All that is a float here is a moment, but for :data:`DURATION`."""
    if isinstance(value, float):
        return value + seconds
    if isinstance(value, tuple):
        return tuple([_moved(each, seconds) for each in value])
    if is_dataclass(value) and not isinstance(value, type):
        parts = vars(value).items()
        return type(value)(**{name: each if name == DURATION else _moved(each, seconds) for name, each in parts})
    return value


@dataclass(frozen=True, kw_only=True)
class BucketPart:
    """One bucket of a layout: its bytes, including control flags, and the names of its parameters."""

    nbytes: int
    parameters: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Header:
    """Which rank wrote a recording, and of what.

    ``model`` numbers the models of a process, in the order in which they were wrapped. ``caps`` are bucket sizes in
    bytes, ``identity`` identifies the host, ``link`` is the measured cost of an all-reduce: latency and seconds per
    byte.
    """

    rank: int
    world_size: int
    model: int = 0
    name: str = ""
    host: str = ""
    identity: str = ""
    process: int = 0
    device: str = "cpu"
    backend: str = ""
    communicator: str = ""
    reduction: str = "Mean()"
    schedule: str = "overlapped"
    caps: tuple[int, ...] = ()
    caps_chosen: bool = False
    parameters: dict[str, int] = field(default_factory=dict)
    optimizer: str = ""
    link: tuple[float, float] | None = None
    clock: Clock = field(default_factory=Clock)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The recording of one rank. ``total`` steps were made, of which ``steps`` were kept.

    ``ended`` is False while it continues, and for a rank that was killed.
    """

    header: Header
    layouts: tuple[tuple[BucketPart, ...], ...]
    steps: tuple[Step, ...]
    total: int
    ended: bool
