"""Where ranks are, which links connect them, what a collective costs, and what a step sends.

A collective costs messages one after another, and bytes through the narrowest link.

With p ranks, n bytes, a latency α and a bandwidth B:

==============  ============================================  =====================================================
ring            all-reduce 2(p−1)·α + 2(p−1)/p·n/B            Gloo's and NCCL's; a half of it: (p−1)·α + (p−1)/p·n/B
exchange        all-reduce 2·α + 2(p−1)/p·n/B                 every rank sends to every other; a half of it: 1·α
tree            all-reduce 2·log2(p)·α + 2·n/B                NCCL's for what is small, or at many ranks
fastest         the cheaper of ring and tree                  as NCCL chooses by itself
hierarchical    inside a host, then between h hosts           the same between hosts, with h in the place of p
shared          copies in the memory of one host              one host only
==============  ============================================  =====================================================

``start`` is added to each, whatever its size: calls, threads, kernels; and ``message`` for every message of a rank.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gradsync.base.errors import ConfigurationError

__all__ = [
    *("EXACT", "REDUCTIONS", "Cost", "Link", "Operation", "Overlap", "ReductionCost", "Schedule", "Topology"),
    *("Transport", "Way"),
]

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
Overlap = Literal["backward", "none", "next-forward"]
Way = Literal["ring", "exchange", "tree", "fastest", "hierarchical", "shared"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A message of n bytes takes ``latency + n / bandwidth`` seconds, in both directions at the same time.

    ``burst`` bytes pass at once after a pause, and are saved up again at the rate of the bandwidth: what links that are
    shaped by a token bucket do, in a lab as at those who rent out machines.
    """

    latency: float
    bandwidth: float
    burst: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.latency >= 0 and math.isfinite(self.latency) and self.burst >= 0):
            raise ConfigurationError(
                "a link has a bandwidth above 0 bytes a second, and a latency and a burst of 0 or more; got "
                f"bandwidth={self.bandwidth}, latency={self.latency}, burst={self.burst}"
            )


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A topology of ``ranks`` on hosts of ``ranks_per_host``. A host has one link ``between`` it and the others, or as
    fast a share of several; its ranks are joined by ``inside``, or by the same link if there is none.

    Where there are more than ``hosts_per_switch``, what leaves a switch has an ``oversubscription``-th of what its
    hosts could send.
    """

    ranks: int
    between: Link
    inside: Link | None = None
    ranks_per_host: int = 1
    oversubscription: float = 1.0
    hosts_per_switch: int | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_host < 1 or not self.oversubscription >= 1:
            raise ConfigurationError(
                "a topology has at least one rank, one rank a host, and an oversubscription of 1 or more; got "
                f"ranks={self.ranks}, ranks_per_host={self.ranks_per_host}, oversubscription={self.oversubscription}"
            )
        if self.hosts_per_switch is not None and self.hosts_per_switch < 1:
            raise ConfigurationError(f"a switch joins at least one host, got hosts_per_switch={self.hosts_per_switch}")

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.ranks_per_host)

    @property
    def local(self) -> int:
        """How many ranks a full host has."""
        return min(self.ranks, self.ranks_per_host)

    @property
    def local_link(self) -> Link:
        """The link between ranks of one host."""
        return self.inside or self.between

    def shared_bandwidth(self, crossing: float) -> float:
        """The bandwidth of one host's link, where all hosts send at once and ``crossing`` of it goes to other
        switches."""
        if self.hosts_per_switch is None or self.hosts <= self.hosts_per_switch:
            return self.between.bandwidth
        return self.between.bandwidth / max(1.0, self.oversubscription * crossing)

    @property
    def crossing_of_neighbours(self) -> float:
        """The share that crosses switches of what hosts send around a ring: one host in a switch sends to another."""
        return 1.0 / (self.hosts_per_switch or self.hosts)

    @property
    def crossing_of_all(self) -> float:
        """The share that crosses switches of what hosts send to all others alike."""
        if self.hosts == 1 or self.hosts_per_switch is None:
            return 0.0
        return max(0, self.hosts - self.hosts_per_switch) / (self.hosts - 1)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a transfer: ``latency`` seconds in which a link has time for others, then ``nbytes`` through one of
    ``bandwidth``."""

    latency: float
    nbytes: float
    bandwidth: float

    @property
    def seconds(self) -> float:
        return self.latency + self.nbytes / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Transport:
    """One transport between the ranks of a topology.

    ``in_flight`` collectives may be in flight at a time: the latency of one hides behind the bytes of another. Compute
    continues during a share ``hidden`` of a transfer: 1 where the transport works by itself, less where it takes the
    cores that compute. ``per_byte`` is the seconds for each byte of a tensor during which no link is used. Operations
    that use a different transport have it in ``others``.
    """

    topology: Topology
    way: Way = "ring"
    start: float = 0.0
    message: float = 0.0
    per_byte: float = 0.0
    in_flight: int = 1
    hidden: float = 1.0
    others: Mapping[Operation, "Transport"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.in_flight < 1 or not 0 < self.hidden <= 1 or min(self.start, self.message, self.per_byte) < 0:
            raise ConfigurationError(
                "a transport has at least 1 collective in flight, hides a share in (0, 1], and has costs of 0 or more; "
                f"got in_flight={self.in_flight}, hidden={self.hidden}, start={self.start}, message={self.message}, "
                f"per_byte={self.per_byte}"
            )
        if self.way == "shared" and self.topology.hosts > 1:
            raise ConfigurationError(
                f"memory is shared within one host, got {self.topology.hosts} hosts. Plan with hierarchical instead"
            )

    @property
    def ranks(self) -> int:
        return self.topology.ranks

    def among(self, ranks: int) -> "Transport":
        """The same transport among ``ranks``."""
        # What shares memory is on one host, however many there are.
        local = max(ranks, self.topology.ranks_per_host) if self.way == "shared" else self.topology.ranks_per_host
        return self._on(replace(self.topology, ranks=ranks, ranks_per_host=local))

    def over(self, between: Link) -> "Transport":
        """The same transport over other links between hosts."""
        return self._on(replace(self.topology, between=between))

    def _on(self, topology: Topology) -> "Transport":
        # Each way has a latency of its own.
        others = {
            operation: other._on(
                replace(topology, between=replace(topology.between, latency=other.topology.between.latency))
            )
            for operation, other in self.others.items()
        }
        return replace(self, topology=topology, others=others)

    def cost(self, operation: Operation, nbytes: float) -> Cost:
        """The cost of a collective on ``nbytes``: those of the whole tensor, also where a rank has or gets a share of
        it."""
        if operation in self.others:
            return self.others[operation].cost(operation, nbytes)
        if self.ranks == 1:
            return Cost(latency=0.0, nbytes=0.0, bandwidth=math.inf)
        rounds = 2 if operation == "all_reduce" else 1
        # There is no other way for what is different for each pair.
        pairs = self.way in ("ring", "tree", "fastest") and operation == "all_to_all"
        law: Callable[[int, float], Cost] = getattr(self, f"_{'exchange' if pairs else self.way}")
        cost = law(rounds, nbytes)
        return replace(cost, latency=cost.latency + self.start + self.per_byte * nbytes)

    def _ring(self, rounds: int, nbytes: float) -> Cost:
        ranks, topology = self.ranks, self.topology
        # Of the p hops of a ring all but one a host stay inside.
        crossing = topology.hosts / ranks if topology.hosts > 1 else 0.0
        step = crossing * topology.between.latency + (1 - crossing) * topology.local_link.latency + self.message
        bandwidth = topology.local_link.bandwidth
        if topology.hosts > 1:
            shared = topology.shared_bandwidth(topology.crossing_of_neighbours)
            bandwidth = shared if topology.inside is None else min(shared, bandwidth)
        traffic = rounds * (ranks - 1) / ranks * nbytes
        return Cost(latency=rounds * (ranks - 1) * step, nbytes=traffic, bandwidth=bandwidth)

    def _exchange(self, rounds: int, nbytes: float) -> Cost:
        ranks, topology = self.ranks, self.topology
        link, senders, receivers, bandwidth = topology.local_link, 1, ranks - 1, topology.local_link.bandwidth
        if topology.hosts > 1:
            # All ranks of a host send to all that are elsewhere, through one link.
            link, senders, receivers = topology.between, topology.local, ranks - topology.local
            bandwidth = topology.shared_bandwidth(topology.crossing_of_all)
        latency = rounds * link.latency + rounds * (ranks - 1) * self.message
        return Cost(latency=latency, nbytes=rounds * senders * receivers / ranks * nbytes, bandwidth=bandwidth)

    def _tree(self, rounds: int, nbytes: float) -> Cost:
        topology = self.topology
        levels = math.ceil(math.log2(topology.hosts)) if topology.hosts > 1 else 0
        latency = levels * topology.between.latency + (topology.local - 1) * topology.local_link.latency
        hops = levels + topology.local - 1
        bandwidth = topology.local_link.bandwidth
        if topology.hosts > 1:
            bandwidth = topology.shared_bandwidth(topology.crossing_of_neighbours)
        return Cost(latency=rounds * (latency + hops * self.message), nbytes=rounds * nbytes, bandwidth=bandwidth)

    def _fastest(self, rounds: int, nbytes: float) -> Cost:
        ring = self._ring(rounds, nbytes)
        # Halves of an all-reduce go by a ring.
        return ring if rounds == 1 else min(ring, self._tree(rounds, nbytes), key=lambda cost: cost.seconds)

    def _hierarchical(self, rounds: int, nbytes: float) -> Cost:
        """A reduce-scatter inside, an exchange of each rank's share between hosts, a gather inside."""
        topology, inside = self.topology, self.topology.local_link
        local, hosts = topology.local, topology.hosts
        within = rounds * ((local - 1) / local * nbytes / inside.bandwidth + (inside.latency if local > 1 else 0.0))
        if hosts == 1:
            return Cost(latency=within, nbytes=0.0, bandwidth=inside.bandwidth)
        messages = rounds * (hosts - 1) * self.message
        return Cost(
            latency=within + rounds * topology.between.latency + messages,
            nbytes=rounds * (hosts - 1) / hosts * nbytes,
            bandwidth=topology.shared_bandwidth(topology.crossing_of_all),
        )

    def _shared(self, rounds: int, nbytes: float) -> Cost:
        """The cost in shared memory: every rank reads its share of all others', and what comes of it, on one host."""
        link = self.topology.local_link
        traffic = rounds * (self.ranks - 1) / self.ranks * nbytes * self.ranks
        return Cost(latency=rounds * link.latency, nbytes=traffic, bandwidth=link.bandwidth)


# -- what a step sends ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReductionCost:
    """A way to reduce a bucket of n bytes: collectives on ``share`` · n bytes, one after the other.

    ``encode`` are seconds a byte that the thread of backward spends before them, ``decode`` seconds a byte between and
    after them, in which nothing is sent for this bucket.
    """

    name: str
    share: float = 1.0
    operations: tuple[Operation, ...] = ("all_reduce",)
    encode: float = 0.0
    decode: float = 0.0

    def __post_init__(self) -> None:
        if not self.share > 0 or self.encode < 0 or self.decode < 0 or not self.operations:
            raise ConfigurationError(
                f"the reduction {self.name} sends a share above 0 of the bytes, by at least one collective, with costs "
                f"of 0 or more; got share={self.share}, encode={self.encode}, decode={self.decode}"
            )


EXACT = ReductionCost(name="mean")

# Scales of a block of 256 numbers are four bytes more. Seconds of coding are those of a core of a CPU server, some GB/s
# in all; a calibration has those of the machine.
_CODED: tuple[Operation, ...] = ("all_to_all", "all_gather")
REDUCTIONS = {
    each.name: each
    for each in (
        EXACT,
        ReductionCost(name="bf16", share=0.5, operations=_CODED, encode=1.5e-10, decode=3e-10),
        ReductionCost(name="fp16", share=0.501, operations=_CODED, encode=4e-10, decode=6e-10),
        ReductionCost(name="int8", share=0.25 + 1 / 256, operations=_CODED, encode=4e-10, decode=6e-10),
        ReductionCost(name="int4", share=0.125 + 1 / 256, operations=_CODED, encode=8e-10, decode=9e-10),
        ReductionCost(name="sign", share=1 / 32 + 1 / 256, operations=_CODED, encode=8e-10, decode=9e-10),
        # Two factors of a matrix of some thousand rows, for rank 4.
        ReductionCost(
            name="low-rank:4", share=0.01, operations=("all_reduce", "all_reduce"), encode=1.2e-9, decode=1.2e-9
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a step is synchronized. ``overlap`` says what a transfer hides behind: backward, as the engine does by
    itself; nothing, as sums after backward do; or the next forward, too, as the sharded optimizer has it.

    ``host`` are seconds of a rank's own for each bucket, in which it does not compute, ``fixed`` the same once a step,
    and ``gather_host`` for each gather of new parameters.
    """

    overlap: Overlap = "backward"
    reduction: ReductionCost = field(default=EXACT)
    host: float = 0.0
    fixed: float = 0.0
    gather_host: float = 0.0
