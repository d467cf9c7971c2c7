"""What the communicators out of point-to-point messages and several groups promise beyond the common contract.

Sums of noise, which round, are compared bit by bit with those of ranks as threads of one process.
"""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gradsync.communicator import (
    Communicator,
    InProcessWorld,
    ProcessGroupCommunicator,
    choose_communicator,
    hierarchical,
)
from gradsync.communicator.hierarchical import HierarchicalCommunicator
from gradsync.communicator.peer_exchange import PeerExchangeCommunicator
from gradsync.communicator.round_robin import RoundRobinCommunicator
from gradsync.communicator.topology import HOST_VARIABLE, HostLayout, find_topology
from gradsync.errors import ConfigurationError, PeerFailedError
from gradsync.testing import run_ranks
from tests.laws import costly
from tests.ranks import RankPool, pool_of
from tests.wires import wire_called

pytestmark = pytest.mark.timeout(120)

Call = tuple[str, int, torch.dtype, int]


def noise(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Of very different sizes, so that every order of summation rounds differently."""
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    if dtype == torch.bool:
        return torch.rand(numel, generator=generator) < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 100, (numel,), generator=generator).to(dtype)
    return (torch.randn(numel, generator=generator, dtype=torch.float64).exp() ** 3).to(dtype)


def perform(wire: Communicator, calls: list[Call]) -> list[torch.Tensor]:
    """Start all of them, then wait. Every other one in memory of the wire's own, as buckets are."""
    results, handles = [], []
    for number, (kind, numel, dtype, source) in enumerate(calls):
        tensor = noise(wire.rank, numel * wire.world_size if kind == "reduce_scatter" else numel, dtype)
        if number % 2:
            tensor = wire.allocate(tensor.numel(), dtype, torch.device("cpu")).copy_(tensor)
        result = tensor
        if kind == "all_gather":
            result = torch.zeros(numel * wire.world_size, dtype=dtype)
            if number % 2:
                result = wire.allocate(result.numel(), dtype, torch.device("cpu"))
            handles.append(wire.all_gather(result, tensor))
        elif kind == "reduce_scatter":
            result = torch.zeros(numel, dtype=dtype)
            handles.append(wire.reduce_scatter(result, tensor))
        elif kind == "broadcast":
            handles.append(wire.broadcast(tensor, source % wire.world_size))
        else:
            handles.append(wire.all_reduce(tensor, kind))  # type: ignore[arg-type]
        results.append(result)
    for handle in handles:
        handle.wait()
    return results


def perform_in_process(calls: list[Call]) -> list[torch.Tensor]:
    return perform(choose_communicator(), calls)


def perform_by_exchange(calls: list[Call], part_bytes: int, in_flight: int) -> list[torch.Tensor]:
    group = dist.distributed_c10d._get_default_group()
    return perform(PeerExchangeCommunicator(group, part_bytes=part_bytes, in_flight=in_flight), calls)


FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OTHERS = [torch.int64, torch.uint8, torch.bool]
# Small enough for one step, around its limit, and so large that it takes several chunks.
NUMELS = st.one_of(st.integers(0, 30), st.integers(2000, 9000), st.integers(20_000, 24_000))


@st.composite
def call(draw: st.DrawFn) -> Call:
    kind = draw(st.sampled_from(["sum", "average", "max", "broadcast", "all_gather", "reduce_scatter"]))
    dtypes = {"average": [*FLOATS, torch.complex64], "max": FLOATS + OTHERS}
    dtype = draw(st.sampled_from(dtypes.get(kind, [*FLOATS, *OTHERS, torch.complex64])))
    return kind, draw(NUMELS), dtype, draw(st.integers(0, 3))


@costly
@given(
    calls=st.lists(call(), min_size=3, max_size=7),
    part_bytes=st.sampled_from([5000, 65_536, 4 << 20]),
    in_flight=st.integers(1, 9),
)
def test_an_exchange_has_the_bits_of_threads(
    process_ranks: RankPool, calls: list[Call], part_bytes: int, in_flight: int
) -> None:
    expected = run_ranks(perform_in_process, process_ranks.world_size, calls)
    results = process_ranks.run(perform_by_exchange, calls, part_bytes, in_flight)
    for rank, tensors in enumerate(results):
        for what, tensor, reference in zip(calls, tensors, expected[rank], strict=True):
            assert torch.equal(tensor, reference), f"{what} on rank {rank}"


def perform_in_shared_memory(calls: list[Call]) -> list[torch.Tensor]:
    return [result.clone() for result in perform(wire_called("shared-memory"), calls)]


# Beside those: more than a stage holds, and more than a block.
LARGE = st.one_of(NUMELS, st.integers(300_000, 310_000))


@costly
@given(calls=st.lists(st.tuples(call(), LARGE), min_size=3, max_size=7))
def test_shared_memory_has_the_bits_of_threads(process_ranks: RankPool, calls: list[tuple[Call, int]]) -> None:
    sized = [(kind, numel, dtype, source) for (kind, _, dtype, source), numel in calls]
    expected = run_ranks(perform_in_process, process_ranks.world_size, sized)
    results = process_ranks.run(perform_in_shared_memory, sized)
    for rank, tensors in enumerate(results):
        for what, tensor, reference in zip(sized, tensors, expected[rank], strict=True):
            assert torch.equal(tensor, reference), f"{what} on rank {rank}"


def chunks_of_one_element() -> torch.Tensor:
    wire = PeerExchangeCommunicator(dist.distributed_c10d._get_default_group(), part_bytes=1, in_flight=1)
    output = torch.zeros(11)
    wire.reduce_scatter(output, noise(wire.rank, 11 * wire.world_size, torch.float32)).wait()
    return output


def test_a_chunk_holds_at_least_an_element(process_ranks: RankPool) -> None:
    n = process_ranks.world_size
    total = noise(0, 11 * n, torch.float32)
    for rank in range(1, n):
        total += noise(rank, 11 * n, torch.float32)
    assert torch.equal(torch.cat(process_ranks.run(chunks_of_one_element)), total)


def odd_shapes() -> list[torch.Tensor]:
    """A number, a tensor with gaps, and one whose memory is in another order."""
    wire = PeerExchangeCommunicator(dist.distributed_c10d._get_default_group())
    tensors = [
        torch.tensor(3.0),
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.arange(30.0).view(5, 6).t(),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ]
    for handle in [wire.all_reduce(tensor) for tensor in tensors]:
        handle.wait()
    return tensors


def test_any_shape_is_reduced() -> None:
    for number, gaps, turned, channels in pool_of(2).run(odd_shapes):
        assert number == 6.0
        assert torch.equal(gaps, 2 * torch.arange(24.0).view(4, 6)[:, ::2])
        assert torch.equal(turned, 2 * torch.arange(30.0).view(5, 6).t())
        assert torch.equal(channels, torch.full((2, 3, 4, 4), 2.0))


def assert_true(value: bool) -> None:
    assert value


def cross_waits() -> list[bool]:
    """Two wires over one group that run in opposite orders, are waited for so, and messages of the user's between."""
    group: Any = dist.distributed_c10d._get_default_group()
    wires = [PeerExchangeCommunicator(group), PeerExchangeCommunicator(group, part_bytes=10_000)]
    # What is started first on the wire that is held up meets, on the other rank, the other wire's.
    held = threading.Event()
    wires[group.rank()]._queue.start(lambda: assert_true(held.wait(10)))
    threading.Timer(0.2, held.set).start()
    tensors = [torch.full((40_000,), float(number)) for number in range(4)]
    mine, other = torch.tensor([float(group.rank())]), torch.zeros(1)
    handles = [wires[number % 2].all_reduce(tensor) for number, tensor in enumerate(tensors)]
    peer = 1 - group.rank()
    sent, received = dist.isend(mine, peer), dist.irecv(other, peer)
    for number in (0, 1, 2, 3) if group.rank() == 0 else (3, 2, 1, 0):
        handles[number].wait()
    assert sent is not None
    assert received is not None
    sent.wait()
    received.wait()
    return [bool((tensor == 2 * number).all()) for number, tensor in enumerate(tensors)] + [float(other) == peer]


def test_wires_over_one_group_do_not_mix() -> None:
    assert pool_of(2).run(cross_waits) == [[True] * 5] * 2


# -- hosts -----------------------------------------------------------------------------------------------------------

HOSTS: list[tuple[tuple[tuple[int, ...], ...], int | None]] = [
    (((0, 1), (2, 3)), None),
    (((0, 1), (2, 3)), 1),
    # The second leaders come in another order than their hosts.
    (((0, 3), (1, 2)), None),
    (((0, 1, 2), (3,)), None),
    (((0, 1, 2, 3),), None),
    (((0,), (1,), (2, 3)), None),
]


def over_hosts(hosts: tuple[tuple[int, ...], ...], leaders: int | None) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hierarchical, "SLICE_BYTES", 30_000)
        return perform_over_hosts(hosts, leaders)


def perform_over_hosts(hosts: tuple[tuple[int, ...], ...], leaders: int | None) -> dict[str, Any]:
    """Whole numbers: every result is one that is known. Noise: the same bits on all ranks."""
    wire = HierarchicalCommunicator.over(
        dist.distributed_c10d._get_default_group(), topology=HostLayout(hosts=hosts), leaders=leaders
    )
    n, numel = wire.world_size, 9001
    values = [torch.arange(numel) % 5 + rank for rank in range(n)]
    total, largest = values[wire.rank].clone(), values[wire.rank].clone()
    mean, noisy = values[wire.rank].double(), noise(wire.rank, numel, torch.float32)
    given = [values[wire.rank].clone() for _ in range(n)]
    gathered, scattered = torch.zeros(n * numel, dtype=torch.int64), torch.zeros(numel, dtype=torch.int64)
    handles = [wire.all_reduce(total), wire.all_reduce(largest, "max"), wire.all_reduce(mean, "average")]
    handles += [wire.broadcast(tensor, source) for source, tensor in enumerate(given)]
    handles += [wire.all_gather(gathered, values[wire.rank]), wire.all_reduce(noisy)]
    handles += [wire.reduce_scatter(scattered, torch.cat([values[wire.rank] * (share + 1) for share in range(n)]))]
    for handle in handles:
        handle.wait()
    expected = torch.stack(values).sum(0)
    return {
        "sum": torch.equal(total, expected),
        "max": torch.equal(largest, values[-1]),
        "average": torch.equal(mean, expected.double() / n),
        "broadcast": all(torch.equal(tensor, value) for tensor, value in zip(given, values, strict=True)),
        "all_gather": torch.equal(gathered, torch.cat(values)),
        "reduce_scatter": torch.equal(scattered, expected * (wire.rank + 1)),
        "noise": noisy,
    }


@pytest.mark.parametrize(("hosts", "leaders"), HOSTS)
def test_hosts_of_any_kind(hosts: tuple[tuple[int, ...], ...], leaders: int | None) -> None:
    results = pool_of(4).run(over_hosts, hosts, leaders)
    for result in results:
        assert {name for name, right in result.items() if name != "noise" and not right} == set()
        assert torch.equal(result["noise"], results[0]["noise"])


def hosts_in_a_subgroup() -> list[float]:
    """Three of four ranks, twice: those that led have more groups the second time. Rank 0 takes no part."""
    group = dist.new_group([1, 2, 3])
    sums = []
    if dist.get_rank() > 0:
        for _ in range(2):
            wire = HierarchicalCommunicator.over(group, topology=HostLayout(hosts=((0, 1), (2,))))
            tensor = torch.full((5000,), float(dist.get_rank()))
            wire.all_reduce(tensor).wait()
            sums.append(float(tensor.unique()))
        turns = RoundRobinCommunicator.over(group, 2)
        tensor = torch.ones(1)
        turns.all_reduce(tensor).wait()
        sums.append(float(tensor))
    return sums


def test_groups_are_made_of_a_part_of_the_world() -> None:
    assert pool_of(4).run(hosts_in_a_subgroup) == [[], *[[6.0, 6.0, 3.0]] * 3]


def topologies() -> list[HostLayout]:
    wire = ProcessGroupCommunicator(dist.distributed_c10d._get_default_group())
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(HOST_VARIABLE, raising=False)
        found = [find_topology(wire)]
        patch.setenv(HOST_VARIABLE, "odd" if wire.rank % 2 else "even")
        return [*found, find_topology(wire)]


def test_the_topology_is_found() -> None:
    for real, pretended in pool_of(4).run(topologies):
        assert real.hosts == ((0, 1, 2, 3),)
        assert pretended.hosts == ((0, 2), (1, 3))
        assert pretended.places == ((0, 0), (1, 0), (0, 1), (1, 1))


# -- turns -----------------------------------------------------------------------------------------------------------


def test_collectives_take_turns() -> None:
    wires = [InProcessWorld(1).communicator(0) for _ in range(3)]
    wire = RoundRobinCommunicator(wires)
    for _ in range(2):
        wire.all_reduce(torch.ones(1)).wait()
        wire.all_gather(torch.ones(1), torch.ones(1)).wait()
    assert [each._order.count for each in wires] == [2, 1, 1]
    assert wire.allocate(3, torch.int32, torch.device("cpu")).tolist() == [0, 0, 0]


# -- failures --------------------------------------------------------------------------------------------------------


def come_late() -> tuple[str, str]:
    """Rank 1 stays away. Whoever waits learns it, and again when it tries once more."""
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    said = ["", ""]
    if dist.get_rank() == 0:
        wire = PeerExchangeCommunicator(group)
        for attempt in range(2):
            with pytest.raises(PeerFailedError) as raised:
                wire.all_reduce(torch.ones(3)).wait()
            said[attempt] = str(raised.value)
    dist.barrier()
    return said[0], said[1]


def test_who_does_not_answer_is_named() -> None:
    (first, second), _ = pool_of(2).run(come_late)
    assert "rank 1 did not answer rank 0 in collective 1 (all_reduce sum of 3 × torch.float32)" in first
    assert second == first


# -- bad input -------------------------------------------------------------------------------------------------------


def refused() -> list[str]:
    group = dist.distributed_c10d._get_default_group()
    wire = PeerExchangeCommunicator(group)
    attempts = [
        lambda: PeerExchangeCommunicator(group, part_bytes=0),
        lambda: PeerExchangeCommunicator(group, in_flight=0),
        lambda: RoundRobinCommunicator.over(group, 0),
        lambda: RoundRobinCommunicator([wire, InProcessWorld(1).communicator(0)]),
        lambda: HierarchicalCommunicator.over(group, topology=HostLayout(hosts=((0, 1),)), leaders=3),
        lambda: HierarchicalCommunicator.over(group, topology=HostLayout(hosts=((0,),))),
        lambda: HierarchicalCommunicator(wire, None, HostLayout(hosts=((0,), (1,))), rank=wire.rank),
        lambda: HierarchicalCommunicator(wire, wire, HostLayout(hosts=((0, 1),)), rank=wire.rank),
        lambda: HierarchicalCommunicator(
            InProcessWorld(1).communicator(0), None, HostLayout(hosts=((0,), (1,))), rank=wire.rank
        ),
    ]
    said = []
    for attempt in attempts:
        with pytest.raises(ConfigurationError) as raised:
            attempt()
        said.append(str(raised.value))
    return said


def test_bad_input_is_refused_before_anything_is_sent() -> None:
    said, _ = pool_of(2).run(refused)
    expected = [
        "part_bytes=0",
        "in_flight=0",
        "got 0",
        "rank 0 of 1, rank 0 of 2",
        "at most 2",
        "the topology has 1 ranks, the group has 2",
        "inside counts it as 0 of 2",
        "no leader",
        "is a leader",
    ]
    for words, text in zip(expected, said, strict=True):
        assert words in text


@pytest.mark.parametrize("hosts", [(), ((0,), ()), ((0, 2),), ((0, 0),), ((1,), (0,)), ((1, 0),)])
def test_a_topology_has_every_rank_once_and_in_order(hosts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ConfigurationError, match="in order"):
        HostLayout(hosts=hosts)


def test_a_round_needs_somebody() -> None:
    with pytest.raises(ConfigurationError, match="at least one"):
        RoundRobinCommunicator([])
