"""Laws of the event simulator, for any profile, transport and schedule."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.errors import ConfigurationError
from gradsync.plan import (
    EXACT,
    REDUCTIONS,
    BucketProfile,
    Jitter,
    Link,
    Schedule,
    StepProfile,
    Topology,
    Transport,
    simulate,
)

# Seconds are sums of floats, in another order on each path.
CLOSE = {"rel_tol": 1e-9, "abs_tol": 1e-12}

seconds = st.floats(0.0, 1.0)
overlaps = st.sampled_from(["backward", "none", "next-forward"])
ways = st.sampled_from(["ring", "exchange", "tree", "fastest", "hierarchical"])
reductions = st.sampled_from(sorted(REDUCTIONS))


@st.composite
def profiles(draw: st.DrawFn) -> StepProfile:
    forward, backward = draw(seconds), draw(seconds)
    places = draw(st.lists(st.tuples(st.integers(0, 10**8), st.floats(0, 1), st.floats(0, 1)), max_size=8))
    buckets = tuple(
        BucketProfile(index=index, nbytes=nbytes, ready=ready * backward, need=need * forward)
        for index, (nbytes, ready, need) in enumerate(places)
    )
    return StepProfile(
        forward=forward,
        backward=backward,
        data=draw(seconds),
        optimizer=draw(seconds),
        buckets=buckets,
        micro_batches=draw(st.integers(1, 3)),
    )


@st.composite
def transports(draw: st.DrawFn) -> Transport:
    between = Link(latency=draw(st.floats(0, 1e-2)), bandwidth=draw(st.floats(1e6, 1e11)))
    inside = draw(st.sampled_from([None, Link(latency=1e-6, bandwidth=1e11)]))
    topology = Topology(
        ranks=draw(st.integers(1, 300)),
        ranks_per_host=draw(st.sampled_from([1, 4, 8])),
        between=between,
        inside=inside,
        oversubscription=draw(st.sampled_from([1.0, 3.0])),
        hosts_per_switch=draw(st.sampled_from([None, 4])),
    )
    return Transport(
        topology=topology, way=draw(ways), start=draw(st.floats(0, 1e-3)), in_flight=draw(st.integers(1, 3))
    )


@given(profiles(), transports(), overlaps, reductions)
def test_parts_add_up_to_the_step(profile: StepProfile, transport: Transport, overlap: str, name: str) -> None:
    step = simulate(profile, transport, Schedule(overlap=overlap, reduction=REDUCTIONS[name], host=1e-4))
    assert math.isclose(step.ranks[0].step, step.step, rel_tol=1e-9, abs_tol=1e-9)


@given(profiles(), transports(), overlaps)
def test_no_step_is_shorter_than_what_it_computes_or_than_its_bytes_take(
    profile: StepProfile, transport: Transport, overlap: str
) -> None:
    step = simulate(profile, transport, Schedule(overlap=overlap)).step
    own = profile.optimizer / (transport.ranks if overlap == "next-forward" else 1)
    assert step >= (profile.compute - profile.optimizer + own) * (1 - 1e-9)
    costs = [transport.cost("all_reduce", bucket.nbytes) for bucket in profile.buckets]
    if overlap != "next-forward":
        # Behind the next forward a part of the last step's bytes may come after the clock was read.
        assert step >= sum(cost.nbytes / cost.bandwidth for cost in costs) * (1 - 1e-9)


@given(profiles(), transports(), overlaps, st.floats(1.0, 50.0))
def test_more_bandwidth_is_never_slower(
    profile: StepProfile, transport: Transport, overlap: str, factor: float
) -> None:
    between = transport.topology.between
    faster = transport.over(replace(between, bandwidth=between.bandwidth * factor))
    before, after = (simulate(profile, each, Schedule(overlap=overlap)).step for each in (transport, faster))
    assert after <= before * (1 + 1e-9) + 1e-12


@given(profiles(), st.integers(1, 100), overlaps)
def test_a_transport_that_costs_nothing_leaves_what_is_computed(profile: StepProfile, ranks: int, overlap: str) -> None:
    free = Transport(topology=Topology(ranks=ranks, between=Link(latency=0.0, bandwidth=math.inf)))
    step = simulate(profile, free, Schedule(overlap=overlap))
    own = profile.optimizer / (ranks if overlap == "next-forward" else 1)
    assert math.isclose(step.step, profile.compute - profile.optimizer + own, **CLOSE)
    assert math.isclose(step.ranks[0].exposed, 0.0, abs_tol=1e-9)


@given(profiles(), transports(), overlaps, st.integers(2, 5))
def test_equal_ranks_are_as_one(profile: StepProfile, transport: Transport, overlap: str, number: int) -> None:
    transport = transport.among(max(transport.ranks, number))
    several, one = (simulate(each, transport, Schedule(overlap=overlap)) for each in ([profile] * number, profile))
    assert several.step == one.step
    assert several.buckets == one.buckets
    assert several.ranks == one.ranks * number


@given(profiles(), transports(), st.sampled_from(["backward", "none"]), st.floats(1.0, 5.0))
def test_a_slower_rank_never_makes_a_step_faster(
    profile: StepProfile, transport: Transport, overlap: str, factor: float
) -> None:
    transport, schedule = transport.among(max(transport.ranks, 2)), Schedule(overlap=overlap)
    alike = simulate(profile, transport, schedule).step
    mixed = simulate([profile, profile.slowed(factor)], transport, schedule)
    assert mixed.step >= alike * (1 - 1e-9)
    assert mixed.step <= simulate(profile.slowed(factor), transport, schedule).step * (1 + 1e-9) + 1e-12
    # Without a bucket nobody waits for anybody.
    for parts in mixed.ranks if profile.buckets else ():
        assert math.isclose(parts.step, mixed.step, rel_tol=1e-9, abs_tol=1e-9)


@given(profiles(), transports(), overlaps)
def test_buckets_are_reduced_in_their_order_and_never_before_they_are_ready(
    profile: StepProfile, transport: Transport, overlap: str
) -> None:
    buckets = simulate(profile, replace(transport, in_flight=1), Schedule(overlap=overlap)).buckets
    for bucket in buckets:
        assert bucket.ready <= bucket.start <= bucket.reduced
    if overlap != "next-forward":
        for before, after in itertools.pairwise(buckets):
            assert before.reduced <= after.start


@given(profiles(), transports(), st.integers(1, 4))
def test_accumulation_costs_micro_batches_and_no_more_communication(
    profile: StepProfile, transport: Transport, number: int
) -> None:
    one, several = (simulate(profile.accumulating(each), transport).step for each in (1, number))
    more = (number - 1) * (profile.data + profile.forward + profile.backward)
    assert math.isclose(several - one, more, rel_tol=1e-6, abs_tol=1e-9)


def test_what_overlap_hides_is_told_from_what_is_exposed() -> None:
    # Bytes of 0.1 s a bucket, ready at 0.1 and 0.3 of a backward of 0.3.
    transport = Transport(topology=Topology(ranks=2, between=Link(latency=0.0, bandwidth=1e6)))
    buckets = tuple(BucketProfile(index=i, nbytes=100_000, ready=t) for i, t in enumerate((0.1, 0.3)))
    profile = StepProfile(forward=0.2, backward=0.3, buckets=buckets)
    step = simulate(profile, transport)
    assert step.step == pytest.approx(0.6)
    assert (step.ranks[0].hidden, step.ranks[0].exposed) == pytest.approx((0.1, 0.1))
    assert simulate(profile, transport, Schedule(overlap="none")).step == pytest.approx(0.7)


def test_the_time_of_a_straggler_is_waiting_and_not_communication() -> None:
    transport = Transport(topology=Topology(ranks=2, between=Link(latency=0.0, bandwidth=1e6)))
    profile = StepProfile(
        forward=0.1, backward=0.2, buckets=(BucketProfile(index=0, nbytes=50_000, ready=0.2, need=0.0),)
    )
    slow = profile.slowed(1.5)
    fast, straggler = simulate([profile, slow], transport).ranks
    assert fast.waiting == pytest.approx(0.15)
    assert fast.exposed == straggler.exposed == pytest.approx(0.05)
    assert straggler.waiting == pytest.approx(0.0)


def test_the_next_forward_hides_what_backward_cannot() -> None:
    # Communication as long as forward and backward together: a step takes backward
    # and half of the communication, not forward and all of it.
    transport = Transport(topology=Topology(ranks=2, between=Link(latency=0.0, bandwidth=1e6)), in_flight=2)
    number = 60
    buckets = tuple(
        BucketProfile(
            index=i, nbytes=300_000 // number, ready=0.2 * (i + 1) / number, need=0.1 * (number - 1 - i) / number
        )
        for i in range(number)
    )
    profile = StepProfile(forward=0.1, backward=0.2, buckets=buckets)
    assert simulate(profile, transport).step == pytest.approx(0.4, rel=0.02)
    assert simulate(profile, transport, Schedule(overlap="next-forward")).step == pytest.approx(0.35, rel=0.02)


def test_a_transport_on_the_cores_that_compute_hides_nothing() -> None:
    topology = Topology(ranks=2, between=Link(latency=0.0, bandwidth=1e6))
    buckets = tuple(BucketProfile(index=i, nbytes=100_000, ready=0.1) for i in range(2))
    profile = StepProfile(forward=0.1, backward=0.5, buckets=buckets)
    assert simulate(profile, Transport(topology=topology)).step == pytest.approx(0.7)
    assert simulate(profile, Transport(topology=topology, hidden=0.5)).step == pytest.approx(0.75)


def test_saved_bytes_of_a_burst_pass_at_once() -> None:
    link = Link(latency=0.0, bandwidth=1e6, burst=40_000)
    profile = StepProfile(forward=0.1, backward=0.1, buckets=(BucketProfile(index=0, nbytes=100_000, ready=0.1),))
    assert simulate(profile, Transport(topology=Topology(ranks=2, between=link))).step == pytest.approx(0.26)


def test_what_a_collective_costs_by_the_book() -> None:
    link = Link(latency=1e-3, bandwidth=1e6)
    topology = Topology(ranks=4, between=link)
    costs = {way: Transport(topology=topology, way=way).cost("all_reduce", 1e6).seconds for way in ("ring", "exchange")}
    assert costs == pytest.approx({"ring": 6e-3 + 1.5, "exchange": 2e-3 + 1.5})
    assert Transport(topology=topology).cost("all_gather", 1e6).seconds == pytest.approx(3e-3 + 0.75)
    # Two hosts of two ranks: a host must send all gradients once, and a flat ring one and a half times.
    hosts = replace(topology, ranks_per_host=2, inside=Link(latency=0.0, bandwidth=1e12))
    assert Transport(topology=hosts, way="hierarchical").cost("all_reduce", 1e6).nbytes == pytest.approx(1e6)
    assert Transport(topology=hosts).cost("all_reduce", 1e6).nbytes == pytest.approx(1.5e6)


def test_an_oversubscribed_network_slows_exchanges_and_no_ring() -> None:
    link = Link(latency=0.0, bandwidth=1e6)
    topology = Topology(ranks=64, between=link, oversubscription=4.0, hosts_per_switch=16)
    assert Transport(topology=topology).cost("all_reduce", 1e6).bandwidth == 1e6
    assert Transport(topology=topology, way="exchange").cost("all_reduce", 1e6).bandwidth < 4e5


@given(st.floats(0.0, 0.5), st.integers(1, 10_000), st.integers(1, 10_000))
def test_the_slowest_of_more_ranks_is_slower(sigma: float, few: int, many: int) -> None:
    jitter, few, many = Jitter(sigma=sigma), *sorted((few, many))
    for chance in (0.05, 0.5, 0.95):
        assert jitter.quantile(chance, few) <= jitter.quantile(chance, many) * (1 + 1e-9)


def test_the_slowest_of_many_follows_its_law() -> None:
    # By drawing them: the median of the largest of 100 normals is 2.46.
    assert Jitter(sigma=1.0).quantile(0.5, 100) == pytest.approx(math.exp(2.4623), rel=1e-3)
    assert Jitter().quantile(0.95, 10_000) == 1.0


def test_jitter_is_what_ranks_differ_by_and_not_what_slows_them_all() -> None:
    draw = random.Random(0)
    common = [math.exp(draw.gauss(0, 0.5)) for _ in range(2000)]
    for number in (2, 4):
        ranks = [[each * math.exp(draw.gauss(0, 0.05)) for each in common] for _ in range(number)]
        assert Jitter.between(ranks).sigma == pytest.approx(0.05, rel=0.1)
    assert Jitter.between([common]) == Jitter()


@given(profiles(), st.integers(1, 10**8))
def test_other_buckets_hold_the_same_bytes(profile: StepProfile, cap: int) -> None:
    joined = profile.in_buckets(cap)
    assert joined.nbytes == profile.nbytes
    assert all(
        bucket.nbytes <= cap or bucket.nbytes in {b.nbytes for b in profile.buckets} for bucket in joined.buckets
    )


def test_what_cannot_be_is_refused_with_what_came() -> None:
    transport = Transport(topology=Topology(ranks=2, between=Link(latency=0.0, bandwidth=1.0)))
    profile = StepProfile(forward=0.1, backward=0.1, buckets=(BucketProfile(index=0, nbytes=1, ready=0.0),))
    for make, word in [
        (lambda: simulate([profile] * 3, transport), "up to 2"),
        (lambda: simulate([profile, replace(profile, buckets=())], transport), "same buckets"),
        (lambda: StepProfile(forward=-1.0, backward=0.0), "forward=-1.0"),
        (lambda: Link(latency=0.0, bandwidth=0.0), "bandwidth=0.0"),
        (lambda: Topology(ranks=0, between=transport.topology.between), "ranks=0"),
        (lambda: Transport(topology=transport.topology, way="shared"), "2 hosts"),
        (lambda: Transport(topology=transport.topology, hidden=0.0), "hidden=0.0"),
        (lambda: replace(EXACT, share=0.0), "share=0.0"),
        (lambda: Jitter(sigma=-1.0), "sigma=-1.0"),
    ]:
        with pytest.raises(ConfigurationError, match=word):
            make()
