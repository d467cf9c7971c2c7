"""A calibration from what ranks have recorded of a training: one file of lines of JSON a rank, in one folder.

Only what a plan needs is read: the spans of each step, when each bucket was ready, started and reduced, the sizes of
parameters in the order of their buckets, and what an all-reduce was measured to cost. A recording does not say when a
parameter is needed in forward; what is ready last is taken to be needed first, in the same proportion.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsync.errors import ConfigurationError
from gradsync.plan.calibration import Calibration
from gradsync.plan.profile import BucketProfile, StepProfile
from gradsync.plan.stragglers import Jitter
from gradsync.plan.topology import Link, Topology
from gradsync.plan.wire import Way, Wire

__all__ = ["recorded"]

FORMAT = 1
FOLDER, PATTERN = "recording", "rank-*.jsonl"
# Of a run: the first ones allocate, learn orders and lay buckets out.
SKIPPED = 3
WAYS: dict[str, Way] = {"SharedMemory": "shared", "PeerExchange": "exchange", "Hierarchical": "hierarchical"}


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """What a plan wants of one rank."""

    header: dict[str, Any]
    layouts: Sequence[list[dict[str, Any]]]
    steps: Sequence[dict[str, Any]]


def recorded(folder: Path) -> Calibration:
    """What a plan for more ranks, or for another link, can be made from."""
    ranks = [_read(path) for path in _files(folder)]
    ranks = [rank for rank in ranks if rank.header.get("model", 0) == 0]
    if not ranks:
        raise ConfigurationError(
            f"there is no recording in {folder}: expected files {PATTERN}, one a rank. Record a training there, or "
            "measure two ranks with: gradsync plan --measure plan.json"
        )
    world_size = int(ranks[0].header["world_size"])
    missing = sorted(set(range(world_size)) - {int(rank.header["rank"]) for rank in ranks})
    if missing:
        raise ConfigurationError(
            f"{folder} has no recording of rank {', '.join(map(str, missing))} of {world_size}. Bring the files of all "
            "ranks together in one folder"
        )
    profiles = [_profile(rank, folder) for rank in ranks]
    # The middle one of the ranks: who differs from it for good is jitter to a plan.
    middle = sorted(profiles, key=lambda each: each.compute)[len(profiles) // 2]
    return Calibration(
        profile=middle,
        wire=_wire(ranks[0], world_size),
        jitter=Jitter.between(_compute_seconds(ranks)),
        facts={
            "recording": f"{ranks[0].header.get('name') or 'a model'} on {world_size} ranks",
            "wire": str(ranks[0].header.get("communicator", "")),
        },
    )


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(PATTERN)) or sorted((folder / FOLDER).glob(PATTERN))


def _read(path: Path) -> _Rank:
    try:
        first, *lines = [json.loads(line) for line in path.read_text().splitlines() if line]
        if first["kind"] != "recording" or first["format"] != FORMAT:
            raise ConfigurationError(
                f"{path} is no recording of format {FORMAT}, got kind {first['kind']!r} of format "
                f"{first.get('format')!r}: record anew, or read it with the gradsync that has written it"
            )
        layouts = [line["buckets"] for line in lines if line["kind"] == "layout"]
        steps = [line for line in lines if line["kind"] == "step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{path} is no recording of a rank: {error!r}") from None
    return _Rank(header=first, layouts=layouts, steps=steps)


def _usable(rank: _Rank) -> list[dict[str, Any]]:
    """Steps with one synchronization, of the buckets there were in the end."""
    synchronized = [step for step in rank.steps if len(step["synchronizations"]) == 1]
    last = max((step["layout"] for step in synchronized), default=0)
    usable = [step for step in synchronized if step["layout"] == last and step["synchronizations"][0]["buckets"]]
    return usable[SKIPPED:] or usable


def _profile(rank: _Rank, folder: Path) -> StepProfile:
    steps = _usable(rank)
    if not steps:
        raise ConfigurationError(
            f"the recording of rank {rank.header['rank']} in {folder} has no step in which gradients were synchronized "
            "once. Record some steps of a training on at least two ranks"
        )
    micro = round(statistics.median(step["micro_batches"] for step in steps)) or 1
    forward, backward = (
        statistics.median(_spent(step, name) / micro for step in steps) for name in ("forward", "backward")
    )
    data = statistics.median((_spent(step, "data") + _spent(step, "other")) / micro for step in steps)
    return StepProfile(
        forward=forward,
        backward=backward,
        data=data,
        optimizer=statistics.median(_spent(step, "optimizer") for step in steps),
        buckets=tuple(_pieces(rank, steps, forward, backward)),
        micro_batches=micro,
    )


def _pieces(rank: _Rank, steps: Sequence[dict[str, Any]], forward: float, backward: float) -> Iterator[BucketProfile]:
    """Parameters in the order of their buckets, ready one after the other between two buckets."""
    layout = rank.layouts[steps[-1]["layout"]]
    sizes = rank.header.get("parameters", {})
    before, number = 0.0, 0
    for index, bucket in enumerate(layout):
        moments = [_ready(step, index) for step in steps]
        known = [moment for moment in moments if moment is not None]
        ready = min(max(statistics.median(known) if known else backward, before), max(backward, before))
        parts = [int(sizes.get(name, 0)) for name in bucket["parameters"]]
        if not sum(parts):
            parts = [int(bucket["nbytes"])]
        done = 0
        for nbytes in parts:
            done += nbytes
            moment = before + (ready - before) * done / sum(parts)
            need = forward * max(0.0, 1 - moment / backward) if backward else 0.0
            yield BucketProfile(index=number, nbytes=nbytes, ready=moment, need=need)
            number += 1
        before = ready


def _ready(step: dict[str, Any], index: int) -> float | None:
    (synchronization,) = step["synchronizations"]
    for bucket in synchronization["buckets"]:
        if bucket[0] == index and bucket[1] is not None:
            return max(0.0, float(bucket[1]) - float(synchronization["begin"]))
    return None


def _spent(step: dict[str, Any], name: str) -> float:
    return sum(float(end) - float(begin) for span, begin, end in step["spans"] if span == name)


def _compute_seconds(ranks: Sequence[_Rank]) -> list[list[float]]:
    """Of each rank, in those steps that all of them have kept."""
    rows = [
        {step["number"]: _spent(step, "forward") + _spent(step, "backward") for step in _usable(rank)} for rank in ranks
    ]
    common = sorted(set.intersection(*(set(row) for row in rows)))
    return [[row[number] for number in common] for row in rows]


def _wire(rank: _Rank, ranks: int) -> Wire:
    """As an all-reduce was measured when the model was wrapped."""
    link = rank.header.get("link")
    if link is None or ranks == 1:
        raise ConfigurationError(
            f"the recording, of {ranks} ranks, does not say what an all-reduce costs, so there is nothing to plan a "
            "wire by. Record at least two ranks that choose their bucket sizes, or: gradsync plan --measure plan.json"
        )
    latency, per_byte = (float(each) for each in link)
    name = str(rank.header.get("communicator", ""))
    way: Way = next((way for word, way in WAYS.items() if word in name), "ring")
    steps = 2 * (ranks - 1) if way == "ring" else 2
    traffic = 2 * (ranks - 1) / ranks * (ranks if way == "shared" else 1)
    # A start is about as long as a step.
    each = latency / (steps + 1)
    topology = Topology(
        ranks=ranks,
        ranks_per_host=ranks if way == "shared" else 1,
        between=Link(latency=each, bandwidth=traffic / per_byte),
    )
    return Wire(topology=topology, way=way, start=each)
