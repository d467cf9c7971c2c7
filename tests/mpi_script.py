"""What test_mpi.py starts with mpirun, on three ranks: all checks, and then a bad end.

The checks of collectives are those of test_communicators.py, with the MPI communicator as the ambient one.
"""

import sys
from collections.abc import Callable

import pytest
import torch
from mpi4py import MPI
from torch import nn

import gradsync
from gradsync.communicator import Communicator, Handle, ambient_communicator
from gradsync.communicator.mpi import PIECE_BYTES, MPICommunicator
from tests.communicator import test_communicators as shared
from tests.communicator import test_handles as handles
from tests.communicator import test_shares as shares

ANY_DTYPE = [*shared.DTYPES, torch.float16, torch.int32, torch.int8, torch.uint8]


def say(line: str) -> None:
    print(line, flush=True)


# -- collectives ------------------------------------------------------------------------------------------------------


def noise(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Of very different sizes, so that every order of summation rounds differently."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=generator, dtype=torch.float64).exp() ** 2).to(dtype)


def check_introduction(communicator: MPICommunicator) -> None:
    assert isinstance(communicator, Communicator)
    assert isinstance(communicator.all_reduce(torch.zeros(1)), Handle)
    assert (communicator.rank, communicator.world_size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert communicator.device == torch.device("cpu")
    assert communicator.averages(communicator.device) is False
    assert torch.equal(
        communicator.allocate(5, torch.bfloat16, communicator.device), torch.zeros(5, dtype=torch.bfloat16)
    )
    assert repr(communicator).endswith(f", rank {communicator.rank} of {communicator.world_size})")


def check_exact_values(communicator: MPICommunicator) -> None:
    n = communicator.world_size
    for dtype in ANY_DTYPE:
        for numel in (0, 1, 1000, 40_001):
            total = shared.patterns(n, numel, dtype).sum(0, dtype=dtype)
            assert torch.equal(shared.all_reduce("sum", dtype, numel), total), (dtype, numel)
        for numel in (100, 40_001):
            largest = shared.patterns(n, numel, dtype).amax(0)
            assert torch.equal(shared.all_reduce("max", dtype, numel), largest), dtype
        for source in (0, n - 1):
            assert torch.equal(shared.broadcast(source, dtype), shared.pattern(source, 30, dtype)), dtype
        gathered, nothing = shares.gather([None, (0,) * n], dtype)
        assert torch.equal(gathered, shared.patterns(n, 7, dtype).view(-1)), dtype
        assert nothing.numel() == 0
        total = shared.patterns(n, 7 * n, dtype).sum(0, dtype=dtype)
        assert torch.equal(shares.scatter([None], "sum", dtype)[0], total.chunk(n)[communicator.rank]), dtype


def check_the_bits_of_the_reference(communicator: MPICommunicator) -> None:
    """Sums of floats too are those of the in-process ranks, whether they go in one piece or in several."""
    n = communicator.world_size
    # Not a multiple of anything, and one so short that the last ranks own nothing of it.
    cases = [(torch.float64, PIECE_BYTES // 8 * 5 // 2 + 1), (torch.float32, 30_011), (torch.bfloat16, 40_003)]
    cases += [(torch.complex128, 4_099), (torch.complex64, 17)]
    for dtype, numel in cases:
        expected = noise(0, numel, dtype)
        for rank in range(1, n):
            expected.add_(noise(rank, numel, dtype))
        tensor = noise(communicator.rank, numel, dtype)
        communicator.all_reduce(tensor).wait()
        assert torch.equal(tensor, expected), (dtype, numel)
        tensor = noise(communicator.rank, numel, dtype)
        communicator.all_reduce(tensor, "average").wait()
        assert torch.equal(tensor, expected.div_(n)), (dtype, numel)
    check_large_shares(communicator)


def check_large_shares(communicator: MPICommunicator) -> None:
    n, share = communicator.world_size, PIECE_BYTES // 8 + 3
    total = torch.zeros(share * n, dtype=torch.float64)
    for rank in range(n):
        total += noise(rank, share * n, torch.float64)
    output, sent = torch.empty(share, dtype=torch.float64), noise(communicator.rank, share * n, torch.float64)
    communicator.reduce_scatter(output, sent).wait()
    assert torch.equal(output, total[communicator.rank * share : (communicator.rank + 1) * share])
    assert torch.equal(sent, noise(communicator.rank, share * n, torch.float64)), "what was sent has changed"


def check_several_and_views(communicator: MPICommunicator) -> None:
    n = communicator.world_size
    tensors = shared.several_in_flight(5)
    for number in range(5):
        inputs = torch.stack([shared.pattern(r + number, 10 * n, torch.float64) for r in range(n)])
        output, gathered, total = tensors[3 * number : 3 * number + 3]
        assert torch.equal(total, inputs.sum(0))
        assert torch.equal(output, inputs.sum(0).chunk(n)[communicator.rank])
        assert torch.equal(gathered, inputs.view(-1))
    kept, whole = shares.scatter_in_place(None)
    total = shared.patterns(n, 7 * n, torch.float64).sum(0)
    assert torch.equal(kept, total.chunk(n)[communicator.rank])
    assert torch.equal(whole, total)
    assert shared.reduce_a_part().tolist() == [0.0] * 3 + [float(n)] * 3 + [0.0] * 3
    flags = torch.tensor([communicator.rank == 0, False])
    communicator.all_reduce(flags, "max").wait()
    assert flags.tolist() == [True, False]


def check_handles_and_stages(communicator: MPICommunicator) -> None:
    n = communicator.world_size
    assert handles.wait_again() == [5.0 * n] * 3
    assert handles.wait_only_elsewhere() == [2.0 * n] * 2
    asked = handles.ask_and_be_called()
    assert asked.pop("found") == [float(n)] * 5
    assert all(asked.values()), asked
    for numel, reverse in [(3, False), (200_000, True)]:
        first = sum(range(n))
        chained = handles.chain_stages(numel, reverse)[0]
        assert chained == [float(sum(first + rank for rank in range(n)) + rank) for rank in range(n)]
    assert handles.end_without_a_wait() == [n * (n + 1.0), n * (n + 1.0), n]
    assert handles.many_stages(20) == [float(number * n * n) for number in range(20)]
    shared.reduce_a_part()


def check_shares_of_several_sizes(communicator: MPICommunicator) -> None:
    n, all_counts = communicator.world_size, shares.COUNTS[communicator.world_size]
    for dtype in (torch.float32, torch.int16, torch.complex64):
        for counts, output in zip(all_counts, shares.gather(all_counts, dtype), strict=True):
            expected = [shared.pattern(rank, count, dtype) for rank, count in enumerate(counts)]
            assert torch.equal(output, torch.cat(expected)), (dtype, counts)
    for op in ("sum", "max"):
        for counts, output in zip(all_counts, shares.scatter(all_counts, op, torch.float64), strict=True):
            everybodys = shared.patterns(n, sum(counts), torch.float64)
            expected = everybodys.sum(0) if op == "sum" else everybodys.amax(0)
            assert torch.equal(output, expected.split(counts)[communicator.rank]), (op, counts)
    for sizes in (None, [[0, 2, 1], [3, 0, 0], [1, 4, 5]], [[0] * n] * n):
        known = sizes or [[5] * n] * n
        parts = [
            shares.part(sender, communicator.rank, known[sender][communicator.rank], torch.int64) for sender in range(n)
        ]
        assert torch.equal(shares.exchange(sizes, torch.int64), torch.cat(parts)), sizes
    for words, text in shares.be_refused():
        assert words in text


def check_a_part_of_the_ranks() -> None:
    """Numbers are those of the given communicator, whose own messages go on beside."""
    world = MPI.COMM_WORLD
    parts = world.Split(color=min(world.rank, 1), key=-world.rank)
    communicator = MPICommunicator(parts)
    assert (communicator.rank, communicator.world_size) == (parts.rank, parts.size)
    tensor = torch.tensor([float(world.rank)])
    handle = communicator.all_reduce(tensor)
    assert parts.allreduce(1) == parts.size
    handle.wait()
    assert tensor.item() == (0.0 if world.rank == 0 else sum(range(1, world.size)))
    communicator.close()
    communicator.close()
    expect(gradsync.MisuseError, "closed", lambda: communicator.all_reduce(tensor))
    parts.Free()


def check_refusals(communicator: MPICommunicator) -> None:
    """Nothing is sent, so the communicator stays usable."""
    matrix = torch.ones(3, 2).t()
    expect(gradsync.ConfigurationError, "contiguous", lambda: communicator.all_reduce(matrix))
    expect(gradsync.ConfigurationError, "NCCL", lambda: communicator.all_reduce(torch.ones(1, device="meta")))
    expect(
        gradsync.ConfigurationError, "NCCL", lambda: communicator.allocate(1, torch.float32, torch.device("cuda", 0))
    )
    expect(gradsync.ConfigurationError, "no average", lambda: communicator.all_reduce(torch.ones(1).int(), "average"))
    expect(
        gradsync.ConfigurationError,
        "source must be",
        lambda: communicator.broadcast(torch.ones(1), communicator.world_size),
    )
    expect(gradsync.ConfigurationError, "equal shares", lambda: communicator.all_gather(torch.ones(1), torch.ones(1)))
    expect(gradsync.ConfigurationError, "mpi4py communicator", lambda: MPICommunicator("all"))
    shared.reduce_a_part()


def expect(kind: type[Exception], words: str, function: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words):
        function()


# -- training ---------------------------------------------------------------------------------------------------------

INPUTS = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def take_steps(
    model: nn.Module, inputs: torch.Tensor, after_backward: Callable[[], None] = lambda: None
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        after_backward()
        optimizer.step()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def check_training(communicator: MPICommunicator) -> None:
    """All ways to average are a single process on the whole batch."""
    expected = torch.tensor(take_steps(make_model(), INPUTS), dtype=torch.float64)
    share = INPUTS.chunk(communicator.world_size)[communicator.rank]

    def wrapped() -> list[float]:
        # Tiny buckets: several are under way at a time.
        model = gradsync.DistributedDataParallel(make_model(), communicator=communicator, bucket_cap_mb=0.0002)
        return take_steps(model, share)

    def attached() -> list[float]:
        model = make_model()
        gradsync.synchronize_gradients(model, communicator=communicator)
        return take_steps(model, share)

    def called() -> list[float]:
        model = make_model()
        return take_steps(model, share, lambda: gradsync.average_gradients(model, group=communicator))

    def accelerated() -> list[float]:
        accelerator = gradsync.Accelerator(cpu=True, communicator=communicator)
        assert accelerator.num_processes == communicator.world_size
        model = accelerator.prepare(make_model())
        return take_steps(model, share)

    for train in (wrapped, attached, called, accelerated):
        values = torch.tensor(train(), dtype=torch.float64)
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-15, msg=train.__name__)
        first = values.clone()
        communicator.broadcast(first, 0).wait()
        assert torch.equal(values, first), f"{train.__name__}: replicas differ"


def check_all(communicator: MPICommunicator) -> None:
    with ambient_communicator(communicator):
        check_introduction(communicator)
        check_exact_values(communicator)
        check_the_bits_of_the_reference(communicator)
        check_several_and_views(communicator)
        check_handles_and_stages(communicator)
        check_shares_of_several_sizes(communicator)
        check_a_part_of_the_ranks()
        check_refusals(communicator)
        check_training(communicator)
    say(f"rank {communicator.rank}: all checks passed")


# -- a bad end --------------------------------------------------------------------------------------------------------


def fail(communicator: MPICommunicator) -> None:
    """Rank 1 leaves while rank 0 waits for it. Then rank 2 fails, while all others wait."""
    world = MPI.COMM_WORLD
    pair = MPICommunicator(world.Split(color=world.rank // 2))
    if world.rank == 1:
        sys.exit(3)
    if world.rank == 2:
        world.recv(source=0)
        raise ValueError("no luck")
    tensor = torch.ones(10)
    for _ in range(2):  # the second time without waiting
        expect(
            gradsync.PeerFailedError,
            r"rank 0 waited in collective 1 \(all_reduce sum of 10 .* rank 1",
            lambda: pair.all_reduce(tensor).wait(),
        )
    say("rank 0: rank 1 has left")
    world.send(None, dest=2)
    communicator.all_reduce(tensor).wait()
    say("rank 0: what nobody else has started is finished")


def main() -> None:
    torch.set_num_threads(1)
    communicator = MPICommunicator()
    check_all(communicator)
    fail(communicator)


if __name__ == "__main__":
    main()
