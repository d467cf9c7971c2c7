"""Simulates a step: ranks that compute, start buckets in order and wait for them, over one link.

::

    during backward   data  forward  backward ──┬──┬──┬─┐ waits ┌ optimizer        each ┬ starts an all-reduce
    next forward      forward, which waits for │  each bucket's gather │ backward with reduce-scatters │ optimizer

Buckets are started as the engine does: in one order, when they are full and their turn has come, the last one when
backward has ended. A collective begins when the last rank has started it and the link is free. A few steps are
simulated, until they repeat; identical ranks are simulated once.
"""

import bisect
import functools
import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from gradsync.base.errors import ConfigurationError
from gradsync.observe.plan.event_loop import Core, EventLoop, SharedLink, Transfer
from gradsync.observe.plan.network import Operation, Schedule, Transport
from gradsync.observe.plan.profile import BucketProfile, StepProfile

__all__ = ["SimulatedBucket", "SimulatedStep", "StepParts", "simulate"]

# Steps that are simulated before, and those that are averaged.
WARM_UP = {"backward": 1, "none": 1, "next-forward": 4}
COUNTED = {"backward": 2, "none": 2, "next-forward": 4}
# Control flags, where reductions do not carry them.
CONTROL_BYTES = 1024


@dataclass(frozen=True, kw_only=True)
class SimulatedBucket:
    """Seconds since the step began: full on the last rank, its collective begun, reduced; and, where new parameters are
    gathered, when those of this bucket had arrived."""

    index: int
    nbytes: int
    ready: float
    start: float
    reduced: float
    gathered: float | None = None


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Where the time of one rank went, in seconds. All but ``hidden`` add up to the step.

    ``waiting`` is time in which this rank was done and the link had nothing to do, since another rank was not;
    ``exposed`` is communication that this rank waited for, ``hidden`` communication behind its compute.
    """

    data: float
    forward: float
    backward: float
    optimizer: float
    host: float
    waiting: float
    exposed: float
    hidden: float

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @property
    def step(self) -> float:
        return self.data + self.compute + self.optimizer + self.host + self.waiting + self.exposed


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """A simulated step: ``step`` is what a window takes on average; ``ranks`` the parts of it, one for each profile
    that was given."""

    step: float
    ranks: tuple[StepParts, ...]
    buckets: tuple[SimulatedBucket, ...]

    @property
    def slowest(self) -> StepParts:
        """The parts of the rank that waits least for others."""
        return min(self.ranks, key=lambda parts: parts.waiting)


def simulate(
    profiles: StepProfile | Sequence[StepProfile], transport: Transport, schedule: Schedule | None = None
) -> SimulatedStep:
    """Simulate a step of the ranks of ``transport``: all alike, or with a profile for each of those that differ.

    Profiles must agree on their buckets. What costs time is how many profiles there are, not how many ranks.
    """
    given = [profiles] if isinstance(profiles, StepProfile) else list(profiles)
    if not given or len(given) > transport.ranks:
        raise ConfigurationError(f"expected one profile for all ranks, or up to {transport.ranks}; got {len(given)}")
    sizes = [tuple(bucket.nbytes for bucket in profile.buckets) for profile in given]
    if len(set(sizes)) > 1:
        raise ConfigurationError(
            "the profiles of ranks must have the same buckets, since they reduce them together; got "
            f"{' and '.join(sorted({str(len(each)) for each in sizes}))} buckets, or other sizes"
        )
    different = list(dict.fromkeys(given))
    run = _Run(different, transport, schedule or Schedule())
    parts = dict(zip(different, run.parts(), strict=True))
    return SimulatedStep(step=run.step, ranks=tuple(parts[each] for each in given), buckets=run.buckets())


# What a rank does next: the part of the step, and seconds of work or a transfer to wait for.
Work = Generator[tuple[str, float | Transfer], None, None]


class _Rank:
    """A simulated rank, and its records of each step."""

    def __init__(self, profile: StepProfile, loop: EventLoop, core: Core) -> None:
        self.profile, self._loop, self._core = profile, loop, core
        self.began: list[float] = []
        # By step: seconds by name, and waits for communication as intervals.
        self.spent: list[dict[str, float]] = []
        self.waits: list[list[tuple[float, float]]] = []

    def begin(self) -> None:
        self.began.append(self._loop.now)
        self.spent.append(dict.fromkeys(("data", "forward", "backward", "optimizer", "host"), 0.0))
        self.waits.append([])

    def follow(self, work: Work) -> None:
        """Do what ``work`` yields, one after the other."""
        part, wait = next(work, ("", None))
        since = self._loop.now

        def waited() -> None:
            if self._loop.now > since:
                self.waits[-1].append((since, self._loop.now))
            self.follow(work)

        def computed() -> None:
            self.spent[-1][part] += self._loop.now - since
            self.follow(work)

        if isinstance(wait, Transfer):
            # From the clock, not from within: many waits in a row must not become many calls in each other.
            wait.when_done(lambda: self._loop.after(0.0, waited))
        elif wait is not None:
            self._core.compute(wait, computed)


class _Run:
    """One simulation of a step."""

    def __init__(self, profiles: Sequence[StepProfile], transport: Transport, schedule: Schedule) -> None:
        self._transport, self._schedule = transport, schedule
        self._sharded = schedule.overlap == "next-forward"
        self._warm_up, self._counted = WARM_UP[schedule.overlap], COUNTED[schedule.overlap]
        self._loop = EventLoop()
        self._link = SharedLink(self._loop, burst=transport.topology.between.burst, in_flight=transport.in_flight)
        # Asked for the same sizes in every step.
        self._cost = functools.cache(transport.cost)
        self._ranks = [
            _Rank(profile, self._loop, Core(self._loop, self._link, transport.hidden)) for profile in profiles
        ]
        # By step and bucket.
        self._reductions: dict[tuple[int, int], Transfer] = {}
        self._gathers: dict[tuple[int, int], Transfer] = {}
        self._ready: dict[tuple[int, int], float] = {}
        for rank in self._ranks:
            rank.follow(self._work_of(rank))
        self._loop.run()
        self._active = _Active(self._link.active)

    # -- what a rank does ------------------------------------------------------------------------------------------

    def _work_of(self, rank: _Rank) -> Work:
        profile = rank.profile
        for number in range(self._warm_up + self._counted):
            rank.begin()
            if self._sharded:
                yield "data", profile.data
                yield from self._awaiting_forward(profile, number - 1)
            # All micro-batches but the one that synchronizes. Nothing is in flight, so that their order does not
            # matter: with shards, all that was gathered has arrived in the first forward.
            more = profile.micro_batches - 1
            if more:
                yield "data", more * profile.data
                yield "forward", more * profile.forward
                yield "backward", more * profile.backward
            if not self._sharded:
                yield "data", profile.data
                yield "forward", profile.forward
            yield from self._backward(profile, number)
            for bucket in profile.buckets:
                yield "reduction", self._reductions[number, bucket.index]
            # With shards, each rank updates its own, and all gather what they have, first what is needed first.
            yield "optimizer", profile.optimizer / self._transport.ranks if self._sharded else profile.optimizer
            for bucket in profile.buckets[::-1] if self._sharded else ():
                self._join(self._gathers, (number, bucket.index), [("all_gather", bucket.nbytes)])
        rank.begin()

    def _backward(self, profile: StepProfile, number: int) -> Work:
        """The backward that synchronizes: what is ready is started, the last bucket at the end."""
        schedule, computed = self._schedule, 0.0
        overlapping = () if schedule.overlap == "none" else profile.buckets[:-1]
        for bucket in overlapping:
            if bucket.ready > computed:
                yield "backward", min(bucket.ready, profile.backward) - computed
                computed = min(bucket.ready, profile.backward)
            yield from self._reduce(profile, number, bucket)
        yield "backward", max(0.0, profile.backward - computed)
        if schedule.fixed:
            yield "host", schedule.fixed
        for bucket in profile.buckets[len(overlapping) :]:
            yield from self._reduce(profile, number, bucket)

    def _reduce(self, profile: StepProfile, number: int, bucket: BucketProfile) -> Work:
        key, reduction = (number, bucket.index), self._schedule.reduction
        self._ready[key] = max(self._ready.get(key, 0.0), self._loop.now)
        own = self._schedule.host + reduction.encode * bucket.nbytes
        if own:
            yield "host", own
        if not self._sharded:
            sent = [(operation, bucket.nbytes * reduction.share) for operation in reduction.operations]
            self._join(self._reductions, key, sent, decode=reduction.decode * bucket.nbytes / len(sent))
            return
        flags: list[tuple[Operation, float]] = [("all_reduce", CONTROL_BYTES)]
        is_last = bucket.index == len(profile.buckets) - 1
        self._join(self._reductions, key, [("reduce_scatter", bucket.nbytes), *(flags if is_last else [])])

    def _awaiting_forward(self, profile: StepProfile, before: int) -> Work:
        """A forward whose layers wait for the parameters that the step ``before`` has made."""
        computed = 0.0
        awaited = sorted(profile.buckets, key=lambda bucket: (bucket.need, -bucket.index))
        for bucket in awaited if before >= 0 else ():
            need = min(bucket.need, profile.forward)
            if need > computed:
                yield "forward", need - computed
                computed = need
            yield "gather", self._gathers[before, bucket.index]
            if self._schedule.gather_host:
                yield "host", self._schedule.gather_host
        yield "forward", max(0.0, profile.forward - computed)

    def _join(
        self,
        transfers: dict[tuple[int, int], Transfer],
        key: tuple[int, int],
        sent: Sequence[tuple[Operation, float]],
        decode: float = 0.0,
    ) -> None:
        """Have a rank start these collectives, with ``decode`` seconds after each; the first one creates it."""
        if key not in transfers:
            phases = [(decode if place else 0.0, self._cost(*each)) for place, each in enumerate(sent)]
            transfers[key] = Transfer(len(self._ranks), phases, after=decode)
        self._link.join(transfers[key])

    # -- what came of it ---------------------------------------------------------------------------------------------

    @property
    def step(self) -> float:
        """The seconds of a step, on the rank that is last."""
        first, last = self._warm_up, self._warm_up + self._counted
        ends = [max(rank.began[place] for rank in self._ranks) for place in (first, last)]
        return (ends[1] - ends[0]) / self._counted

    def parts(self) -> list[StepParts]:
        """The parts of the step of each rank."""
        return [self._parts(rank) for rank in self._ranks]

    def _parts(self, rank: _Rank) -> StepParts:
        counted = range(self._warm_up, self._warm_up + self._counted)
        each = 1.0 / self._counted
        spent = {name: sum(rank.spent[number][name] for number in counted) * each for name in rank.spent[0]}
        waits = [wait for number in counted for wait in rank.waits[number]]
        exposed = sum(self._active.within(*wait) for wait in waits)
        active = self._active.within(rank.began[counted.start], rank.began[counted.stop])
        return StepParts(
            **spent,
            waiting=max(0.0, sum(until - since for since, until in waits) - exposed) * each,
            exposed=exposed * each,
            hidden=max(0.0, active - exposed) * each,
        )

    def buckets(self) -> tuple[SimulatedBucket, ...]:
        number = self._warm_up + self._counted - 1
        began = min(rank.began[number] for rank in self._ranks)
        return tuple(
            SimulatedBucket(
                index=bucket.index,
                nbytes=bucket.nbytes,
                ready=self._ready[number, bucket.index] - began,
                start=self._reductions[number, bucket.index].began_at - began,
                reduced=self._reductions[number, bucket.index].done_at - began,
                gathered=self._gathers[number, bucket.index].done_at - began if self._sharded else None,
            )
            for bucket in self._ranks[0].profile.buckets
        )


class _Active:
    """Records when something was in flight, to be asked for how long of a span."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        self._begins, self._ends = [begin for begin, _ in spans], [end for _, end in spans]
        self._before = [0.0, *itertools.accumulate(end - begin for begin, end in spans)]

    def within(self, since: float, until: float) -> float:
        return self._until(until) - self._until(since)

    def _until(self, moment: float) -> float:
        place = bisect.bisect_right(self._begins, moment)
        if not place:
            return 0.0
        return self._before[place] - max(0.0, self._ends[place - 1] - moment)
