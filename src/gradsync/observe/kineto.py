"""A recording of all ranks as Kineto traces, a file per rank as torch.profiler writes them: HTA and Perfetto read them.

Tools like HTA know computation and communication as kernels on the streams of a GPU. So what a rank computes is a
kernel on stream :data:`COMPUTE` here, on a CPU too, and each collective one on a stream after :data:`COMMUNICATION`,
with a name like NCCL's, by which HTA tells it from computation. Steps and all their spans are annotations, too.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradsync.base.errors import ConfigurationError
from gradsync.base.files import whole_file
from gradsync.observe.recording import Header, Recording
from gradsync.observe.trace import COMMUNICATION as BUCKETS
from gradsync.observe.trace import GATHERS, STEPS, Slice, Track, tracks_by_rank

__all__ = ["write_kineto"]

HOST, COMPUTE, COMMUNICATION = 1, 7, 20
LAUNCH = 0.001
COMPUTED = ("forward", "backward", "optimizer")
MICROSECONDS = 1e6


def write_kineto(recordings: Sequence[Recording], folder: str | os.PathLike[str]) -> list[Path]:
    """Write the trace of each rank to ``folder``, and return the files."""
    ranks = tracks_by_rank(recordings)
    origin = min((lane[0].begin for _, tracks in ranks for _, lane in tracks), default=None)
    if origin is None:
        raise ConfigurationError(
            "the recordings hold no step yet, so there is nothing to draw: a step is over when the next forward begins"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for header, tracks in ranks:
        path = folder / f"rank-{header.rank:05d}.pt.trace.json"
        with whole_file(path) as file:
            file.write(json.dumps(_trace(header, tracks, origin)).encode())
        paths.append(path)
    return paths


def _trace(header: Header, tracks: Sequence[Track], origin: float) -> dict[str, Any]:
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": header.backend, "rank": header.rank, "world_size": header.world_size},
        "displayTimeUnit": "ms",
        "traceEvents": [*_names(header), *_events(header, tracks, origin)],
    }


def _names(header: Header) -> Iterator[dict[str, Any]]:
    process = {"name": f"rank {header.rank} on {header.host}"}
    words = {"process_name": process, "process_labels": {"labels": header.device}}
    for name, arguments in words.items():
        yield {"ph": "M", "name": name, "pid": header.rank, "tid": 0, "ts": 0, "args": arguments}


def _events(header: Header, tracks: Sequence[Track], origin: float) -> Iterator[dict[str, Any]]:
    def event(each: Slice, name: str, category: str, lane: int, **arguments: Any) -> dict[str, Any]:
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": header.rank,
            "tid": lane,
            "ts": round((each.begin - origin) * MICROSECONDS, 3),
            "dur": round((each.end - each.begin) * MICROSECONDS, 3),
            "args": {**each.values, **arguments},
        }

    correlation = lanes = 0
    for name, lane in tracks:
        kind = name.rpartition(": ")[2]
        lanes += kind in (BUCKETS, GATHERS)
        for each in lane:
            if kind == STEPS:
                yield event(each, f"ProfilerStep#{each.name.rpartition(' ')[2]}", "user_annotation", HOST)
                yield from (event(part, part.name, "user_annotation", HOST) for part in each.inner)
                kernels = [(part, part.name, COMPUTE) for part in each.inner if part.name in COMPUTED]
            elif kind in (BUCKETS, GATHERS):
                kernels = [(each, f"ncclKernel_gradsync({each.name})", COMMUNICATION + lanes - 1)]
            else:
                kernels = []
            for part, called, stream in kernels:
                correlation += 1
                link = {"correlation": correlation}
                # HTA keeps kernels that something on the host has launched.
                launch = event(part, "cudaLaunchKernel", "cuda_runtime", HOST, **link)
                yield launch | {"dur": LAUNCH}
                yield event(part, called, "kernel", stream, stream=stream, device=header.rank, **link)
