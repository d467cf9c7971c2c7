"""Hierarchical collectives: one communicator inside each host, another between the hosts.

Ranks of a host share memory, hosts share a link. So each host first sums over its own ranks, and only one sum per host
crosses the link. On every host the first ``leaders`` ranks are *leaders*: each sends one part of the tensor across, so
that several connections and threads are at work. ``between`` is a leader's communicator with the leaders of the same
number on the other hosts::

    host 0   rank 0   rank 1        1  inside: sum, part 0 for the first leader, part 1 for the second
               │        │           2  between: leaders with the same number sum their part
    host 1   rank 2   rank 3        3  inside: everybody gets all parts

All ranks hold the same bits, whatever the timing. Where sums are exact, the result equals that of every other
communicator. Otherwise the rounding differs, because each host sums first: (a + b) + (c + d).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from gradsync.base.errors import ConfigurationError, GradsyncError, MismatchError
from gradsync.communicator.background import Background
from gradsync.communicator.base import Communicator, Handle, ReduceOp
from gradsync.communicator.base_communicator import BaseCommunicator, Here, Shares, Sizes, Start
from gradsync.communicator.collective import DONE, Collective, Work
from gradsync.communicator.device_stage import DeviceCollective
from gradsync.communicator.peer_exchange import PeerExchangeCommunicator
from gradsync.communicator.process_group import ProcessGroupCommunicator
from gradsync.communicator.reducing import divide, work_on_flat
from gradsync.communicator.topology import CommunicatorFactory, HostLayout, find_topology, make_subgroups
from gradsync.communicator.transport_state import FailureDomain, find_root_cause

__all__ = ["HierarchicalCommunicator", "Way"]

# Sums a tensor over the ranks of a communicator, in place.
Way = Callable[[torch.Tensor, Communicator], Handle]

# Below this a part for every leader saves less than it costs.
ONE_LEADER_BYTES = 16 << 10
# Large enough to fill a link, small enough that what is summed before and after it crosses is little.
SLICE_BYTES = 8 << 20


class HierarchicalCommunicator(BaseCommunicator):
    """Collectives in three steps: inside the hosts, between them, inside again.

    ``inside`` spans the ranks of this host, numbered as in ``topology``. ``between`` spans one leader of every host,
    numbered by rank; it is None on ranks that are not leaders and where there is only one host. ``leaders`` is the
    number of leaders per host: all of its ranks, or one where hosts have different numbers of ranks.

    Tensors on an accelerator run the steps on the stream that is current when the collective is started.
    """

    def __init__(
        self,
        inside: Communicator,
        between: Communicator | None,
        topology: HostLayout,
        *,
        rank: int,
        leaders: int | None = None,
    ) -> None:
        super().__init__(rank, topology.world_size)
        self.inside, self.between, self.topology = inside, between, topology
        self.leaders = _leaders(topology, leaders)
        self._host, self._local = topology.places[rank]
        self._failure_domain: FailureDomain | None = None
        self._check_places()

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        inside: CommunicatorFactory = PeerExchangeCommunicator,
        between: CommunicatorFactory = PeerExchangeCommunicator,
        topology: HostLayout | None = None,
        *,
        leaders: int | None = None,
    ) -> Self:
        """Create the groups that are needed, and ``inside`` and ``between`` over them. Collective."""
        topology = topology or find_topology(ProcessGroupCommunicator(group))
        if topology.world_size != dist.get_world_size(group):
            raise ConfigurationError(
                f"the topology has {topology.world_size} ranks, the group has {dist.get_world_size(group)}"
            )
        count = _leaders(topology, leaders)
        domain = FailureDomain(group)
        here = make_subgroups(domain, topology.hosts)
        assert here is not None
        across = None
        if len(topology.hosts) > 1:
            across = make_subgroups(domain, [[host[number] for host in topology.hosts] for number in range(count)])
        made = cls(
            inside(here),
            between(across) if across is not None else None,
            topology,
            rank=dist.get_rank(group),
            leaders=count,
        )
        made.group, made._failure_domain = group, domain
        return made

    def __repr__(self) -> str:
        hosts = " + ".join(str(len(host)) for host in self.topology.hosts)
        return f"HierarchicalCommunicator(rank {self.rank} of {self.world_size} on hosts of {hosts}; {self.inside!r})"

    @property
    def device(self) -> torch.device:
        return self.inside.device

    @property
    def failure(self) -> GradsyncError | None:
        between = None if self.between is None else self.between.failure
        return self.state.failure or self.inside.failure or between

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._allocate_below(self.inside, numel, dtype, device)

    def _make_queue(self) -> Background:
        return Background("gradsync hierarchy")

    def _fail(self, failure: GradsyncError) -> None:
        super()._fail(failure)
        # Ranks that share memory with this one wait in a step that it will not come to, and so do the other leaders.
        self._tell_once(str(failure))

    def _tell_others(self, reason: str) -> None:
        if self._failure_domain is not None:
            find_root_cause(self.inside.group, reason)
        for each in (self.inside, self.between):
            if each is not None:
                each.abort(reason)

    def sum_by(self, tensor: torch.Tensor, way: Way) -> Handle:
        """Sum ``tensor`` over all ranks, in place: inside hosts as it is, and by ``way`` between them.

        ``way`` gets the part that this rank takes across, and ``between``, on a thread of this communicator.
        """
        if self._is_one_host:
            return way(tensor, self.inside)
        self._check("all_reduce", tensor)
        collective = Collective(self, "all_reduce", "sum by hosts", tensor.numel(), tensor.dtype)
        return self._start(collective, tensor, lambda flat: self._reduce(flat, "sum", way))

    def _route(self, collective: Collective, tensor: torch.Tensor, elsewhere: Start, here: Here) -> Handle:
        return elsewhere(self.inside) if self._is_one_host else here(collective)

    def _all_reduce(self, collective: Collective, tensor: torch.Tensor, op: ReduceOp) -> Handle:
        return self._start(collective, tensor, lambda flat: self._reduce(flat, op))

    def _broadcast(self, collective: Collective, tensor: torch.Tensor, source: int) -> Handle:
        return self._start(collective, tensor, lambda flat: self._give(flat, source))

    def _all_gather(self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, shares: Shares) -> Handle:
        if shares is not None:
            return self._start(collective, output, lambda flat: self._gather_uneven(flat, tensor, shares))
        return self._start(collective, output, lambda flat: self._gather(flat, tensor))

    def _reduce_scatter(
        self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, shares: Shares
    ) -> Handle:
        in_lanes = self._everybody_leads and shares is None
        scatter = self._scatter_in_lanes if in_lanes else self._scatter_by_one
        return self._start(collective, output, lambda flat: scatter(flat, tensor, op, shares))

    def _all_to_all(
        self, collective: Collective, output: torch.Tensor, tensor: torch.Tensor, arriving: Sizes, leaving: Sizes
    ) -> Handle:
        return self._start(collective, output, lambda flat: self._exchange(flat, tensor, arriving, leaving))

    # -- steps --------------------------------------------------------------------------------------------------------

    def _reduce(self, flat: torch.Tensor, op: ReduceOp, way: Way | None = None) -> None:
        """Reduce piece by piece: a step is started for all before it is waited for, so one is sent as the next is
        summed."""
        step: ReduceOp = "max" if op == "max" else "sum"
        pieces = list(self._pieces(flat))
        summed = [self._start_inside(piece, step) for piece in pieces]
        crossed = []
        for piece, handle in zip(pieces, summed, strict=True):
            handle.wait()
            crossed.append(self._start_between(piece, step, way))
        spread = []
        for piece, handle in zip(pieces, crossed, strict=True):
            handle.wait()
            if op == "average" and piece.mine is not None:
                piece.mine.div_(self.world_size)
            spread += self._start_spread(piece)
        for handle in spread:
            handle.wait()

    def _give(self, flat: torch.Tensor, source: int) -> None:
        host, local = self.topology.places[source]
        if host == self._host and self.inside.world_size > 1:
            self.inside.broadcast(flat, local).wait()
        for piece in self._pieces(flat):
            if piece.mine is not None and self.between is not None:
                leader = self.topology.hosts[host][self._local]
                self.between.broadcast(piece.mine, self._lane(self._local).index(leader)).wait()
            if host != self._host:
                for handle in self._start_spread(piece):
                    handle.wait()

    def _gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        (self._gather_in_lanes if self._everybody_leads else self._gather_by_one)(output, tensor)

    def _gather_in_lanes(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Leaders gather from those of their number, then the ranks of a host from each other."""
        assert self.between is not None
        across = tensor.new_empty(len(self.topology.hosts) * tensor.numel())
        self.between.all_gather(across, tensor).wait()
        everything = across.new_empty(output.numel())
        self.inside.all_gather(everything, across).wait()
        self._rows(output)[self._ranks_by_lane()] = self._rows(everything)

    def _gather_by_one(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Hosts with fewer ranks fill up what they send: a gather takes as much from everybody."""
        hosts = self.topology.hosts
        numel, width = tensor.numel(), max(len(host) for host in hosts)
        block = tensor.new_zeros(width * numel)
        self.inside.all_gather(block[: self.inside.world_size * numel], tensor).wait()
        everything = block.new_empty(len(hosts) * width * numel)
        if self._local == 0 and self.between is not None:
            self.between.all_gather(everything, block).wait()
        self.inside.broadcast(everything, 0).wait()
        blocks = everything.view(len(hosts), width, numel)
        for host, ranks in enumerate(hosts):
            self._rows(output)[list(ranks)] = blocks[host, : len(ranks)]

    def _gather_uneven(self, output: torch.Tensor, tensor: torch.Tensor, shares: Sizes) -> None:
        """Gather shares of different sizes as if all were as large as the largest."""
        most = max(shares)
        filled = tensor.new_zeros(most)
        filled[: tensor.numel()] = tensor
        everything = tensor.new_empty(self.world_size * most)
        self._gather(everything, filled)
        for share, row in zip(output.split(shares), self._rows(everything), strict=True):
            share.copy_(row[: share.numel()])

    def _scatter_in_lanes(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, shares: Shares) -> None:
        assert self.between is not None
        step: ReduceOp = "max" if op == "max" else "sum"
        ordered = self._rows(tensor)[self._ranks_by_lane()].view(-1)
        mine = ordered.new_empty(len(self.topology.hosts) * output.numel())
        self.inside.reduce_scatter(mine, ordered, step).wait()
        self.between.reduce_scatter(output, mine, step).wait()
        divide(output, op, self.world_size)

    def _scatter_by_one(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, shares: Shares) -> None:
        total = tensor.clone()
        self._reduce(total, op)
        output.copy_(total.split(shares or (output.numel(),) * self.world_size)[self.rank])

    def _exchange(self, output: torch.Tensor, tensor: torch.Tensor, arriving: Sizes, leaving: Sizes) -> None:
        """Exchange by a gather: everybody gets everything, and takes what is its own. Simple, for as many bytes."""
        counts = torch.tensor(leaving, device=tensor.device)
        everybodys = counts.new_empty(self.world_size**2)
        self._gather(everybodys, counts)
        sent: list[list[int]] = self._rows(everybodys).tolist()
        for sender, receiver in enumerate(row[self.rank] for row in sent):
            if receiver != arriving[sender]:
                raise MismatchError(
                    f"rank {sender} sends {receiver} elements to rank {self.rank}, which expects {arriving[sender]}"
                )
        everything = tensor.new_empty(sum(map(sum, sent)))
        self._gather_uneven(everything, tensor, tuple(map(sum, sent)))
        parts = everything.split([count for row in sent for count in row])
        for sender, part in enumerate(output.split(arriving)):
            part.copy_(parts[sender * self.world_size + self.rank])

    def _start_inside(self, piece: "_Slice", step: ReduceOp) -> Work:
        """Afterwards every leader has at least the sum of its part."""
        if self.inside.world_size == 1:
            return DONE
        if piece.mine is not None and piece.parts == self.inside.world_size and step == "sum":
            return self.inside.reduce_scatter(piece.mine, piece.whole)
        return self.inside.all_reduce(piece.whole, step)

    def _start_between(self, piece: "_Slice", step: ReduceOp, way: Way | None) -> Work:
        if self.between is None or piece.mine is None:
            return DONE
        if way is not None:
            return way(piece.mine, self.between)
        return self.between.all_reduce(piece.mine, step)

    def _start_spread(self, piece: "_Slice") -> list[Handle]:
        """Start to give every rank of this host every leader's part."""
        if self.inside.world_size == 1:
            return []
        if piece.mine is not None and piece.parts == self.inside.world_size:
            return [self.inside.all_gather(piece.whole, piece.mine)]
        return [self.inside.broadcast(part, leader) for leader, part in enumerate(piece.whole.chunk(piece.parts))]

    # -- who does what ------------------------------------------------------------------------------------------------

    @property
    def _is_one_host(self) -> bool:
        return len(self.topology.hosts) == 1

    @property
    def _everybody_leads(self) -> bool:
        return self.topology.is_even and self.leaders == self.inside.world_size

    def _pieces(self, flat: torch.Tensor) -> "Iterator[_Slice]":
        """What divides by the leaders in as many parts, slice after slice, and the few elements left in one."""
        divided = 0
        if self.leaders > 1 and flat.nbytes > ONE_LEADER_BYTES:
            divided = flat.numel() // self.leaders * self.leaders
        size = max(1, SLICE_BYTES // flat.element_size() // self.leaders) * self.leaders
        for start in range(0, divided, size):
            yield self._piece(flat[start : min(divided, start + size)], self.leaders)
        for start in range(divided, flat.numel(), size):
            yield self._piece(flat[start : start + size], 1)

    def _piece(self, whole: torch.Tensor, parts: int) -> "_Slice":
        mine = whole.chunk(parts)[self._local] if self._local < parts else None
        return _Slice(whole=whole, parts=parts, mine=mine)

    def _lane(self, number: int) -> list[int]:
        """The leaders of one number, in the order in which ``between`` counts them."""
        return sorted(host[number] for host in self.topology.hosts)

    def _ranks_by_lane(self) -> list[int]:
        return [rank for number in range(self.leaders) for rank in self._lane(number)]

    def _rows(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self.world_size, flat.numel() // self.world_size)

    def _start(self, collective: Collective, result: torch.Tensor, run: Callable[[torch.Tensor], None]) -> Handle:
        if result.is_cpu:
            return self._queue_up(collective, lambda: work_on_flat(result, run))

        def run_now() -> Work:
            with torch.no_grad():
                work_on_flat(result, run)
            return DONE

        return self._issue(DeviceCollective(self, collective, result.device), run_now, on_host=False)

    def _check_places(self) -> None:
        topology, inside, between = self.topology, self.inside, self.between
        ranks = topology.hosts[self._host]
        if (inside.rank, inside.world_size) != (self._local, len(ranks)):
            raise ConfigurationError(
                f"rank {self.rank} is number {self._local} of the {len(ranks)} ranks of its host, but inside counts it "
                f"as {inside.rank} of {inside.world_size}"
            )
        leads = len(topology.hosts) > 1 and self._local < self.leaders
        if leads and between is None:
            raise ConfigurationError(f"rank {self.rank} is a leader of its host and needs a communicator between hosts")
        if between is not None:
            lane = self._lane(self._local) if leads else []
            if not leads or (between.rank, between.world_size) != (lane.index(self.rank), len(lane)):
                raise ConfigurationError(
                    f"rank {self.rank}: between must join its host's leader with the leaders {lane}, or be None on a "
                    f"rank that is no leader, but it counts this rank as {between.rank} of {between.world_size}"
                )


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """What goes through the steps together: ``parts`` leaders per host take equal parts; this rank takes ``mine``."""

    whole: torch.Tensor
    parts: int
    mine: torch.Tensor | None


def _leaders(topology: HostLayout, leaders: int | None) -> int:
    if leaders is None:
        return topology.fewest if topology.is_even else 1
    if not 1 <= leaders <= topology.fewest:
        raise ConfigurationError(
            f"leaders must be at least 1 and at most {topology.fewest}, which is the number of ranks of the smallest "
            f"host, got {leaders}"
        )
    return leaders
