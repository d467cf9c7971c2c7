"""Bucket sizes from the measured cost of the link."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradsync import DistributedDataParallel, synchronize_gradients
from gradsync.communicator import InProcessWorld, choose_communicator, fit_communicator
from gradsync.core.bucket.layout import BucketCaps
from gradsync.core.bucket.sizes import HOST_SECONDS_PER_BUCKET, MAX_BUCKET_BYTES, MIN_BUCKET_BYTES, LinkCost, auto_caps
from gradsync.core.reduction.measurement import measure_link
from gradsync.parallel.replica import MIB, UNMEASURED_CAP
from tests.ranks import RankPool, Ranks, pool_of

CPU = torch.device("cpu")

latencies = st.floats(min_value=1e-7, max_value=0.1)
paces = st.floats(min_value=1e-12, max_value=1e-6)
shares = st.floats(min_value=0.02, max_value=1.0)
totals = st.integers(min_value=0, max_value=10**12)


# -- the size ---------------------------------------------------------------------------------------------------------


@given(latencies, paces, shares, totals)
def test_the_best_size_lies_between_the_limits(latency: float, pace: float, hidden: float, total: int) -> None:
    best = LinkCost(latency=latency, seconds_per_byte=pace, hidden=hidden).best_bucket_bytes(total)
    assert isinstance(best, int)
    assert MIN_BUCKET_BYTES <= best <= MAX_BUCKET_BYTES


@pytest.mark.parametrize("hidden", [1.0, 0.25])
def test_the_best_size_minimizes_the_cost_it_is_derived_from(hidden: float) -> None:
    cost, total = LinkCost(latency=200e-6, seconds_per_byte=1e-9, hidden=hidden), 400 * MIB

    def seconds(bucket: int) -> float:
        return total / bucket * (cost.latency + HOST_SECONDS_PER_BUCKET) + bucket * cost.seconds_per_byte * hidden

    best = cost.best_bucket_bytes(total)
    assert MIN_BUCKET_BYTES < best < MAX_BUCKET_BYTES
    assert seconds(best) < min(seconds(int(best * 0.9)), seconds(int(best * 1.1)))


# -- the measurement --------------------------------------------------------------------------------------------------


def measure() -> tuple[LinkCost, LinkCost, BucketCaps, BucketCaps]:
    communicator = choose_communicator()
    return (
        measure_link(communicator, CPU),
        measure_link(communicator, CPU),
        auto_caps(measure_link(communicator, CPU), 10 * MIB),
        auto_caps(measure_link(communicator, CPU), 1000 * MIB),
    )


def test_all_ranks_measure_the_same_cost_and_choose_the_same_caps(ranks: Ranks) -> None:
    results = ranks.run(measure)
    assert all(result == results[0] for result in results)
    first, second, small, large = results[0]
    assert first == second
    assert first.latency > 0
    assert first.seconds_per_byte > 0
    assert 0 < first.hidden <= 1
    assert all(0 < cap <= MAX_BUCKET_BYTES for cap in (*small.caps, *large.caps))
    assert max(small.caps) <= max(large.caps)


def count_measurements() -> list[int]:
    """Collectives of the 1st and 2nd measurement over the default group, then over a new group."""
    counts = []
    group = dist.new_group()
    for over in (None, None, group, group):
        calls: list[int] = []
        communicator = choose_communicator(over)
        note_collectives(communicator, calls)
        measure_link(communicator, CPU)
        counts.append(len(calls))
    dist.destroy_process_group(group)
    return counts


def note_collectives(communicator: Any, calls: list[int]) -> None:
    original = communicator.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = "sum") -> Any:
        calls.append(tensor.nbytes)
        return original(tensor, op)

    communicator.all_reduce = all_reduce


def test_a_group_is_measured_once(process_ranks: RankPool) -> None:
    process_ranks.run(measure)
    for counts in process_ranks.run(count_measurements):
        assert counts[:2] == [0, 0]  # measured before, through another communicator
        assert counts[2] > 0
        assert counts[3] == 0


# -- where it is used -------------------------------------------------------------------------------------------------


def caps_of(size: Any, attach: bool, kwargs: dict[str, Any]) -> tuple[BucketCaps, list[int]]:
    model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(20)))
    if attach:
        synchronizer = synchronize_gradients(model, bucket_cap_mb=size, **kwargs).synchronizer
    else:
        synchronizer = DistributedDataParallel(model, bucket_cap_mb=size, **kwargs).synchronizer
    return synchronizer.options.caps, [plan.payload * 4 for plan in synchronizer.layout.buckets]


@pytest.mark.parametrize("attach", [False, True], ids=["wrapper", "attached"])
def test_no_size_is_the_automatic_one(process_ranks: RankPool, attach: bool) -> None:
    automatic = process_ranks.run(caps_of, "auto", attach, {})
    assert automatic == process_ranks.run(caps_of, None, attach, {})
    assert all(result == automatic[0] for result in automatic)
    caps, buckets = automatic[0]
    assert sum(buckets) == 20 * 4 * (100 * 100 + 100)
    assert max(buckets) <= max(caps.caps)


def test_the_automatic_caps_are_those_of_the_cost_model(process_ranks: RankPool) -> None:
    process_ranks.run(measure)
    expected = process_ranks.run(expected_caps, 20 * 4 * (100 * 100 + 100))
    assert [caps for caps, _ in process_ranks.run(caps_of, None, False, {})] == expected


def expected_caps(total: int) -> BucketCaps:
    communicator = fit_communicator(choose_communicator(), CPU).communicator
    return auto_caps(measure_link(communicator, CPU), total)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0.5, (MIB // 2,)), (25, (25 * MIB,)), ([1, 2.5], (MIB, 5 * MIB // 2)), (1e-9, (1,))],
)
def test_a_size_given_is_the_size_taken(size: Any, expected: tuple[int, ...]) -> None:
    caps, _ = caps_of(size, False, {"communicator": InProcessWorld(1).communicator(0)})
    assert caps == BucketCaps(caps=expected)


def test_nothing_is_measured_where_ranks_must_not_talk() -> None:
    for caps, _ in pool_of(2).run(caps_of, None, False, {"init_sync": False}):
        assert caps == BucketCaps.uniform(UNMEASURED_CAP)


def test_nothing_is_measured_in_a_world_of_one() -> None:
    calls: list[int] = []
    communicator = InProcessWorld(1).communicator(0)
    note_collectives(communicator, calls)
    caps, _ = caps_of(None, False, {"communicator": communicator})
    assert len(caps.caps) == 1
    assert calls == []
