"""Simulates a step: ranks that compute, start buckets in order and wait for them, over one wire.

::

    during backward   data  forward  backward ──┬──┬──┬─┐ waits ┌ optimizer        each ┬ starts an all-reduce
    next forward      forward, which waits for │  each bucket's gather │ backward with reduce-scatters │ optimizer

Buckets are started as the engine does: in one order, when they are full and their turn has come, the last one when
backward has ended. A collective begins when the last rank has started it and the wire is free. A few steps are
simulated, until they repeat; identical ranks are simulated once.
"""

import bisect
import functools
import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from gradsync.base.errors import ConfigurationError
from gradsync.observe.plan.event_loop import Core, EventLoop, SharedLink, Traffic, Transfer, TransferPhase
from gradsync.observe.plan.network import Operation, Schedule, Transport
from gradsync.observe.plan.profile import StepProfile

__all__ = ["SimulatedBucket", "SimulatedStep", "StepParts", "simulate"]

# Steps that are simulated before, and those that are averaged.
WARM_UP = {"backward": 1, "none": 1, "next-forward": 4}
COUNTED = {"backward": 2, "none": 2, "next-forward": 4}
# Control flags, where reductions do not carry them.
TAIL_BYTES = 1024


@dataclass(frozen=True, kw_only=True)
class SimulatedBucket:
    """In seconds since the step began: full on the last rank, on the wire, reduced; and, where new parameters are
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

    ``waiting`` is time in which this rank was done and the wire had nothing to do, since another rank was not;
    ``exposed`` time in which it waited for the wire; ``hidden`` time in which the wire worked behind its compute.
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
    """``step`` is what a window takes on average; ``ranks`` the parts of it, one for each profile that was given."""

    step: float
    ranks: tuple[StepParts, ...]
    buckets: tuple[SimulatedBucket, ...]

    @property
    def slowest(self) -> StepParts:
        """Of the rank that waits least for others."""
        return min(self.ranks, key=lambda parts: parts.waiting)


def simulate(
    profiles: StepProfile | Sequence[StepProfile], wire: Transport, schedule: Schedule | None = None
) -> SimulatedStep:
    """A step of the ranks of ``wire``: all alike, or with a profile for each of those that differ.

    Profiles must agree on their buckets. What costs time is how many profiles there are, not how many ranks.
    """
    given = [profiles] if isinstance(profiles, StepProfile) else list(profiles)
    if not given or len(given) > wire.ranks:
        raise ConfigurationError(f"expected one profile for all ranks, or up to {wire.ranks}; got {len(given)}")
    sizes = [tuple(bucket.nbytes for bucket in profile.buckets) for profile in given]
    if len(set(sizes)) > 1:
        raise ConfigurationError(
            "the profiles of ranks must have the same buckets, since they reduce them together; got "
            f"{' and '.join(sorted({str(len(each)) for each in sizes}))} buckets, or other sizes"
        )
    different = list(dict.fromkeys(given))
    run = _Run(different, wire, schedule or Schedule())
    parts = dict(zip(different, run.parts(), strict=True))
    return SimulatedStep(step=run.step, ranks=tuple(parts[each] for each in given), buckets=run.buckets())


Wait = float | Transfer


class _Rank:
    """One rank, and its records of each step."""

    def __init__(self, profile: StepProfile, loop: EventLoop, core: Core) -> None:
        self.profile, self._loop, self._core = profile, loop, core
        self.began: list[float] = []
        # By step: seconds by name, and waits for the wire as intervals.
        self.spent: list[dict[str, float]] = []
        self.waits: list[list[tuple[float, float]]] = []

    def begin(self) -> None:
        self.began.append(self._loop.now)
        self.spent.append(dict.fromkeys(("data", "forward", "backward", "optimizer", "host"), 0.0))
        self.waits.append([])

    def follow(self, work: Generator[tuple[str, Wait], None, None]) -> None:
        """Do what ``work`` says, one after the other."""
        item = next(work, None)
        if item is None:
            return
        part, wait = item
        since = self._loop.now

        def go_on() -> None:
            if isinstance(wait, Transfer):
                if self._loop.now > since:
                    self.waits[-1].append((since, self._loop.now))
            else:
                self.spent[-1][part] += self._loop.now - since
            self.follow(work)

        if isinstance(wait, Transfer):
            # From the clock, not from within: many waits in a row must not become many calls in each other.
            wait.when_done(lambda: self._loop.after(0.0, go_on))
        else:
            self._core.compute(wait, go_on)


class _Run:
    """One simulation."""

    def __init__(self, profiles: Sequence[StepProfile], wire: Transport, schedule: Schedule) -> None:
        self._wire, self._schedule = wire, schedule
        # Asked for the same sizes in every step.
        self._cost = functools.cache(wire.cost)
        self._warm_up, self._counted = WARM_UP[schedule.overlap], COUNTED[schedule.overlap]
        loop = EventLoop()
        link = SharedLink(loop, wire.topology.between.burst)
        self._traffic = Traffic(loop, link, wire.in_flight)
        self._ranks = [_Rank(profile, loop, Core(loop, link, wire.hidden)) for profile in profiles]
        self._reductions: dict[tuple[int, int], Transfer] = {}
        self._gathers: dict[tuple[int, int], Transfer] = {}
        self._ready: dict[tuple[int, int], float] = {}
        self._loop = loop
        for rank in self._ranks:
            rank.follow(self._life(rank))
        loop.run()
        self._active = _Active(self._traffic.active)

    # -- the life of a rank ----------------------------------------------------------------------------------------

    def _life(self, rank: _Rank) -> Generator[tuple[str, Wait], None, None]:
        profile, sharded = rank.profile, self._schedule.overlap == "next-forward"
        for number in range(self._warm_up + self._counted):
            rank.begin()
            if sharded:
                yield "data", profile.data
                yield from self._awaiting_forward(rank, number - 1)
            # With shards, all that was gathered has arrived in the first forward.
            yield from self._accumulate(profile)
            if not sharded:
                yield "data", profile.data
                yield "forward", profile.forward
            yield from self._backward(rank, number)
            for bucket in profile.buckets:
                yield "wire", self._reductions[number, bucket.index]
            if sharded:
                yield from self._scattered_step(rank, number)
            else:
                yield "optimizer", profile.optimizer
        rank.begin()

    def _accumulate(self, profile: StepProfile) -> Generator[tuple[str, Wait], None, None]:
        """All micro-batches but the one that synchronizes. The wire rests, so that their order does not matter."""
        more = profile.micro_batches - 1
        if more:
            yield "data", more * profile.data
            yield "forward", more * profile.forward
            yield "backward", more * profile.backward

    def _backward(self, rank: _Rank, number: int) -> Generator[tuple[str, Wait], None, None]:
        """The backward that synchronizes: what is ready is started, the last bucket at the end."""
        profile, schedule = rank.profile, self._schedule
        last = len(profile.buckets) - 1
        computed = 0.0
        overlapping = [] if schedule.overlap == "none" else profile.buckets[:last]
        for bucket in overlapping:
            if bucket.ready > computed:
                yield "backward", min(bucket.ready, profile.backward) - computed
                computed = min(bucket.ready, profile.backward)
            yield from self._reduce(rank, number, bucket.index, bucket.nbytes)
        yield "backward", max(0.0, profile.backward - computed)
        if schedule.fixed:
            yield "host", schedule.fixed
        for bucket in profile.buckets[len(overlapping) :]:
            yield from self._reduce(rank, number, bucket.index, bucket.nbytes)

    def _reduce(self, rank: _Rank, number: int, index: int, nbytes: int) -> Generator[tuple[str, Wait], None, None]:
        reduction = self._schedule.reduction
        self._ready[number, index] = max(self._ready.get((number, index), 0.0), self._loop.now)
        own = self._schedule.host + reduction.encode * nbytes
        if own:
            yield "host", own
        transfer = self._reductions.get((number, index))
        if transfer is None:
            made = self._scatter if self._schedule.overlap == "next-forward" else self._all_reduce
            transfer = self._reductions[number, index] = made(rank, nbytes, number, index)
        self._traffic.join(transfer)

    def _awaiting_forward(self, rank: _Rank, before: int) -> Generator[tuple[str, Wait], None, None]:
        """A forward whose layers wait for the parameters that the step ``before`` has made."""
        profile = rank.profile
        computed = 0.0
        for bucket in sorted(profile.buckets, key=lambda bucket: (bucket.need, -bucket.index)):
            if before < 0:
                break
            need = min(bucket.need, profile.forward)
            if need > computed:
                yield "forward", need - computed
                computed = need
            yield "wire", self._gathers[before, bucket.index]
            if self._schedule.gather_host:
                yield "host", self._schedule.gather_host
        yield "forward", max(0.0, profile.forward - computed)

    def _scattered_step(self, rank: _Rank, number: int) -> Generator[tuple[str, Wait], None, None]:
        """Each rank updates its share, and all gather what they have, first what is needed first."""
        profile = rank.profile
        yield "optimizer", profile.optimizer / self._wire.ranks
        for bucket in profile.buckets[::-1]:
            transfer = self._gathers.get((number, bucket.index))
            if transfer is None:
                transfer = self._gathers[number, bucket.index] = self._gather(bucket.nbytes)
            self._traffic.join(transfer)

    # -- what goes over the wire -------------------------------------------------------------------------------------

    def _all_reduce(self, rank: _Rank, nbytes: int, number: int, index: int) -> Transfer:
        reduction = self._schedule.reduction
        operations = reduction.operations
        decode = reduction.decode * nbytes / len(operations)
        phases = [
            TransferPhase(before=decode if place else 0.0, cost=self._cost(operation, nbytes * reduction.share))
            for place, operation in enumerate(operations)
        ]
        return Transfer(len(self._ranks), phases, after=decode)

    def _scatter(self, rank: _Rank, nbytes: int, number: int, index: int) -> Transfer:
        phases = [self._phase("reduce_scatter", nbytes)]
        if index == len(rank.profile.buckets) - 1:
            phases.append(self._phase("all_reduce", TAIL_BYTES))
        return Transfer(len(self._ranks), phases)

    def _gather(self, nbytes: int) -> Transfer:
        return Transfer(len(self._ranks), [self._phase("all_gather", nbytes)])

    def _phase(self, operation: Operation, nbytes: float) -> TransferPhase:
        return TransferPhase(before=0.0, cost=self._cost(operation, nbytes))

    # -- what came of it ---------------------------------------------------------------------------------------------

    @property
    def step(self) -> float:
        """On the rank that is last."""
        first, last = self._warm_up, self._warm_up + self._counted
        ends = [max(rank.began[place] for rank in self._ranks) for place in (first, last)]
        return (ends[1] - ends[0]) / self._counted

    def parts(self) -> list[StepParts]:
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
                start=_known(self._reductions[number, bucket.index].began_at) - began,
                reduced=_known(self._reductions[number, bucket.index].done_at) - began,
                gathered=self._gathered(number, bucket.index, began),
            )
            for bucket in self._ranks[0].profile.buckets
        )

    def _gathered(self, number: int, index: int, began: float) -> float | None:
        gather = self._gathers.get((number, index))
        return None if gather is None else _known(gather.done_at) - began


def _known(moment: float | None) -> float:
    assert moment is not None, "a transfer was never finished"
    return moment


class _Active:
    """When the wire was under way, to be asked for how long of a span."""

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
