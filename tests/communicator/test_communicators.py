"""The contract of every communicator, in one file run over all of them, and the manners of the in-process one.

`ranks` decides which communicator a test meets: threads have the in-process one, processes that of a process group or
one of `tests.communicators`.
Values are small whole numbers, which every dtype here holds exactly, so that results are compared by equality.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync
from gradsync.communicator import (
    Communicator,
    Handle,
    InProcessCommunicator,
    InProcessWorld,
    ProcessGroupCommunicator,
    ambient_communicator,
    choose_communicator,
)
from gradsync.errors import ConfigurationError
from gradsync.testing import run_ranks
from tests.communicators import SIZED, WIRES, CommunicatorRanks
from tests.ranks import RankPool, Ranks, ThreadRanks

pytestmark = pytest.mark.timeout(120)


def test_every_communicator_is_tried() -> None:
    assert {name for name, _ in SIZED} == {*WIRES, "threads", "processes"}


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def pattern(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Different on every rank and at every place, and now this rank, now that one has the largest value."""
    return ((torch.arange(numel) * (rank + 2)) % 7 + rank).to(dtype)


def patterns(world_size: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([pattern(rank, numel, dtype) for rank in range(world_size)])


# -- what every communicator says of itself -------------------------------------------------------------------------


def introduce() -> dict[str, Any]:
    communicator = choose_communicator()
    memory = communicator.allocate(5, torch.bfloat16, communicator.device)
    return {
        "type": type(communicator).__name__,
        "name": repr(communicator),
        "keeps the protocol": isinstance(communicator, Communicator),
        "rank": communicator.rank,
        "world size": communicator.world_size,
        "device": communicator.device,
        "averages": communicator.averages(communicator.device),
        "memory": memory,
        "handle": isinstance(communicator.all_reduce(torch.zeros(1)), Handle),
    }


def test_it_says_who_it_is(ranks: Ranks) -> None:
    expected = InProcessCommunicator if isinstance(ranks, ThreadRanks) else ProcessGroupCommunicator
    for rank, said in enumerate(ranks.run(introduce)):
        assert (said["type"] == expected.__name__) == (not isinstance(ranks, CommunicatorRanks))
        assert f"rank {rank} of {ranks.world_size}" in said["name"]
        assert said["keeps the protocol"]
        assert said["handle"]
        assert (said["rank"], said["world size"]) == (rank, ranks.world_size)
        on_gpu = "nccl" in said["name"]
        assert said["device"] == torch.device("cuda:0" if on_gpu else "cpu")
        assert said["averages"] is on_gpu
        assert torch.equal(said["memory"], torch.zeros(5, dtype=torch.bfloat16))
        assert said["memory"].dtype == torch.bfloat16


def allocate_where_there_is_no_device() -> float:
    communicator = choose_communicator()
    with pytest.raises((AssertionError, RuntimeError)):
        communicator.allocate(5, torch.float32, torch.device("cuda", 99))
    total = communicator.allocate(1 << 17, torch.float32, communicator.device).add_(1.0)
    communicator.all_reduce(total).wait()
    return float(total.max())


def test_an_allocation_that_is_refused_breaks_nothing(ranks: Ranks) -> None:
    assert ranks.run(allocate_where_there_is_no_device) == [ranks.world_size] * ranks.world_size


# -- the collectives --------------------------------------------------------------------------------------------------


def all_reduce(op: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
    communicator = choose_communicator()
    tensor = pattern(communicator.rank, numel, dtype)
    assert communicator.all_reduce(tensor, op).wait() in (None, True)  # type: ignore[arg-type, func-returns-value]
    return tensor


@dtypes
@pytest.mark.parametrize("numel", [0, 1, 1000])
def test_all_reduce_sums_by_itself(ranks: Ranks, dtype: torch.dtype, numel: int) -> None:
    expected = patterns(ranks.world_size, numel, dtype).sum(0, dtype=dtype)
    for result in ranks.run(all_reduce, "sum", dtype, numel):
        assert torch.equal(result, expected)


@dtypes
def test_all_reduce_max(ranks: Ranks, dtype: torch.dtype) -> None:
    for result in ranks.run(all_reduce, "max", dtype, 100):
        assert torch.equal(result, patterns(ranks.world_size, 100, dtype).amax(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_all_reduce_average(ranks: Ranks, dtype: torch.dtype) -> None:
    expected = patterns(ranks.world_size, 100, dtype).double().mean(0)
    results = ranks.run(all_reduce, "average", dtype, 100)
    for result in results:
        assert torch.equal(result, results[0])
        # Whether it divides the sum or the summands: at most a rounding for each.
        torch.testing.assert_close(
            result.double(), expected, rtol=(ranks.world_size + 1) * torch.finfo(dtype).eps, atol=0.0
        )


def sum_of_noise(dtype: torch.dtype) -> torch.Tensor:
    communicator = choose_communicator()
    generator = torch.Generator().manual_seed(communicator.rank)
    # Of very different sizes, so that every order of summation rounds differently.
    tensor = (torch.randn(5000, generator=generator, dtype=torch.float64).exp() ** 3).to(dtype)
    communicator.all_reduce(tensor).wait()
    return tensor


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_all_ranks_get_the_same_bits(ranks: Ranks, dtype: torch.dtype) -> None:
    """Contract point 2 begins here."""
    results = ranks.run(sum_of_noise, dtype)
    assert all(torch.equal(result, results[0]) for result in results)


def broadcast(source: int, dtype: torch.dtype) -> torch.Tensor:
    communicator = choose_communicator()
    tensor = pattern(communicator.rank, 30, dtype)
    communicator.broadcast(tensor, source).wait()
    return tensor


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8], ids=str)
def test_broadcast_copies_the_source(ranks: Ranks, dtype: torch.dtype) -> None:
    for source in {0, ranks.world_size - 1}:
        for result in ranks.run(broadcast, source, dtype):
            assert torch.equal(result, pattern(source, 30, dtype))


def several_in_flight(count: int) -> list[torch.Tensor]:
    """All kinds, started one after the other and only then waited for, in that order."""
    communicator = choose_communicator()
    tensors, handles = [], []
    for number in range(count):
        tensor = pattern(communicator.rank + number, 10 * communicator.world_size, torch.float64)
        output = torch.zeros(10, dtype=torch.float64)
        gathered = torch.zeros(10 * communicator.world_size**2, dtype=torch.float64)
        scattered = tensor.clone()
        sent = tensor.clone()
        handles += [
            communicator.reduce_scatter(output, scattered),
            communicator.all_gather(gathered, sent),
            communicator.all_reduce(tensor),
        ]
        tensors += [output, gathered, tensor]
    for handle in handles:
        handle.wait()
    return tensors


def test_several_may_be_in_flight(ranks: Ranks) -> None:
    world_size = ranks.world_size
    for rank, tensors in enumerate(ranks.run(several_in_flight, 5)):
        for number in range(5):
            inputs = torch.stack([pattern(r + number, 10 * world_size, torch.float64) for r in range(world_size)])
            output, gathered, total = tensors[3 * number : 3 * number + 3]
            assert torch.equal(total, inputs.sum(0))
            assert torch.equal(output, inputs.sum(0).chunk(world_size)[rank])
            assert torch.equal(gathered, inputs.view(-1))


def reduce_a_part() -> torch.Tensor:
    communicator = choose_communicator()
    whole = torch.zeros(9, dtype=torch.float64)
    part = whole[3:6]
    part.fill_(1.0)
    communicator.all_reduce(part).wait()
    return whole


def test_a_view_is_reduced_where_it_lies(ranks: Ranks) -> None:
    """Buckets and their tails are views of larger memory."""
    expected = torch.tensor([0.0] * 3 + [float(ranks.world_size)] * 3 + [0.0] * 3, dtype=torch.float64)
    for whole in ranks.run(reduce_a_part):
        assert torch.equal(whole, expected)


# -- which one is meant -----------------------------------------------------------------------------------------------


def choices() -> list[bool]:
    """A communicator is itself; the ambient one goes before the default group; a group makes one over it."""
    given, ambient = InProcessWorld(1).communicator(0), InProcessWorld(1).communicator(0)
    with ambient_communicator(ambient):
        inside = choose_communicator()
    group = dist.new_group(list(range(dist.get_world_size())))
    chosen = choose_communicator(group)
    return [
        choose_communicator(given) is given,
        inside is ambient,
        isinstance(chosen, ProcessGroupCommunicator) and chosen.group is group,
        isinstance(choose_communicator(), ProcessGroupCommunicator),
    ]


def test_a_communicator_is_chosen_by_what_is_given(process_ranks: RankPool) -> None:
    assert process_ranks.run(choices) == [[True] * 4] * process_ranks.world_size


def broadcast_in_a_subgroup() -> tuple[int, int]:
    """A subgroup has its own numbers: its rank 0 is another process than the world's."""
    members = list(range(1, dist.get_world_size()))
    group = dist.new_group(members)
    if dist.get_rank() == 0:
        return -1, -1
    communicator = choose_communicator(group)
    tensor = torch.tensor([dist.get_rank()])
    communicator.broadcast(tensor, 0).wait()
    return communicator.rank, int(tensor)


def test_ranks_and_sources_are_counted_within_the_group(process_ranks: RankPool) -> None:
    results = process_ranks.run(broadcast_in_a_subgroup)
    assert results[1:] == [(rank, 1) for rank in range(process_ranks.world_size - 1)]


def test_nothing_to_choose_from_is_an_error_with_the_remedy() -> None:
    with pytest.raises(gradsync.ConfigurationError, match=r"torchrun.*init_process_group"):
        choose_communicator()


class HalfWritten:
    """Moves bytes, and has little else."""

    rank, world_size = 0, 1

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None: ...


def test_what_is_no_communicator_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(
        ConfigurationError, match=r"HalfWritten is no communicator, it has no abort, all_gather, .*BaseCommunicator"
    ):
        choose_communicator(HalfWritten())


def test_the_ambient_communicator_belongs_to_its_thread() -> None:
    with ambient_communicator(InProcessWorld(1).communicator(0)), ThreadPoolExecutor(1) as other:
        assert isinstance(other.submit(choose_communicator).exception(), gradsync.ConfigurationError)


# -- manners of the in-process communicator: nobody waits without being told why --------------------------------------


def meet(world: InProcessWorld, *functions: Callable[[InProcessCommunicator], object]) -> list[BaseException | None]:
    """Run a function a rank, in threads, and return what each raised."""
    with ThreadPoolExecutor(len(functions)) as pool:
        ran = [pool.submit(function, world.communicator(rank)) for rank, function in enumerate(functions)]
    return [each.exception() for each in ran]


def reduce_three(communicator: InProcessCommunicator) -> None:
    communicator.all_reduce(torch.ones(3)).wait()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda communicator: communicator.all_reduce(torch.ones(4)).wait(), "4 × torch.float32"),
        (lambda communicator: communicator.all_reduce(torch.ones(3).double()).wait(), "3 × torch.float64"),
        (lambda communicator: communicator.all_reduce(torch.ones(3), "max").wait(), "all_reduce max"),
        (lambda communicator: communicator.broadcast(torch.ones(3), 0).wait(), "broadcast from 0"),
    ],
    ids=["size", "dtype", "operation", "collective"],
)
def test_different_collectives_are_a_mismatch_on_all_ranks(
    other: Callable[[InProcessCommunicator], object], words: str
) -> None:
    raised = meet(InProcessWorld(3), reduce_three, other, reduce_three)
    for error in raised:
        assert isinstance(error, gradsync.MismatchError)
        assert "rank 0: all_reduce sum of 3 × torch.float32" in str(error)
        assert words in str(error).partition("rank 1: ")[2].partition(", rank 2: ")[0]


def test_a_failed_rank_is_named_to_those_that_wait_and_to_those_that_come_later() -> None:
    world = InProcessWorld(3)

    def fail(communicator: InProcessCommunicator) -> None:
        world.fail(communicator.rank, ValueError("no luck"))

    def wait_twice(communicator: InProcessCommunicator) -> None:
        with pytest.raises(gradsync.PeerFailedError):
            reduce_three(communicator)
        reduce_three(communicator)

    raised = meet(world, reduce_three, fail, wait_twice)
    assert raised[1] is None
    for error in (raised[0], raised[2]):
        assert isinstance(error, gradsync.PeerFailedError)
        assert str(error) == "rank 1 failed: ValueError: no luck"


def test_a_result_that_is_there_outlives_a_failure() -> None:
    """Everybody came, so the collective is good, whatever happens afterwards."""
    world = InProcessWorld(2)
    communicators = [world.communicator(rank) for rank in range(2)]
    tensors = [torch.ones(2), torch.ones(2)]
    handles = [communicator.all_reduce(tensor) for communicator, tensor in zip(communicators, tensors, strict=True)]
    world.fail(1, ValueError("too late"))
    for handle in handles:
        handle.wait()
    assert tensors[0].tolist() == tensors[1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_has_at_least_one_rank(world_size: int) -> None:
    with pytest.raises(gradsync.ConfigurationError, match=str(world_size)):
        InProcessWorld(world_size)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_is_one_of_the_world(rank: int) -> None:
    with pytest.raises(gradsync.ConfigurationError, match=r"0\.\.1"):
        InProcessWorld(2).communicator(rank)


def many_rounds() -> int:
    communicator = choose_communicator()
    assert isinstance(communicator, InProcessCommunicator)
    for _ in range(50):
        communicator.all_reduce(torch.ones(1)).wait()
    communicator.all_reduce(torch.ones(1)).wait()
    return len(communicator.world._rounds)


def test_rounds_do_not_pile_up() -> None:
    """The last round may still be open for a slower rank; all before it are gone."""
    assert max(run_ranks(many_rounds, 3)) <= 1
