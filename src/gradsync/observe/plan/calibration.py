"""Turns measurements on few ranks into numbers that hold for many: a latency, a bandwidth, a burst and coding costs.

A collective of q bytes through the link, after a pause, takes ``L + max(0, q − burst) / B``. L is the time of small
messages, B the slope of large ones, and the burst accounts for what those took less than L and B predict. L consists of
a ``start`` and one latency per step; an all-reduce of two ranks has two steps where its halves have one. With so few
equations, noise could make either negative; so a start is assumed to be about as long as a step, unless the
measurements contradict that.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gradsync.base.errors import ConfigurationError
from gradsync.base.files import from_json, whole_file
from gradsync.observe.explain.link import fit_line
from gradsync.observe.explain.merging import merge
from gradsync.observe.explain.split import find_stragglers, split
from gradsync.observe.plan.network import REDUCTIONS, Link, Operation, ReductionCost, Schedule, Topology, Transport, Way
from gradsync.observe.plan.profile import BucketProfile, Jitter, StepProfile
from gradsync.observe.recording import Header, Recording, Step, read_recordings

__all__ = ["Calibration", "Reading", "fit_transport", "no_link", "recorded", "slow_for_good"]

FORMAT = 1
# A start is assumed to be as long as a step, with the weight of this many measured operations.
BELIEF = 0.5
# Messages that take BYTES_COUNT times as long as the smallest show the bandwidth; at least FEWEST of the largest.
BYTES_COUNT, FEWEST = 10, 3
# A burst that is less of the largest message is noise.
LEAST_BURST = 0.01
# Of a message between hosts, by Gloo over TCP, where nobody has measured it.
SOCKETS = 1e-4
# Of a run: the first ones allocate, learn orders and lay buckets out.
SKIPPED = 3
WAYS: dict[str, Way] = {"SharedMemory": "shared", "PeerExchange": "exchange", "Hierarchical": "hierarchical"}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A measured collective among ``ranks``, one per host, after a pause: tensor bytes, the slowest rank's seconds."""

    operation: Operation
    way: Way
    nbytes: int
    seconds: float
    ranks: int = 2

    @property
    def rounds(self) -> int:
        return 2 if self.operation == "all_reduce" else 1

    @property
    def through(self) -> float:
        """The bytes that leave a rank in the collective."""
        return self.rounds * (self.ranks - 1) / self.ranks * self.nbytes

    @property
    def steps(self) -> int:
        """How many messages wait for each other, one after the other."""
        return self.rounds * (self.ranks - 1 if self.way == "ring" else 1)


def fit_transport(readings: Sequence[Reading], *, in_flight: int = 1, hidden: float = 1.0) -> Transport:
    """A transport whose collectives take as long as the ``readings``, which are of one number of ranks."""
    if not readings:
        raise ConfigurationError("a transport is fitted to readings of at least one collective, got none")
    largest = [each for each in readings if each.operation == "all_reduce"] or list(readings)
    bandwidth, burst = _fit_link(largest)
    groups: dict[tuple[Operation, Way], list[Reading]] = {}
    for each in readings:
        groups.setdefault((each.operation, each.way), []).append(each)
    ranks = readings[0].ranks
    made: dict[tuple[Operation, Way], Transport] = {}
    for way in dict.fromkeys(each.way for each in readings):
        alike = {key: group for key, group in groups.items() if key[1] == way}
        start, latency = _split([(group[0].steps, _fit_latency(group, bandwidth, burst)) for group in alike.values()])
        link = Link(latency=latency, bandwidth=bandwidth, burst=burst)
        topology = Topology(ranks=ranks, between=link, ranks_per_host=ranks if way == "shared" else 1)
        transport = Transport(topology=topology, way=way, start=start, in_flight=in_flight, hidden=hidden)
        made |= dict.fromkeys(alike, transport)
    main = made.get(("all_reduce", "ring")) or made[next(iter(made))]
    others = {operation: each for (operation, way), each in made.items() if way != main.way}
    return replace(main, others={key: each for key, each in others.items() if key != "all_reduce"})


def _fit_link(readings: Sequence[Reading]) -> tuple[float, float]:
    """Fit bandwidth and burst, by the line through those messages whose time is that of their bytes."""
    ordered = sorted(readings, key=lambda each: each.through)
    least = ordered[0]
    large = [each for each in ordered if each.seconds > BYTES_COUNT * least.seconds]
    if len(large) < FEWEST:
        large = ordered[-FEWEST:]
    if large[0].through == large[-1].through:
        return max(ordered[-1].through / ordered[-1].seconds, 1.0), 0.0
    # Each reading counts by its share of its time.
    slope, x, y = fit_line([(each.through, each.seconds, 1 / each.seconds**2) for each in large])
    if slope <= 0:
        # Noise has it that more bytes take no longer: the largest alone tells.
        return ordered[-1].through / ordered[-1].seconds, 0.0
    burst = (least.seconds - (y - slope * x)) / slope
    return 1 / slope, burst if burst > LEAST_BURST * ordered[-1].through else 0.0


def _fit_latency(readings: Iterable[Reading], bandwidth: float, burst: float) -> float:
    """Fit the latency by what remains beside the bytes: of messages that are small, where it is most of the time."""
    ordered = sorted(readings, key=lambda each: each.nbytes)
    rest = [each.seconds - max(0.0, each.through - burst) / bandwidth for each in ordered[: max(1, len(ordered) // 2)]]
    return max(statistics.median(rest), 0.0)


def _split(latencies: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Split latencies into start and step, by least squares of ``start + steps · step``."""
    rows = [(1.0, float(steps), seconds) for steps, seconds in latencies]
    rows.append((BELIEF, -BELIEF, 0.0))
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ay, by = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    start, step = (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant
    if start < 0:
        return 0.0, sum(s * y for s, y in latencies) / sum(s * s for s, _ in latencies)
    return (start, step) if step >= 0 else (statistics.mean(y for _, y in latencies), 0.0)


def no_link(way: Way, ranks: int) -> str:
    """The warning of a calibration on one host."""
    what = "memory that they share stands in" if way == "shared" else "what joins ranks of one host stands in"
    return (
        f"no network link was measured: for these {ranks} ranks of one host {what} for it, and a link between hosts is "
        "slower. Say how fast it is with --link"
        + (f"; its latency is taken to be {SOCKETS * 1e3:g} ms" * (way == "shared"))
    )


def slow_for_good(rank: int, words: str) -> str:
    """The warning of a calibration with a straggler."""
    return (
        f"rank {rank} was a straggler when this was measured: {words}. The plan takes it for chance that any rank may "
        "have, so that many ranks come out too slow. Measure again without it"
    )


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a plan is made from: the step of a rank, the transport, what codings cost; and on what that was measured.

    ``link`` is the rate in bytes a second that the measured link was said to have: another one is planned for in
    proportion. ``facts`` say in words where the numbers are from, ``warnings`` why not to rely on them.
    """

    profile: StepProfile
    transport: Transport
    jitter: Jitter = field(default_factory=Jitter)
    reductions: Mapping[str, ReductionCost] = field(default_factory=lambda: dict(REDUCTIONS))
    host: float = 0.0
    fixed: float = 0.0
    gather_host: float = 0.0
    link: float | None = None
    measured: bool = True
    facts: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def schedule(self, overlap: Any = "backward", reduction: str = "mean") -> Schedule:
        """A schedule with the costs of this machine."""
        if reduction not in self.reductions:
            raise ConfigurationError(f"a reduction of a plan is one of {', '.join(self.reductions)}, got {reduction!r}")
        own = {"host": self.host, "fixed": self.fixed, "gather_host": self.gather_host}
        return Schedule(overlap=overlap, reduction=self.reductions[reduction], **own)

    def over(self, rate: float) -> "Calibration":
        """The same calibration over a link of another ``rate``: as much of it is used as of the one that was
        measured."""
        between = self.transport.topology.between
        efficiency = between.bandwidth / self.link if self.link else 1.0
        transport = self.transport.over(replace(between, bandwidth=rate * min(efficiency, 1.0)))
        if transport.way == "shared":
            # There is no memory between hosts: sockets, with a latency that was not measured.
            apart = replace(transport.topology, ranks_per_host=1, between=Link(latency=SOCKETS, bandwidth=rate))
            transport = replace(transport, way="ring", topology=apart, start=SOCKETS)
        # What was measured inside of one machine took its cores; a link between machines works by itself.
        return replace(self, transport=transport if self.link else replace(transport, hidden=1.0), link=rate)

    # -- files -----------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        with whole_file(path) as file:
            file.write(json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode())

    @classmethod
    def load(cls, path: Path) -> "Calibration":
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path} is no calibration that can be read: {error}") from None
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ConfigurationError(
                f"{path} is no calibration of format {FORMAT}. Measure again with: gradsync plan --measure {path}"
            )
        if "wire" in data:
            # Its name in files of earlier versions.
            data["transport"] = data.pop("wire")
        try:
            return from_json(cls, data)
        except ValueError as error:
            raise ConfigurationError(f"{path} is a calibration with something wrong in it: {error}") from None


# -- from a recording -------------------------------------------------------------------------------------------------
#
# It is derived from the spans of each step, the times at which each bucket was ready, the sizes of parameters in the
# order of their buckets, and the measured cost of an all-reduce. A recording does not say when a parameter is needed in
# forward; what is ready last is assumed to be needed first, in the same proportion.


def recorded(folder: Path) -> Calibration:
    """The calibration in a recording, from which a plan for more ranks, or for another link, can be made."""
    ranks = read_recordings(folder)
    profiles = [_profile(rank, folder) for rank in ranks]
    # The middle one of the ranks: who differs from it for good is jitter to a plan.
    middle = sorted(profiles, key=lambda each: each.compute)[len(profiles) // 2]
    header, words = ranks[0].header, f"{ranks[0].header.name or 'a model'} on {ranks[0].header.world_size} ranks"
    transport = _transport(header)
    return Calibration(
        profile=middle,
        transport=transport,
        jitter=Jitter.between(_compute_seconds(ranks)),
        facts={"recording": words, "transport": header.communicator},
        warnings=tuple(_warnings(ranks, transport)),
    )


def _warnings(ranks: Sequence[Recording], transport: Transport) -> Iterator[str]:
    """The warnings of a calibration, by the verdict of ``gradsync explain``: a rank that others wait for there is a
    straggler here."""
    timeline = merge(ranks)
    for straggler in find_stragglers(timeline, split(timeline)):
        yield slow_for_good(straggler.rank, str(straggler))
    hosts = {rank.header.identity for rank in ranks}
    if transport.way == "shared" or (len(hosts) == 1 and hosts != {""}):
        yield no_link(transport.way, len(ranks))


def _usable(rank: Recording) -> list[Step]:
    """The steps with one synchronization, of the buckets there were in the end."""
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
    return StepProfile(
        forward=forward,
        backward=backward,
        data=statistics.median(between) / micro,
        optimizer=statistics.median(step.spent("optimizer") for step in steps),
        buckets=tuple(_pieces(rank, steps, forward, backward)),
        micro_batches=micro,
    )


def _pieces(rank: Recording, steps: Sequence[Step], forward: float, backward: float) -> Iterator[BucketProfile]:
    """Parameters in the order of their buckets, ready one after the other between two buckets."""
    layout = rank.layouts[steps[-1].layout]
    before, number = 0.0, 0
    for index, bucket in enumerate(layout):
        known = [
            max(0.0, each.ready - part.begin)
            for (part,) in (step.synchronizations for step in steps)
            for each in part.buckets
            if each.index == index and each.ready is not None
        ]
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


def _compute_seconds(ranks: Sequence[Recording]) -> list[list[float]]:
    """The seconds that each rank computed, in those steps that all of them have kept."""
    rows = [{step.number: step.spent("forward") + step.spent("backward") for step in _usable(rank)} for rank in ranks]
    common = sorted(set.intersection(*(set(row) for row in rows)))
    return [[row[number] for number in common] for row in rows]


def _transport(header: Header) -> Transport:
    """The transport as an all-reduce was measured when the model was wrapped."""
    ranks = header.world_size
    if header.link is None or ranks == 1:
        raise ConfigurationError(
            f"the recording, of {ranks} ranks, does not say what an all-reduce costs, so there is nothing to plan "
            "with. Record at least two ranks that choose their bucket sizes, or: gradsync plan --measure plan.json"
        )
    latency, per_byte = header.link
    way: Way = next((way for word, way in WAYS.items() if word in header.communicator), "ring")
    steps = 2 * (ranks - 1) if way == "ring" else 2
    traffic = 2 * (ranks - 1) / ranks * (ranks if way == "shared" else 1)
    # A start is about as long as a step.
    each = latency / (steps + 1)
    link, local = Link(latency=each, bandwidth=traffic / per_byte), ranks if way == "shared" else 1
    return Transport(topology=Topology(ranks=ranks, ranks_per_host=local, between=link), way=way, start=each)
