"""A calibration from the recording of a training.

It is derived from the spans of each step, the times at which each bucket was ready, the sizes of parameters in the
order of their buckets, and the measured cost of an all-reduce. A recording does not say when a parameter is needed in
forward; what is ready last is assumed to be needed first, in the same proportion.
"""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradsync.base.errors import ConfigurationError
from gradsync.observe.explain.merging import merge
from gradsync.observe.explain.split import split
from gradsync.observe.explain.stragglers import find_stragglers
from gradsync.observe.plan.calibration import Calibration, no_link, slow_for_good
from gradsync.observe.plan.link_cost import Way, Wire
from gradsync.observe.plan.profile import BucketProfile, StepProfile
from gradsync.observe.plan.stragglers import Jitter
from gradsync.observe.plan.topology import Link, Topology
from gradsync.observe.recording import Header, Recording, Step, read_recordings

__all__ = ["recorded"]

# Of a run: the first ones allocate, learn orders and lay buckets out.
SKIPPED = 3
WAYS: dict[str, Way] = {"SharedMemory": "shared", "PeerExchange": "exchange", "Hierarchical": "hierarchical"}


def recorded(folder: Path) -> Calibration:
    """What a plan for more ranks, or for another link, can be made from."""
    ranks = read_recordings(folder)
    profiles = [_profile(rank, folder) for rank in ranks]
    # The middle one of the ranks: who differs from it for good is jitter to a plan.
    middle = sorted(profiles, key=lambda each: each.compute)[len(profiles) // 2]
    header = ranks[0].header
    wire = _wire(header)
    return Calibration(
        profile=middle,
        wire=wire,
        jitter=Jitter.between(_compute_seconds(ranks)),
        facts={
            "recording": f"{header.name or 'a model'} on {header.world_size} ranks",
            "wire": header.communicator,
        },
        warnings=tuple(_warnings(ranks, wire)),
    )


def _warnings(ranks: Sequence[Recording], wire: Wire) -> Iterator[str]:
    """Follows the verdict of ``gradsync explain``: a rank that others wait for there is a straggler here."""
    timeline = merge(ranks)
    for straggler in find_stragglers(timeline, split(timeline)):
        yield slow_for_good(straggler.rank, str(straggler))
    hosts = {rank.header.identity for rank in ranks}
    if wire.way == "shared" or (len(hosts) == 1 and hosts != {""}):
        yield no_link(wire.way, len(ranks))


def _usable(rank: Recording) -> list[Step]:
    """Steps with one synchronization, of the buckets there were in the end."""
    synchronized = [step for step in rank.steps if len(step.synchronizations) == 1]
    last = max((step.layout for step in synchronized), default=0)
    usable = [step for step in synchronized if step.layout == last and step.synchronizations[0].buckets]
    return usable[SKIPPED:] or usable


def _profile(rank: Recording, folder: Path) -> StepProfile:
    steps = _usable(rank)
    if not steps:
        raise ConfigurationError(
            f"the recording of rank {rank.header.rank} in {folder} has no step in which gradients were synchronized "
            "once. Record some steps of a training on at least two ranks"
        )
    micro = round(statistics.median(step.micro_batches for step in steps)) or 1
    forward, backward = (
        statistics.median(step.spent(name) / micro for step in steps) for name in ("forward", "backward")
    )
    between = [sum(step.spent(name) for name in ("data", "loop", "other")) for step in steps]
    data = statistics.median(between) / micro
    return StepProfile(
        forward=forward,
        backward=backward,
        data=data,
        optimizer=statistics.median(step.spent("optimizer") for step in steps),
        buckets=tuple(_pieces(rank, steps, forward, backward)),
        micro_batches=micro,
    )


def _pieces(rank: Recording, steps: Sequence[Step], forward: float, backward: float) -> Iterator[BucketProfile]:
    """Parameters in the order of their buckets, ready one after the other between two buckets."""
    layout = rank.layouts[steps[-1].layout]
    before, number = 0.0, 0
    for index, bucket in enumerate(layout):
        moments = [_ready(step, index) for step in steps]
        known = [moment for moment in moments if moment is not None]
        ready = min(max(statistics.median(known) if known else backward, before), max(backward, before))
        parts = [rank.header.parameters.get(name, 0) for name in bucket.parameters]
        if not sum(parts):
            parts = [bucket.nbytes]
        # Of parameters without elements nothing is sent.
        whole, done = sum(parts) or 1, 0
        for nbytes in parts:
            done += nbytes
            moment = before + (ready - before) * done / whole
            need = forward * max(0.0, 1 - moment / backward) if backward else 0.0
            yield BucketProfile(index=number, nbytes=nbytes, ready=moment, need=need)
            number += 1
        before = ready


def _ready(step: Step, index: int) -> float | None:
    (synchronization,) = step.synchronizations
    ready = (bucket.ready for bucket in synchronization.buckets if bucket.index == index)
    return next((max(0.0, moment - synchronization.begin) for moment in ready if moment is not None), None)


def _compute_seconds(ranks: Sequence[Recording]) -> list[list[float]]:
    """Of each rank, in those steps that all of them have kept."""
    rows = [{step.number: step.spent("forward") + step.spent("backward") for step in _usable(rank)} for rank in ranks]
    common = sorted(set.intersection(*(set(row) for row in rows)))
    return [[row[number] for number in common] for row in rows]


def _wire(header: Header) -> Wire:
    """As an all-reduce was measured when the model was wrapped."""
    ranks = header.world_size
    if header.link is None or ranks == 1:
        raise ConfigurationError(
            f"the recording, of {ranks} ranks, does not say what an all-reduce costs, so there is nothing to plan a "
            "wire by. Record at least two ranks that choose their bucket sizes, or: gradsync plan --measure plan.json"
        )
    latency, per_byte = header.link
    way: Way = next((way for word, way in WAYS.items() if word in header.communicator), "ring")
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
