"""One communicator inside each host, another one between the hosts.

Ranks of a host share memory, hosts share a link. So a host's ranks first make one sum of theirs, and only that crosses
the link. On every host the first ``leaders`` ranks are *leaders*: each takes one part of the tensor across, so that
several connections and threads are at work. ``between`` is a leader's communicator with the leaders of the same number
on the other hosts::

    host 0   rank 0   rank 1        1  inside: sum, part 0 for the first leader, part 1 for the second
               │        │           2  between: leaders with the same number sum their part
    host 1   rank 2   rank 3        3  inside: everybody gets all parts

All ranks hold the same bits, whatever the timing. For values whose sums are exact the result is that of every other
communicator. For others it is rounded differently, since hosts are summed first: (a + b) + (c + d).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from gradsync.communicator.background import Background
from gradsync.communicator.base import Communicator, Handle, ReduceOp
from gradsync.communicator.peer_exchange import PeerExchangeCommunicator, check_operation
from gradsync.communicator.process_group import ProcessGroupCommunicator
from gradsync.communicator.subgroups import CommunicatorFactory, make_subgroups
from gradsync.communicator.topology import Topology, find_topology
from gradsync.errors import ConfigurationError

__all__ = ["HierarchicalCommunicator"]

# Below this a part for every leader saves less than it costs.
ONE_LEADER_BYTES = 16 << 10
# Large enough to fill a link, small enough that what is summed before and after it crosses is little.
SLICE_BYTES = 8 << 20


class HierarchicalCommunicator:
    """Collectives in steps: inside the hosts, between them, inside again.

    ``inside`` is over the ranks of this host, numbered as in ``topology``. ``between`` is over one leader of every
    host, numbered by rank, and None on ranks that are no leaders and where there is but one host. ``leaders`` is their
    number on every host: all of its ranks, or one where hosts have different numbers of ranks.

    Tensors of an accelerator take the steps on the stream that is current when the collective is started.
    """

    def __init__(
        self,
        inside: Communicator,
        between: Communicator | None,
        topology: Topology,
        *,
        rank: int,
        leaders: int | None = None,
    ) -> None:
        self.inside, self.between, self.topology = inside, between, topology
        self.leaders = _leaders(topology, leaders)
        self._rank = rank
        self._host, self._local = topology.places[rank]
        self._check()
        self._background = Background("gradsync hierarchy")

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        inside: CommunicatorFactory = PeerExchangeCommunicator,
        between: CommunicatorFactory = PeerExchangeCommunicator,
        topology: Topology | None = None,
        *,
        leaders: int | None = None,
    ) -> Self:
        """Make the groups that are needed, and ``inside`` and ``between`` over them. A collective."""
        topology = topology or find_topology(ProcessGroupCommunicator(group))
        if topology.world_size != dist.get_world_size(group):
            raise ConfigurationError(
                f"the topology has {topology.world_size} ranks, the group has {dist.get_world_size(group)}"
            )
        count = _leaders(topology, leaders)
        here = make_subgroups(group, topology.hosts)
        assert here is not None
        across = None
        if len(topology.hosts) > 1:
            across = make_subgroups(group, [[host[number] for host in topology.hosts] for number in range(count)])
        return cls(
            inside(here),
            between(across) if across is not None else None,
            topology,
            rank=dist.get_rank(group),
            leaders=count,
        )

    def __repr__(self) -> str:
        hosts = " + ".join(str(len(host)) for host in self.topology.hosts)
        return f"HierarchicalCommunicator(rank {self.rank} of {self.world_size} on hosts of {hosts}; {self.inside!r})"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def device(self) -> torch.device:
        return self.inside.device

    def averages(self, device: torch.device) -> bool:
        return False

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.inside.allocate(numel, dtype, device)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Handle:
        if self._is_one_host:
            return self.inside.all_reduce(tensor, op)
        check_operation(op, tensor.dtype)
        return self._start(tensor, lambda flat: self._reduce(flat, op))

    def broadcast(self, tensor: torch.Tensor, source: int) -> Handle:
        if self._is_one_host:
            return self.inside.broadcast(tensor, source)
        return self._start(tensor, lambda flat: self._broadcast(flat, source))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        if self._is_one_host:
            return self.inside.all_gather(output, tensor)
        gather = self._gather_in_lanes if self._everybody_leads else self._gather_by_one
        return self._start(output, lambda flat: gather(flat, tensor.contiguous().view(-1)))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        if self._is_one_host:
            return self.inside.reduce_scatter(output, tensor)
        scatter = self._scatter_in_lanes if self._everybody_leads else self._scatter_by_one
        return self._start(output, lambda flat: scatter(flat, tensor.contiguous().view(-1)))

    # -- steps --------------------------------------------------------------------------------------------------------

    def _reduce(self, flat: torch.Tensor, op: ReduceOp) -> None:
        """Every step is started for all pieces before it is waited for: one crosses the link as the next is summed."""
        step: ReduceOp = "max" if op == "max" else "sum"
        pieces = list(self._pieces(flat))
        summed = [self._start_inside(piece, step) for piece in pieces]
        crossed = []
        for piece, handle in zip(pieces, summed, strict=True):
            handle.wait()
            crossed.append(self._start_between(piece, step))
        spread = []
        for piece, handle in zip(pieces, crossed, strict=True):
            handle.wait()
            if op == "average" and piece.mine is not None:
                piece.mine.div_(self.world_size)
            spread += self._start_spread(piece)
        for handle in spread:
            handle.wait()

    def _broadcast(self, flat: torch.Tensor, source: int) -> None:
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

    def _scatter_in_lanes(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        assert self.between is not None
        ordered = self._rows(tensor)[self._ranks_by_lane()].view(-1)
        mine = ordered.new_empty(len(self.topology.hosts) * output.numel())
        self.inside.reduce_scatter(mine, ordered).wait()
        self.between.reduce_scatter(output, mine).wait()

    def _scatter_by_one(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        total = tensor.clone()
        self._reduce(total, "sum")
        output.copy_(self._rows(total)[self.rank])

    def _start_inside(self, piece: "_Piece", step: ReduceOp) -> Handle:
        """Afterwards every leader has the sum of its part, at the least."""
        if self.inside.world_size == 1:
            return _Done()
        if piece.mine is not None and piece.parts == self.inside.world_size and step == "sum":
            return self.inside.reduce_scatter(piece.mine, piece.whole)
        return self.inside.all_reduce(piece.whole, step)

    def _start_between(self, piece: "_Piece", step: ReduceOp) -> Handle:
        if self.between is None or piece.mine is None:
            return _Done()
        return self.between.all_reduce(piece.mine, step)

    def _start_spread(self, piece: "_Piece") -> list[Handle]:
        """Everybody of this host gets every leader's part."""
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

    def _pieces(self, flat: torch.Tensor) -> "Iterator[_Piece]":
        """What divides by the leaders in as many parts, slice after slice, and the few elements left in one."""
        divided = 0
        if self.leaders > 1 and flat.nbytes > ONE_LEADER_BYTES:
            divided = flat.numel() // self.leaders * self.leaders
        size = max(1, SLICE_BYTES // flat.element_size() // self.leaders) * self.leaders
        for start in range(0, divided, size):
            yield self._piece(flat[start : min(divided, start + size)], self.leaders)
        for start in range(divided, flat.numel(), size):
            yield self._piece(flat[start : start + size], 1)

    def _piece(self, whole: torch.Tensor, parts: int) -> "_Piece":
        mine = whole.chunk(parts)[self._local] if self._local < parts else None
        return _Piece(whole=whole, parts=parts, mine=mine)

    def _lane(self, number: int) -> list[int]:
        """The leaders of one number, in the order in which ``between`` counts them."""
        return sorted(host[number] for host in self.topology.hosts)

    def _ranks_by_lane(self) -> list[int]:
        return [rank for number in range(self.leaders) for rank in self._lane(number)]

    def _rows(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self.world_size, flat.numel() // self.world_size)

    def _start(self, result: torch.Tensor, run: Callable[[torch.Tensor], None]) -> Handle:
        def work() -> None:
            flat = result.contiguous().view(-1)
            run(flat)
            if flat.data_ptr() != result.data_ptr():
                result.copy_(flat.view_as(result))

        if result.is_cpu:
            return self._background.start(work)
        with torch.no_grad():
            work()
        return _Done()

    def _check(self) -> None:
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
class _Piece:
    """What goes through the steps together: ``parts`` leaders of a host take an equal part each, this rank ``mine``."""

    whole: torch.Tensor
    parts: int
    mine: torch.Tensor | None


class _Done:
    """A collective that was run when it was started."""

    def wait(self) -> None:
        pass


def _leaders(topology: Topology, leaders: int | None) -> int:
    if leaders is None:
        return topology.fewest if topology.is_even else 1
    if not 1 <= leaders <= topology.fewest:
        raise ConfigurationError(
            f"leaders must be at least 1 and at most {topology.fewest}, which is the number of ranks of the smallest "
            f"host, got {leaders}"
        )
    return leaders
