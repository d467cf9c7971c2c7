"""Replicas that differ are found: by a bit that has flipped, or by what one rank alone has done to a parameter."""

import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from gradsync import (
    ConfigurationError,
    DistributedDataParallel,
    MismatchError,
    OverlappedOptimizer,
    ReplicaCheck,
    ShardedOptimizer,
    SyncPolicy,
)
from gradsync.communicator import choose_communicator
from gradsync.core.window.replica_check import BLOCK, fingerprint
from tests.core.common import on
from tests.ranks import RankPool, Ranks, ThreadRanks, pool_of, seeded

pytestmark = pytest.mark.timeout(60)

KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool)


class Network(nn.Module):
    """Layers of several shapes, one of which lies in memory in another order than its indices."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(3):
            self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)
            self.pixels = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)

    def forward(self, x: float) -> torch.Tensor:
        words, image = torch.full((2, 6), x), torch.full((2, 2, 3, 3), x)
        return (self.second(self.first(words).tanh()).sum() + self.pixels(image).sum()).square()


def flip(tensor: torch.Tensor, bit: int) -> None:
    """One bit of the tensor's memory."""
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    memory = whole.view(-1).view(torch.uint8)
    memory[bit // 8] ^= 1 << bit % 8
    tensor.data.copy_(whole)


# -- the fingerprint --------------------------------------------------------------------------------------------------


def values(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    numbers = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.view_as_complex(numbers).to(dtype) if dtype.is_complex else (numbers[:, 0] * 9).to(dtype)


@given(st.sampled_from([kind for kind in KINDS if kind is not torch.bool]), st.integers(1, 40), st.data())
def test_every_bit_counts(dtype: torch.dtype, count: int, data: st.DataObject) -> None:
    tensor = values(dtype, count, data.draw(st.integers(0, 99)))
    before = int(fingerprint(tensor))
    flip(tensor, data.draw(st.integers(0, tensor.nbytes * 8 - 1)))
    assert int(fingerprint(tensor)) != before


@given(st.sampled_from(KINDS), st.lists(st.integers(0, BLOCK + 100), min_size=2, max_size=2), st.integers(0, 99))
def test_every_place_counts(dtype: torch.dtype, places: list[int], seed: int) -> None:
    tensor = values(dtype, BLOCK + 101, seed)
    one, other = places
    before, differ = int(fingerprint(tensor)), bool(tensor[one] != tensor[other])
    tensor[[one, other]] = tensor[[other, one]]
    assert (int(fingerprint(tensor)) != before) is differ


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_it_is_one_of_bits_in_their_logical_order(dtype: torch.dtype) -> None:
    tensor = values(dtype, 24, 1).view(2, 3, 4)
    turned = tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert int(fingerprint(turned)) == int(fingerprint(tensor))
    assert int(fingerprint(tensor[:0])) == 0
    assert int(fingerprint(torch.tensor(-0.0))) != int(fingerprint(torch.tensor(0.0)))


# -- found ------------------------------------------------------------------------------------------------------------

WINDOWS, FLIPPED_AT, EVERY = 9, 2, 3


def train(settings: ReplicaCheck, culprit: int, parameter: int, bit: int) -> tuple[list[str], list[str], list[Any]]:
    """Nine windows, compared in every third; after the third ``culprit`` has another bit. What was raised, what was
    warned of, and the parameters at the end."""
    communicator = choose_communicator()
    model = DistributedDataParallel(Network(), replica_check=settings, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    raised, lines = [], Lines()
    logging.getLogger("gradsync").addHandler(lines)
    for window in range(WINDOWS):
        try:
            model(float(communicator.rank + window)).backward()
            optimizer.step()
            raised.append("")
        except MismatchError as error:
            raised.append(str(error))
        optimizer.zero_grad()
        if window == FLIPPED_AT and communicator.rank == culprit:
            flip(list(model.parameters())[parameter], bit)
    logging.getLogger("gradsync").removeHandler(lines)
    return raised, lines.said, [each.detach().clone() for each in model.parameters()]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        self._rank = choose_communicator().rank

    def emit(self, record: logging.LogRecord) -> None:
        if choose_communicator().rank == self._rank:
            self.said.append(record.getMessage())


NAMES = [name for name, _ in Network().named_parameters()]
CASES = [(0, 7), (3, 40), (4, 31 + 32 * 20)]


@on(("threads", 3), ("threads", 4), ("processes", 2))
@pytest.mark.parametrize(("parameter", "bit"), CASES)
def test_a_flipped_bit_is_found_and_named(ranks: Ranks, parameter: int, bit: int) -> None:
    culprit = ranks.world_size - 1
    for raised, lines, _ in ranks.run(train, ReplicaCheck(every=EVERY), culprit, parameter, bit):
        assert not lines
        found = [window for window, error in enumerate(raised) if error]
        # It is raised again, until somebody has loaded a checkpoint.
        assert found == [3, 6]
        assert f"parameter '{NAMES[parameter]}'" in raised[3]
        if ranks.world_size > 2:
            assert f"on rank {culprit} was found to differ from the other ranks" in raised[3]
        else:
            assert "differ on rank 0 and rank 1" in raised[3]
        assert "zero_grad()" in raised[3]


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize(("parameter", "bit"), CASES)
def test_a_majority_heals(kind: str, parameter: int, bit: int) -> None:
    """Training goes on with the same bits on all ranks."""
    ranks: Ranks = ThreadRanks(4) if kind == "threads" else pool_of(4)
    settings = ReplicaCheck(every=EVERY, on_mismatch="repair")
    results = ranks.run(train, settings, 0, parameter, bit)
    for rank, (raised, lines, parameters) in enumerate(results):
        assert not any(raised)
        assert all(map(torch.equal, parameters, results[1][2]))
        assert len(lines) == (rank == 0)
    (line,) = results[0][1]
    assert f"parameter '{NAMES[parameter]}' on rank 0 was found to differ" in line
    assert "States of optimizers are not compared" in line


def test_two_ranks_cannot_heal() -> None:
    settings = ReplicaCheck(every=EVERY, on_mismatch="repair")
    for raised, _, _ in ThreadRanks(2).run(train, settings, 1, 0, 5):
        assert "no majority of which agrees" in raised[3]
        assert "Nothing was repaired" in raised[3]


def test_nobody_compares_unasked_and_nothing_is_found_where_nothing_is() -> None:
    for raised, lines, _ in ThreadRanks(3).run(train, ReplicaCheck(every=1), -1, 0, 0):
        assert not any(raised)
        assert not lines


# -- together with other things ---------------------------------------------------------------------------------------


def sharded(every: int) -> list[Any]:
    """Parameters that are still on their way when the backward begins are waited for."""
    communicator = choose_communicator()
    model = DistributedDataParallel(Network(), replica_check=ReplicaCheck(every=every), bucket_cap_mb=1e-4)
    optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    for window in range(5):
        model(float(communicator.rank + window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_parameters_of_a_sharded_optimizer_are_compared(process_ranks: RankPool) -> None:
    compared, never = process_ranks.run(sharded, 1), process_ranks.run(sharded, 1000)
    assert all(map(torch.equal, compared[0], never[0]))


def flip_on(culprit: int, kind: str, every: int) -> tuple[list[bool], list[torch.Tensor]]:
    """In which of five windows a bit is found that flips on ``culprit`` after the second one, and the parameters."""
    communicator = choose_communicator()
    model = DistributedDataParallel(Network(), replica_check=ReplicaCheck(every=every), bucket_cap_mb=1e-4)
    # Parameters stay what they are, but for the flipped bit.
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer: Any = plain
    if kind != "plain":
        optimizer = ShardedOptimizer(plain, model) if kind == "sharded" else OverlappedOptimizer(plain, model)
    found = []
    for window in range(5):
        try:
            model(float(communicator.rank + window)).backward()
            optimizer.step()
            found.append(False)
        except MismatchError:
            found.append(True)
        optimizer.zero_grad()
        if window == 1 and communicator.rank == culprit:
            flip(model.module.second.bias, 20)
    return found, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", ["plain", "sharded", "overlapped"])
def test_what_is_found_where_owners_give_their_values_to_all(process_ranks: RankPool, kind: str) -> None:
    """With a sharded optimizer the next step makes ranks equal: a difference is found before it, or never."""
    untouched = process_ranks.run(flip_on, -1, kind, 3)[0][1]
    kept = []
    for culprit in range(process_ranks.world_size):
        for found, _ in process_ranks.run(flip_on, culprit, kind, 1):
            # Before it is used, and again until somebody has loaded a checkpoint: no step was taken.
            assert found == [False, False, True, True, True]
        results = process_ranks.run(flip_on, culprit, kind, 3)
        assert [found for found, _ in results] == [[False, False, False, kind != "sharded", False]] * len(results)
        if kind == "sharded":
            assert all(map(torch.equal, results[0][1], results[1][1]))
            kept.append(not all(map(torch.equal, results[0][1], untouched)))
    # The value of the one rank that owns the element has become that of all.
    assert kind != "sharded" or kept.count(True) == 1


def narrow() -> str:
    """The values that the optimizer has are compared, not those that a forward computes with."""
    communicator = choose_communicator()
    config = _MixedPrecision(param_dtype=torch.bfloat16)
    model = DistributedDataParallel(nn.Linear(4, 4), mixed_precision=config, replica_check=ReplicaCheck(every=2))
    with torch.no_grad():
        # Less than a bfloat16 can tell.
        model.module.weight[2, 2] += math.ulp(1.0) * 2**28 if communicator.rank == 1 else 0.0
    model(torch.ones(1, 4)).sum().backward()
    return str(model.module.weight.grad.dtype)


def test_low_precision_hides_nothing() -> None:
    with pytest.raises(MismatchError, match="parameter 'weight' was found to differ"):
        ThreadRanks(2).run(narrow)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="1 or more, got 0"):
        ReplicaCheck(every=0)
    with pytest.raises(ConfigurationError, match="raise, repair, got 'heal'"):
        ReplicaCheck(every=1, on_mismatch="heal")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"replica_check must be ReplicaCheck\(every=…\)"):
        SyncPolicy(replica_check=100)  # type: ignore[arg-type]
