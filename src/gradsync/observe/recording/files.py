"""A recording: its parts, and its format: one file per rank, in lines of JSON: a header, bucket layouts, the kept
steps, and an end.

::

    {"kind": "recording", "format": 1, "rank": 0, "world_size": 2, …}
    {"kind": "layout", "number": 0, "buckets": [{"nbytes": 1048, "parameters": ["1.bias", …]}, …]}
    {"kind": "step", "number": 7, "layout": 0, "begin": 12.5, "end": 12.6, "micro_batches": 1,
     "spans": [["data", 12.5, 12.51], …],
     "synchronizations": [{"begin": …, "backward_end": …, "finished": …, "busy": …,
                           "buckets": [[index, ready, start, reduced, finish, full], …]}],
     "gathers": [[index, nbytes, start, end, needed, arrived], …]}
    {"kind": "end", "total": 1200, "ended": true}

All times are seconds on the clock of the rank that wrote them (``time.perf_counter``); with the :class:`Clock` in its
header they become rank 0's. A file is always complete: it is rewritten now and then, and gets its name only once it is
complete.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from gradsync.base.errors import ConfigurationError
from gradsync.base.files import from_json, whole_file
from gradsync.communicator.logs import join_names, name_missing_ranks

__all__ = [
    *("FOLDER", "BucketPart", "Clock", "GatherTimes", "Header", "RecordedBucket", "Recording", "Span", "Step"),
    *("Synchronization", "find_recordings", "lines_of", "parse_recording", "read_models", "read_recording"),
    *("read_recordings", "write_lines"),
]

FORMAT = 1
# Where `gradsync train` has it, in the folder of a run.
FOLDER = "recording"
PATTERN = "rank-*.jsonl"
# Of a synchronization: the one number of seconds that no clock has shown.
DURATION = "busy"


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The clock of a rank: ``time + offset`` is the time on rank 0's clock, to within ``error``; None if that was not
    measured."""

    offset: float = 0.0
    error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Span:
    """A span of time: the rank did ``name`` from ``begin`` to ``end``.

    It is one of ``data`` (waiting for a loader), ``loop`` (what else precedes the forward of a micro-batch: code of the
    training's own), ``forward``, ``backward``, ``synchronization`` (from the end of a backward to the last mean),
    ``gather`` (waiting for parameters that are on their way), ``optimizer`` and ``other``.
    """

    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class RecordedBucket:
    """The times of one bucket. ``full`` is when its last chunk was, and its copy began, ``ready`` when that was done,
    ``reduced`` when its collective was complete, ``finish`` when the engine had waited for it; None is unknown."""

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
    buckets: tuple[RecordedBucket, ...]
    busy: float | None = None

    def end_of(self, bucket: RecordedBucket) -> float:
        """When the bucket's collective was complete. Where the transport does not report it, the engine's wait does."""
        return next(each for each in (bucket.reduced, bucket.finish, self.finished) if each is not None)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step, from the end of one optimizer step to that of the next. ``spans`` fill it without a gap.

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
        """How many collectives the engine has started for the step, gathers included."""
        return sum(len(each.buckets) for each in self.synchronizations) + len(self.gathers)

    def spent(self, name: str) -> float:
        """Seconds of all spans of that name."""
        return sum(span.seconds for span in self.spans if span.name == name)

    def shifted(self, seconds: float) -> "Step":
        """The same step, on a clock that is that many seconds ahead."""
        moved: Step = _moved(self, seconds)
        return moved


def _moved(value: Any, seconds: float) -> Any:
    """The ``value`` with its moments moved: every float in it is one, but for :data:`DURATION`."""
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
    bytes, ``compiled`` says what of the model is compiled and what overlaps then, ``identity`` identifies the host,
    ``link`` is the measured cost of an all-reduce: latency and seconds per byte.
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
    compiled: str = ""
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


def file_name(rank: int, model: int) -> str:
    return f"rank-{rank:05d}.jsonl" if model == 0 else f"rank-{rank:05d}-model-{model}.jsonl"


# -- writing ----------------------------------------------------------------------------------------------------------


def step_line(step: Step) -> str:
    return _line({"kind": "step", **_as_json(step)})


def lines_of(recording: Recording, steps: Iterable[str] | None = None) -> Iterator[str]:
    """All lines of the file of a recording; ``steps`` are the lines of its steps, if they are known."""
    yield _line({"kind": "recording", "format": FORMAT, **asdict(recording.header)})
    for number, buckets in enumerate(recording.layouts):
        yield _line({"kind": "layout", "number": number, "buckets": [asdict(bucket) for bucket in buckets]})
    yield from map(step_line, recording.steps) if steps is None else steps
    yield _line({"kind": "end", "total": recording.total, "ended": recording.ended})


def write_lines(path: Path, lines: Iterable[str]) -> None:
    with whole_file(path) as file:
        for line in lines:
            file.write(line.encode() + b"\n")


def write_recording(folder: Path, recording: Recording, steps: Iterable[str]) -> None:
    """Write the file of a recording, with the lines of its steps."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / file_name(recording.header.rank, recording.header.model), lines_of(recording, steps))


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))


def _as_json(value: Any) -> Any:
    """The value for JSON, with arrays for what there is much of. Times to a tenth of a microsecond: clocks are no
    better."""
    if isinstance(value, float):
        return round(value, 7)
    if isinstance(value, tuple):
        return [_as_json(each) for each in value]
    if isinstance(value, Span | RecordedBucket | GatherTimes):
        return [_as_json(each) for each in vars(value).values()]
    if is_dataclass(value):
        return {name: _as_json(each) for name, each in vars(value).items()}
    return value


# -- reading ----------------------------------------------------------------------------------------------------------


def find_recordings(folder: Path) -> list[Path]:
    """The files in ``folder``, or in the recording of the run that is there."""
    return sorted(folder.glob(PATTERN)) or sorted((folder / FOLDER).glob(PATTERN))


def read_recording(path: Path) -> Recording:
    """Read the recording of one rank. ConfigurationError for a file that no rank has written."""
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is no recording of a rank: {error!r}") from error
    return parse_recording(text, str(path))


def parse_recording(text: str, path: str) -> Recording:
    """Parses what a rank has written, or sent; ``path`` is where it came from."""
    try:
        return _assembled(_objects(text), path)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"{path} is no recording of a rank: {error}") from error


def _objects(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The object of each line, with its number."""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line:
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"line {number} is no JSON, or cut off") from None
        if not isinstance(content, dict):
            raise ValueError(f"line {number} is no object")
        yield number, content


def _assembled(objects: Iterator[tuple[int, dict[str, Any]]], path: str) -> Recording:
    _, first = next(objects, (0, {}))
    if first.get("kind") != "recording":
        raise ValueError("it does not begin as one")
    if first.get("format") != FORMAT:
        versions = first.get("versions")
        writer = f" ({versions.get('gradsync')})" if isinstance(versions, dict) else ""
        raise ConfigurationError(
            f"{path} has format {first.get('format')}, and {FORMAT} is read here: read it with the gradsync that "
            f"has written it{writer}, or record again"
        )
    header = from_json(Header, first)
    kinds: dict[str, type[Any]] = {"layout": _Layout, "step": Step, "end": _End}
    parts: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for number, content in objects:
        kind = str(content.get("kind"))
        if kind not in kinds:
            raise ValueError(f"line {number} is of no kind that is known: {kind}")
        try:
            parts[kind].append(from_json(kinds[kind], content))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    # What types alone do not express.
    if not 0 <= header.rank < header.world_size:
        raise ValueError(f"it is of rank {header.rank} of {header.world_size}")
    layouts, steps = tuple(layout.buckets for layout in parts["layout"]), tuple(parts["step"])
    lost = next((step for step in steps if not 0 <= step.layout < len(layouts)), None)
    if lost is not None:
        raise ValueError(f"step {lost.number} has buckets of layout {lost.layout}, which is not there")
    end = parts["end"][0] if parts["end"] else _End()
    return Recording(header=header, layouts=layouts, steps=steps, total=end.total, ended=end.ended)


@dataclass(frozen=True, kw_only=True)
class _Layout:
    buckets: tuple[BucketPart, ...]


@dataclass(frozen=True, kw_only=True)
class _End:
    total: int = 0
    ended: bool = False


def read_recordings(folder: Path, model: int = 0) -> list[Recording]:
    """The recordings of all ranks, in order. ConfigurationError unless they belong together and contain something."""
    models = _models(folder)
    if not models:
        raise ConfigurationError(
            f"there is no recording in {folder}: run the training with GRADSYNC_RECORD={folder}, or with gradsync "
            "train, which always records"
        )
    if model not in models:
        known = join_names([str(number) for number in sorted(models)])
        raise ConfigurationError(f"{folder} has no recording of model {model}, only of {known}")
    return _whole(models[model], folder)


def read_models(folder: Path) -> list[list[Recording]]:
    """The recordings of every model that was recorded, each as :func:`read_recordings` returns them."""
    return [_whole(recordings, folder) for _, recordings in sorted(_models(folder).items())]


def _models(folder: Path) -> dict[int, list[Recording]]:
    models: dict[int, list[Recording]] = {}
    for recording in map(read_recording, find_recordings(folder)):
        models.setdefault(recording.header.model, []).append(recording)
    return models


def _whole(recordings: Sequence[Recording], folder: Path) -> list[Recording]:
    """The recordings of all ranks of one run, or ConfigurationError."""
    found = {each.header.rank: each for each in recordings}
    size, *others = sorted({each.header.world_size for each in recordings})
    if others:
        raise ConfigurationError(
            f"{folder} has recordings of runs with {join_names([str(each) for each in (size, *others)])} ranks: record "
            "every run into a folder of its own"
        )
    missing = name_missing_ranks(found, size)
    if missing:
        raise ConfigurationError(
            f"{folder} has no recording of {missing}: ranks on other hosts write theirs there. Bring all files "
            "together in one folder"
        )
    return [found[rank] for rank in range(size)]
