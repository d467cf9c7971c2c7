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
from tests.communicators import communicator_called
from tests.laws import costly
from tests.ranks import RankPool, pool_of

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


def perform(communicator: Communicator, calls: list[Call]) -> list[torch.Tensor]:
    """Start all of them, then wait. Every other one in memory of the communicator's own, as buckets are."""
    results, handles = [], []
    for number, (kind, numel, dtype, source) in enumerate(calls):
        tensor = noise(communicator.rank, numel * communicator.world_size if kind == "reduce_scatter" else numel, dtype)
        if number % 2:
            tensor = communicator.allocate(tensor.numel(), dtype, torch.device("cpu")).copy_(tensor)
        result = tensor
        if kind == "all_gather":
            result = torch.zeros(numel * communicator.world_size, dtype=dtype)
            if number % 2:
                result = communicator.allocate(result.numel(), dtype, torch.device("cpu"))
            handles.append(communicator.all_gather(result, tensor))
        elif kind == "reduce_scatter":
            result = torch.zeros(numel, dtype=dtype)
            handles.append(communicator.reduce_scatter(result, tensor))
        elif kind == "broadcast":
            handles.append(communicator.broadcast(tensor, source % communicator.world_size))
        else:
            handles.append(communicator.all_reduce(tensor, kind))  # type: ignore[arg-type]
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
    return [result.clone() for result in perform(communicator_called("shared-memory"), calls)]


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
    communicator = PeerExchangeCommunicator(dist.distributed_c10d._get_default_group(), part_bytes=1, in_flight=1)
    output = torch.zeros(11)
    communicator.reduce_scatter(output, noise(communicator.rank, 11 * communicator.world_size, torch.float32)).wait()
    return output


def test_a_chunk_holds_at_least_an_element(process_ranks: RankPool) -> None:
    n = process_ranks.world_size
    total = noise(0, 11 * n, torch.float32)
    for rank in range(1, n):
        total += noise(rank, 11 * n, torch.float32)
    assert torch.equal(torch.cat(process_ranks.run(chunks_of_one_element)), total)


def odd_shapes() -> list[torch.Tensor]:
    """A number, a tensor with gaps, and one whose memory is in another order."""
    communicator = PeerExchangeCommunicator(dist.distributed_c10d._get_default_group())
    tensors = [
        torch.tensor(3.0),
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.arange(30.0).view(5, 6).t(),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ]
    for handle in [communicator.all_reduce(tensor) for tensor in tensors]:
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
    """Two communicators over one group run in opposite orders, and are waited for so; the user sends between them."""
    group: Any = dist.distributed_c10d._get_default_group()
    communicators = [PeerExchangeCommunicator(group), PeerExchangeCommunicator(group, part_bytes=10_000)]
    # What is started first on the wire that is held up meets, on the other rank, the other communicator's.
    held = threading.Event()
    communicators[group.rank()]._queue.start(lambda: assert_true(held.wait(10)))
    threading.Timer(0.2, held.set).start()
    tensors = [torch.full((40_000,), float(number)) for number in range(4)]
    mine, other = torch.tensor([float(group.rank())]), torch.zeros(1)
    handles = [communicators[number % 2].all_reduce(tensor) for number, tensor in enumerate(tensors)]
    peer = 1 - group.rank()
    sent, received = dist.isend(mine, peer), dist.irecv(other, peer)
    for number in (0, 1, 2, 3) if group.rank() == 0 else (3, 2, 1, 0):
        handles[number].wait()
    assert sent is not None
    assert received is not None
    sent.wait()
    received.wait()
    return [bool((tensor == 2 * number).all()) for number, tensor in enumerate(tensors)] + [float(other) == peer]


def test_communicators_over_one_group_do_not_mix() -> None:
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
    communicator = HierarchicalCommunicator.over(
        dist.distributed_c10d._get_default_group(), topology=HostLayout(hosts=hosts), leaders=leaders
    )
    n, numel = communicator.world_size, 9001
    values = [torch.arange(numel) % 5 + rank for rank in range(n)]
    total, largest = values[communicator.rank].clone(), values[communicator.rank].clone()
    mean, noisy = values[communicator.rank].double(), noise(communicator.rank, numel, torch.float32)
    given = [values[communicator.rank].clone() for _ in range(n)]
    gathered, scattered = torch.zeros(n * numel, dtype=torch.int64), torch.zeros(numel, dtype=torch.int64)
    handles = [
        communicator.all_reduce(total),
        communicator.all_reduce(largest, "max"),
        communicator.all_reduce(mean, "average"),
    ]
    handles += [communicator.broadcast(tensor, source) for source, tensor in enumerate(given)]
    handles += [communicator.all_gather(gathered, values[communicator.rank]), communicator.all_reduce(noisy)]
    handles += [
        communicator.reduce_scatter(
            scattered, torch.cat([values[communicator.rank] * (share + 1) for share in range(n)])
        )
    ]
    for handle in handles:
        handle.wait()
    expected = torch.stack(values).sum(0)
    return {
        "sum": torch.equal(total, expected),
        "max": torch.equal(largest, values[-1]),
        "average": torch.equal(mean, expected.double() / n),
        "broadcast": all(torch.equal(tensor, value) for tensor, value in zip(given, values, strict=True)),
        "all_gather": torch.equal(gathered, torch.cat(values)),
        "reduce_scatter": torch.equal(scattered, expected * (communicator.rank + 1)),
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
            communicator = HierarchicalCommunicator.over(group, topology=HostLayout(hosts=((0, 1), (2,))))
            tensor = torch.full((5000,), float(dist.get_rank()))
            communicator.all_reduce(tensor).wait()
            sums.append(float(tensor.unique()))
        turns = RoundRobinCommunicator.over(group, 2)
        tensor = torch.ones(1)
        turns.all_reduce(tensor).wait()
        sums.append(float(tensor))
    return sums


def test_groups_are_made_of_a_part_of_the_world() -> None:
    assert pool_of(4).run(hosts_in_a_subgroup) == [[], *[[6.0, 6.0, 3.0]] * 3]


def topologies() -> list[HostLayout]:
    communicator = ProcessGroupCommunicator(dist.distributed_c10d._get_default_group())
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(HOST_VARIABLE, raising=False)
        found = [find_topology(communicator)]
        patch.setenv(HOST_VARIABLE, "odd" if communicator.rank % 2 else "even")
        return [*found, find_topology(communicator)]


def test_the_topology_is_found() -> None:
    for real, pretended in pool_of(4).run(topologies):
        assert real.hosts == ((0, 1, 2, 3),)
        assert pretended.hosts == ((0, 2), (1, 3))
        assert pretended.places == ((0, 0), (1, 0), (0, 1), (1, 1))


# -- turns -----------------------------------------------------------------------------------------------------------


def test_collectives_take_turns() -> None:
    communicators = [InProcessWorld(1).communicator(0) for _ in range(3)]
    communicator = RoundRobinCommunicator(communicators)
    for _ in range(2):
        communicator.all_reduce(torch.ones(1)).wait()
        communicator.all_gather(torch.ones(1), torch.ones(1)).wait()
    assert [each._order.count for each in communicators] == [2, 1, 1]
    assert communicator.allocate(3, torch.int32, torch.device("cpu")).tolist() == [0, 0, 0]


# -- failures --------------------------------------------------------------------------------------------------------


def come_late() -> tuple[str, str]:
    """Rank 1 stays away. Whoever waits learns it, and again when it tries once more."""
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    said = ["", ""]
    if dist.get_rank() == 0:
        communicator = PeerExchangeCommunicator(group)
        for attempt in range(2):
            with pytest.raises(PeerFailedError) as raised:
                communicator.all_reduce(torch.ones(3)).wait()
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
    communicator = PeerExchangeCommunicator(group)
    attempts = [
        lambda: PeerExchangeCommunicator(group, part_bytes=0),
        lambda: PeerExchangeCommunicator(group, in_flight=0),
        lambda: RoundRobinCommunicator.over(group, 0),
        lambda: RoundRobinCommunicator([communicator, InProcessWorld(1).communicator(0)]),
        lambda: HierarchicalCommunicator.over(group, topology=HostLayout(hosts=((0, 1),)), leaders=3),
        lambda: HierarchicalCommunicator.over(group, topology=HostLayout(hosts=((0,),))),
        lambda: HierarchicalCommunicator(communicator, None, HostLayout(hosts=((0,), (1,))), rank=communicator.rank),
        lambda: HierarchicalCommunicator(
            communicator, communicator, HostLayout(hosts=((0, 1),)), rank=communicator.rank
        ),
        lambda: HierarchicalCommunicator(
            InProcessWorld(1).communicator(0), None, HostLayout(hosts=((0,), (1,))), rank=communicator.rank
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
