"""One file a rank, in lines of JSON: a header, the layouts of the buckets, the steps that were kept, and an end.

::

    {"kind": "recording", "format": 1, "rank": 0, "world_size": 2, …}
    {"kind": "layout", "number": 0, "buckets": [{"nbytes": 1048, "parameters": ["1.bias", …]}, …]}
    {"kind": "step", "number": 7, "layout": 0, "begin": 12.5, "end": 12.6, "micro_batches": 1,
     "spans": [["data", 12.5, 12.51], …],
     "synchronizations": [{"begin": …, "backward_end": …, "finished": …,
                           "buckets": [[index, ready, start, reduced, finish], …],
                           "full": [when each bucket's last chunk was, …], "busy": seconds}],
     "gathers": [[index, nbytes, start, end, needed, arrived], …]}
    {"kind": "end", "total": 1200, "ended": true}

Times are seconds on the rank's own clock; the header has what to add to them to get rank 0's. A file is always whole:
it is written anew now and then, and gets its name when it is complete.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradsync.communicator.naming import listed
from gradsync.errors import ConfigurationError
from gradsync.files import whole_file
from gradsync.recording.steps import (
    BucketPart,
    BucketTimes,
    Clock,
    GatherTimes,
    Header,
    Recording,
    Span,
    Step,
    Synchronization,
)

__all__ = [
    "FOLDER",
    "FORMAT",
    "find_recordings",
    "lines_of",
    "parse_recording",
    "read_recording",
    "read_recordings",
    "write_lines",
]

FORMAT = 1
# Where `gradsync train` has it, in the folder of a run.
FOLDER = "recording"
PATTERN = "rank-*.jsonl"


def file_name(rank: int, model: int) -> str:
    return f"rank-{rank:05d}.jsonl" if model == 0 else f"rank-{rank:05d}-model-{model}.jsonl"


# -- writing ----------------------------------------------------------------------------------------------------------


def header_line(header: Header) -> str:
    return _line({"kind": "recording", "format": FORMAT, **dataclasses.asdict(header)})


def layout_line(number: int, buckets: Sequence[BucketPart]) -> str:
    return _line({"kind": "layout", "number": number, "buckets": [dataclasses.asdict(bucket) for bucket in buckets]})


def end_line(total: int, *, ended: bool) -> str:
    return _line({"kind": "end", "total": total, "ended": ended})


def step_line(step: Step) -> str:
    return _line(
        {
            "kind": "step",
            "number": step.number,
            "layout": step.layout,
            "begin": _short(step.begin),
            "end": _short(step.end),
            "micro_batches": step.micro_batches,
            "spans": [[span.name, _short(span.begin), _short(span.end)] for span in step.spans],
            "synchronizations": [
                {
                    "begin": _short(each.begin),
                    "backward_end": _short(each.backward_end),
                    "finished": _short(each.finished),
                    "busy": _short(each.busy),
                    "full": [_short(bucket.full) for bucket in each.buckets],
                    "buckets": [
                        [bucket.index, *map(_short, (bucket.ready, bucket.start, bucket.reduced, bucket.finish))]
                        for bucket in each.buckets
                    ],
                }
                for each in step.synchronizations
            ],
            "gathers": [
                [gather.index, gather.nbytes, *map(_short, (gather.start, gather.end, gather.needed, gather.arrived))]
                for gather in step.gathers
            ],
        }
    )


def lines_of(recording: Recording) -> Iterator[str]:
    """All of a file."""
    yield header_line(recording.header)
    yield from (layout_line(number, buckets) for number, buckets in enumerate(recording.layouts))
    yield from (step_line(step) for step in recording.steps)
    yield end_line(recording.total, ended=recording.ended)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    with whole_file(path) as file:
        for line in lines:
            file.write(line.encode() + b"\n")


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))


def _short(moment: float | None) -> float | None:
    """To the tenth of a microsecond, which is more than a clock is worth."""
    return None if moment is None else round(moment, 7)


# -- reading ----------------------------------------------------------------------------------------------------------


def find_recordings(folder: Path) -> list[Path]:
    """The files in ``folder``, or in the recording of the run that lies there."""
    return sorted(folder.glob(PATTERN)) or sorted((folder / FOLDER).glob(PATTERN))


def read_recording(path: Path) -> Recording:
    """Raises ConfigurationError for what no rank has written."""
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is no recording of a rank: {error!r}") from error
    return parse_recording(text, str(path))


def parse_recording(text: str, path: str) -> Recording:
    """What a rank has written, or sent; ``path`` is where it came from."""
    try:
        first, *lines = [json.loads(line) for line in text.splitlines() if line]
        if first.get("kind") != "recording":
            raise ValueError(f"its first line is of kind {first.get('kind')!r}")
        if first["format"] != FORMAT:
            raise ConfigurationError(
                f"{path} has format {first['format']}, and {FORMAT} is read here: read it with the gradsync that has "
                f"written it ({first.get('versions', {}).get('gradsync', 'unknown')}), or record anew"
            )
        end = next((line for line in lines if line["kind"] == "end"), {"total": 0, "ended": False})
        return Recording(
            header=_header(first),
            layouts=tuple(
                tuple(
                    BucketPart(nbytes=each["nbytes"], parameters=tuple(each["parameters"])) for each in line["buckets"]
                )
                for line in lines
                if line["kind"] == "layout"
            ),
            steps=tuple(_step(line) for line in lines if line["kind"] == "step"),
            total=int(end["total"]),
            ended=bool(end["ended"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{path} is no recording of a rank: {error!r}") from error


def read_recordings(folder: Path, model: int = 0) -> list[Recording]:
    """Those of all ranks, in order. ConfigurationError unless they belong together, and something was recorded."""
    recordings = [read_recording(path) for path in find_recordings(folder)]
    found = {each.header.rank: each for each in recordings if each.header.model == model}
    if not found:
        raise ConfigurationError(
            f"there is no recording in {folder}: run the training with GRADSYNC_RECORD={folder}, or with gradsync "
            "train, which always records"
        )
    sizes = {each.header.world_size for each in found.values()}
    if len(sizes) > 1:
        raise ConfigurationError(
            f"{folder} has recordings of runs with {listed([str(size) for size in sorted(sizes)])} ranks: record every "
            "run into a folder of its own"
        )
    missing = sorted(set(range(max(sizes))) - set(found))
    if missing:
        raise ConfigurationError(
            f"{folder} has no recording of {listed([f'rank {rank}' for rank in missing])}: ranks on other hosts write "
            "theirs there. Bring all files together in one folder"
        )
    return [found[rank] for rank in sorted(found)]


def _header(line: dict[str, Any]) -> Header:
    known = {field.name for field in dataclasses.fields(Header)}
    values = {name: value for name, value in line.items() if name in known}
    values["caps"] = tuple(values.get("caps") or ())
    values["link"] = None if values.get("link") is None else tuple(values["link"])
    values["clock"] = Clock(**values["clock"])
    return Header(**values)


def _step(line: dict[str, Any]) -> Step:
    # Recordings from before these were noted have neither "full" nor "busy".
    return Step(
        number=line["number"],
        layout=line["layout"],
        begin=line["begin"],
        end=line["end"],
        micro_batches=line["micro_batches"],
        spans=tuple(Span(name=name, begin=begin, end=end) for name, begin, end in line["spans"]),
        synchronizations=tuple(
            Synchronization(
                begin=each["begin"],
                backward_end=each["backward_end"],
                finished=each["finished"],
                buckets=tuple(
                    BucketTimes(index=index, full=full, ready=ready, start=start, reduced=reduced, finish=finish)
                    for (index, ready, start, reduced, finish), full in itertools.zip_longest(
                        each["buckets"], each.get("full", ())
                    )
                ),
                busy=each.get("busy"),
            )
            for each in line["synchronizations"]
        ),
        gathers=tuple(
            GatherTimes(index=index, nbytes=nbytes, start=start, end=end, needed=needed, arrived=arrived)
            for index, nbytes, start, end, needed, arrived in line["gathers"]
        ),
    )
