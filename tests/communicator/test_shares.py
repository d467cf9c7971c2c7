"""Shares and parts of one size or several, all operations, and what is refused before it is sent, on all communicators.

Values are small whole numbers, which every dtype here holds exactly, so that results are compared by equality.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradsync.communicator import Communicator, choose_communicator
from gradsync.errors import ConfigurationError
from tests.communicator.test_communicators import DTYPES, pattern, patterns
from tests.ranks import Ranks

pytestmark = pytest.mark.timeout(120)

# By the number of ranks: without anything for somebody, equal, and more than a message or a stage holds.
COUNTS: dict[int, list[tuple[int, ...]]] = {
    1: [(0,), (3,), (200_001,)],
    2: [(0, 5), (3, 3), (4, 0), (0, 0), (170_000, 3)],
    3: [(2, 0, 5), (0, 0, 4), (3, 3, 3), (0, 0, 0), (50_000, 1, 90_001)],
    4: [(1, 0, 2, 5), (0, 0, 0, 3), (2, 2, 2, 2), (0, 0, 0, 0), (9_000, 0, 30_001, 7)],
}


def gather(all_counts: list[tuple[int, ...] | None], dtype: torch.dtype) -> list[torch.Tensor]:
    """Every other one into memory of the communicator's own, and with the share in its place already."""
    communicator = choose_communicator()
    outputs, handles, sent = [], [], []
    for number, counts in enumerate(all_counts):
        sizes = counts or (7,) * communicator.world_size
        tensor = pattern(communicator.rank, sizes[communicator.rank], dtype)
        output = torch.zeros(sum(sizes), dtype=dtype)
        if number % 2:
            output = communicator.allocate(sum(sizes), dtype, communicator.device)
            mine = output.split(sizes)[communicator.rank]
            tensor = mine.copy_(tensor)
        handles.append(communicator.all_gather(output, tensor, counts))
        outputs.append(output)
        sent.append(tensor)
    for handle in handles:
        handle.wait()
    for tensor in sent:
        assert torch.equal(tensor, pattern(communicator.rank, tensor.numel(), dtype).to(tensor.device)), (
            "it has changed"
        )
    return [output.clone() for output in outputs]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.int16], ids=str
)
def test_shares_are_gathered_in_rank_order(ranks: Ranks, dtype: torch.dtype) -> None:
    all_counts = [None, *COUNTS[ranks.world_size]]
    for outputs in ranks.run(gather, all_counts, dtype):
        for counts, output in zip(all_counts, outputs, strict=True):
            sizes = counts or (7,) * ranks.world_size
            expected = torch.cat([pattern(rank, count, dtype) for rank, count in enumerate(sizes)])
            assert torch.equal(output, expected), counts


def scatter(all_counts: list[tuple[int, ...] | None], op: str, dtype: torch.dtype) -> list[torch.Tensor]:
    communicator = choose_communicator()
    outputs, handles = [], []
    for number, counts in enumerate(all_counts):
        sizes = counts or (7,) * communicator.world_size
        tensor = pattern(communicator.rank, sum(sizes), dtype)
        if number % 2:
            tensor = communicator.allocate(sum(sizes), dtype, communicator.device).copy_(tensor)
        output = torch.zeros(sizes[communicator.rank], dtype=dtype)
        handles.append(communicator.reduce_scatter(output, tensor, op, counts))  # type: ignore[arg-type]
        outputs.append(output)
    for handle in handles:
        handle.wait()
    return outputs


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *(("sum", dtype) for dtype in DTYPES),
        ("average", torch.float64),
        ("max", torch.float32),
        ("max", torch.int64),
    ],
    ids=str,
)
def test_every_rank_gets_its_share_of_the_reduction(ranks: Ranks, op: str, dtype: torch.dtype) -> None:
    all_counts = [None, *COUNTS[ranks.world_size]]
    for rank, outputs in enumerate(ranks.run(scatter, all_counts, op, dtype)):
        for counts, output in zip(all_counts, outputs, strict=True):
            sizes = counts or (7,) * ranks.world_size
            everybodys = patterns(ranks.world_size, sum(sizes), dtype)
            if op == "max":
                expected = everybodys.amax(0)
            else:
                total = everybodys.sum(0, dtype=dtype)
                expected = total / ranks.world_size if op == "average" else total
            torch.testing.assert_close(output, expected.split(sizes)[rank], rtol=1e-15, atol=0)


def scatter_in_place(counts: tuple[int, ...] | None) -> tuple[torch.Tensor, torch.Tensor]:
    communicator = choose_communicator()
    sizes = counts or (7,) * communicator.world_size
    tensor = pattern(communicator.rank, sum(sizes), torch.float64)
    share = tensor.split(sizes)[communicator.rank]
    communicator.reduce_scatter(share, tensor, "sum", counts).wait()
    kept = share.clone()
    communicator.all_gather(tensor, share, counts).wait()
    return kept, tensor


def test_shares_may_lie_in_the_tensor_they_are_shares_of(ranks: Ranks) -> None:
    for counts in (None, *COUNTS[ranks.world_size]):
        sizes = counts or (7,) * ranks.world_size
        total = patterns(ranks.world_size, sum(sizes), torch.float64).sum(0)
        for rank, (kept, tensor) in enumerate(ranks.run(scatter_in_place, counts)):
            assert torch.equal(kept, total.split(sizes)[rank])
            assert torch.equal(tensor, total)


def part(sender: int, receiver: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return pattern(sender + 3 * receiver, count, dtype)


def exchange(sizes: list[list[int]] | None, dtype: torch.dtype) -> torch.Tensor:
    """`sizes[sender][receiver]`, or five each, and then nothing is said of sizes."""
    communicator = choose_communicator()
    everybody = range(communicator.world_size)
    known = sizes or [[5] * communicator.world_size] * communicator.world_size
    tensor = torch.cat(
        [part(communicator.rank, receiver, known[communicator.rank][receiver], dtype) for receiver in everybody]
    )
    arriving = [known[sender][communicator.rank] for sender in everybody]
    output = torch.zeros(sum(arriving), dtype=dtype)
    counts = () if sizes is None else (arriving, known[communicator.rank])
    communicator.all_to_all(output, tensor, *counts).wait()
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64, torch.int16], ids=str)
@pytest.mark.parametrize("kind", ["even", "uneven", "large", "nothing"])
def test_everybody_sends_to_everybody(ranks: Ranks, kind: str, dtype: torch.dtype) -> None:
    n = ranks.world_size
    sizes = {
        "even": None,
        "uneven": [[(sender * receiver + sender) % 4 for receiver in range(n)] for sender in range(n)],
        "large": [[60_000 * (sender == 0) + receiver for receiver in range(n)] for sender in range(n)],
        "nothing": [[0] * n for _ in range(n)],
    }[kind]
    for receiver, output in enumerate(ranks.run(exchange, sizes, dtype)):
        count = (lambda sender: 5) if sizes is None else (lambda sender: sizes[sender][receiver])  # noqa: B023
        assert torch.equal(output, torch.cat([part(sender, receiver, count(sender), dtype) for sender in range(n)]))


# -- what is refused --------------------------------------------------------------------------------------------------


def refusals(communicator: Communicator) -> list[tuple[str, Callable[[], Any]]]:
    n = communicator.world_size
    floats, whole, complex_numbers = torch.ones(2 * n), torch.ones(2 * n).long(), torch.ones(2 * n).cfloat()
    one = [1] * n
    return [
        ("op must be one of sum, average, max, got 'mean'", lambda: communicator.all_reduce(floats, "mean")),  # type: ignore[arg-type]
        ("no average, got torch.int64", lambda: communicator.all_reduce(whole, "average")),
        ("no maximum, got torch.complex64", lambda: communicator.all_reduce(complex_numbers, "max")),
        ("dense tensors, got layout torch.sparse_coo", lambda: communicator.all_reduce(floats.to_sparse())),
        ("cannot add up torch.float8_e5m2", lambda: communicator.all_reduce(floats.to(torch.float8_e5m2))),
        (f"source must be in 0..{n - 1}, got {n}", lambda: communicator.broadcast(floats, n)),
        ("got -1", lambda: communicator.broadcast(floats, -1)),
        ("one dtype", lambda: communicator.all_gather(whole, torch.ones(2))),
        (f"{n} equal shares: output is {2 * n} ×", lambda: communicator.all_gather(floats, torch.ones(3))),
        ("contiguous", lambda: communicator.all_gather(torch.ones(4 * n)[::2], torch.ones(2))),
        ("no average", lambda: communicator.reduce_scatter(torch.ones(2).long(), whole, "average")),
        (f"{n} equal shares: tensor is {2 * n} ×", lambda: communicator.reduce_scatter(torch.ones(3), floats)),
        (f"counts {one} make {n} elements", lambda: communicator.reduce_scatter(torch.ones(1), floats, "sum", one)),
        (f"{n} numbers", lambda: communicator.reduce_scatter(torch.ones(2), floats, "sum", [2] * (n + 1))),
        (
            "not negative",
            lambda: communicator.all_gather(floats, torch.ones(2), [2 * n + 1, -1, *[0] * n][:n] if n > 1 else [-1]),
        ),
        ("tensor is 3 ×", lambda: communicator.all_gather(floats, torch.ones(3), [2] * n)),
        ("one dtype", lambda: communicator.all_to_all(whole, floats)),
        ("counts", lambda: communicator.all_to_all(floats, floats, [1] * n, [1] * n)),
        ("sends itself", lambda: communicator.all_to_all(floats, torch.ones(3 * n), [2] * n, [3] * n)),
    ]


def be_refused() -> list[tuple[str, str]]:
    """All of them, and then the communicator is as good as new, and has counted none."""
    communicator = choose_communicator()
    first = communicator.all_reduce(torch.ones(1))
    first.wait()
    said = []
    for words, attempt in refusals(communicator):
        with pytest.raises(ConfigurationError) as raised:
            attempt()
        said.append((words, str(raised.value)))
    assert communicator.failure is None
    tensor = torch.ones(2)
    handle = communicator.all_reduce(tensor)
    handle.wait()
    assert tensor.tolist() == [communicator.world_size] * 2
    numbers = [int(each.describe().split()[1]) for each in (first, handle)]
    assert numbers[1] == numbers[0] + 1
    return said


def test_what_cannot_be_honoured_is_refused_alike(ranks: Ranks) -> None:
    results = ranks.run(be_refused)
    for words, text in results[0]:
        assert words in text
    assert all(result == results[0] for result in results)
