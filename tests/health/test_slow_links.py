"""A slow link is told from slow ranks, and its host is named."""

import dataclasses
import json
import os
import socket
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradsync
from gradsync.health.watch.links import (
    LEAST_BYTES,
    WINDOWS,
    LinkMeter,
    Sent,
    SlowLink,
    find_slow_link,
    read_links,
    read_sent,
)
from gradsync.health.watch.messages import Member, slow_link
from gradsync.health.watch.pace_meter import Pace
from gradsync.health.watch.pace_reports import PaceDetector
from gradsync.lab import Lab, LabPlan, Rate, fork_ranks
from tests.health.test_watch_ranks import Heard
from tests.processes import eventually
from tests.tools.test_lab import needs_lab

pytestmark = pytest.mark.timeout(120)

HOSTS = {f"10.0.0.{number}": f"host{number}" for number in range(8)}
MILLION = 1_000_000


def detector_of(hosts: int = 2) -> PaceDetector:
    """The hub's, over two ranks on so many hosts."""
    return PaceDetector([Member(rank=rank, host=f"host{rank % hosts}", process=rank) for rank in range(2)])


def ring(rates: list[float]) -> list[Sent]:
    """Each host sends to the next, at the lower of their rates, in bytes a second."""
    size = len(rates)
    return [
        Sent(
            source=f"10.0.0.{number}",
            target=f"10.0.0.{(number + 1) % size}",
            size=10 * MILLION,
            seconds=10 * MILLION / min(rates[number], rates[(number + 1) % size]),
        )
        for number in range(size)
    ]


@given(st.integers(3, 8), st.integers(0, 7), st.floats(2.5, 100.0), st.floats(1.0, 1.5))
def test_of_hosts_in_a_ring_the_slow_one_is_found(size: int, slow: int, times: float, noise: float) -> None:
    rates = [100.0 * MILLION * (noise if number % 2 else 1.0) for number in range(size)]
    assert find_slow_link(ring(rates), HOSTS) is None
    slow %= size
    rates[slow] = 100 * MILLION / times
    found = find_slow_link(ring(rates), HOSTS)
    assert found is not None
    assert (found.source, found.target) == (f"host{slow}", "")
    assert found.rate == pytest.approx(rates[slow])


def test_a_single_direction_is_named_and_what_nobody_explains_is_not() -> None:
    one = ring([100.0 * MILLION] * 4)
    one[2] = Sent(source=one[2].source, target=one[2].target, size=one[2].size, seconds=4 * one[2].seconds)
    found = find_slow_link(one, HOSTS)
    assert found == SlowLink(source="host2", target="host3", rate=25.0 * MILLION, others=100.0 * MILLION)
    assert slow_link(found) == (
        "communication is as slow as the link from host2 to host3: it carries 200 Mbit/s where others carry 800 "
        "and more"
    )
    # Two slow ones that have no host in common.
    one[0] = Sent(source=one[0].source, target=one[0].target, size=one[0].size, seconds=4 * one[0].seconds)
    assert find_slow_link(one, HOSTS) is None
    assert find_slow_link([], HOSTS) is None
    few = [Sent(source="10.0.0.0", target=f"10.0.0.{n}", size=LEAST_BYTES - 1, seconds=float(n)) for n in (1, 5)]
    assert find_slow_link(few, HOSTS) is None


def test_links_to_others_than_ranks_carry_no_gradients() -> None:
    """Checkpoints that go to a store. On devices whose communicator has no sockets of the kernel's there are none."""
    detector = detector_of()
    quick, slow = read_sent(
        [["10.0.0.1", "10.0.0.0", 8 * MILLION, 0.1], ["10.0.0.1", "192.0.2.7", 8 * MILLION, 1.0]],
    )
    assert detector.add_links(0, read_sent([["10.0.0.0", "10.0.0.1", 8 * MILLION, 0.1]])) == []
    assert detector.add_links(1, [quick, slow]) == []
    # Of a rank it is named.
    assert detector.add_links(0, read_sent([["10.0.0.0", "10.0.0.1", 8 * MILLION, 1.0]])) == []
    assert len(detector.add_links(1, [quick, slow])) == 1


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=5)
    )
)
def test_whatever_a_rank_says_of_its_links_does_no_harm(data: object) -> None:
    detector = detector_of()
    for member in range(2):
        assert detector.add_links(member, read_sent(data)) == []
    true = Sent(source="a", target="b", size=5, seconds=0.5)
    assert read_sent([["a", "b", 10**400, 0.5]]) == []
    assert read_sent([dataclasses.astuple(true)]) == [true]


def test_the_kernel_counts_what_is_sent() -> None:
    """Over a connection of two addresses of this host."""
    meter = LinkMeter()
    assert meter.result(0, 0.0) is None, "nobody has asked"
    with (
        socket.create_server(("127.0.0.2", 0)) as listener,
        socket.create_connection(listener.getsockname(), source_address=("127.0.0.1", 0)) as near,
        listener.accept()[0] as far,
    ):
        meter.begin(7, 0.0)
        way = ("127.0.0.1", "127.0.0.2")
        all_of_it = read_links()[way][0] + 500_000
        for _ in range(50):
            near.sendall(bytes(10_000))
            left = 10_000
            while left:
                left -= len(far.recv(left))
        # The other end may take its time to say that it has them.
        assert eventually(lambda: read_links()[way][0] >= all_of_it)
        assert meter.result(7 + WINDOWS - 1, 0.0) is None
        sent = {(each.source, each.target): each for each in meter.result(7 + WINDOWS, 0.0) or ()}
        assert sent[way].size == 500_000
        assert sent["127.0.0.2", "127.0.0.1"].size == 0
        assert meter.result(99, 0.0) is None, "answered"
    assert way not in read_links()


def test_whoever_reads_the_counts_leaves_connections_as_they_are() -> None:
    """Also where a script wants a timeout for all its sockets, which Python has by making them non-blocking."""
    with (
        socket.create_server(("127.0.0.2", 0)) as listener,
        socket.create_connection(listener.getsockname(), source_address=("127.0.0.1", 0)) as near,
        listener.accept()[0] as far,
    ):
        for timeout in (None, 5.0):
            socket.setdefaulttimeout(timeout)
            try:
                assert bool(read_links()) == (timeout is None)
            finally:
                socket.setdefaulttimeout(None)
            assert os.get_blocking(near.fileno())
            assert os.get_blocking(far.fileno())


def test_links_are_asked_for_when_the_wire_is_slow_and_only_between_hosts() -> None:
    for hosts in (1, 2):
        detector = detector_of(hosts)
        asked = []
        for window in range(1, 101):
            communication = 0.001 if window <= 50 else 0.03
            for member in range(2):
                detector.add(member, Pace(last=window, own=(0.02,), waited=(communication,)), 0.0)
            if detector.asks_for_links:
                detector.asks_for_links = False
                asked.append(window)
        assert len(asked) == hosts - 1
        assert all(50 < window <= 65 for window in asked)


def test_where_two_models_are_trained_the_wire_is_not_judged() -> None:
    """Rank 0 waits before the one, rank 1 before the other: both wait, and not for the network."""
    for models in (2, 1):
        detector, said = detector_of(), list[str]()
        for window in range(1, 101):
            waited = 0.001 if window <= 50 else 0.03
            for member in range(2):
                said += detector.add(member, Pace(last=window, own=(0.02,), waited=(waited,)), 0.0, models=models)
        assert bool(said) is (models == 1)


SLOW = 2
BECOMES = 50


def train_over_a_link_that_becomes_slow(lab: Lab, answer: Path) -> None:
    said = Heard().lines
    dist.init_process_group("gloo")
    model = gradsync.DistributedDataParallel(nn.Linear(512, 512))
    # Not to the last step: on a busy machine it may take longer to be sure.
    for step in range(1, BECOMES + 150):
        if step == BECOMES and dist.get_rank() == SLOW:
            lab.set_rate(Rate.parse("50mbit"), host=SLOW)
        time.sleep(0.02)
        model(torch.ones(2, 512)).mean().backward()
        model.zero_grad()
        found = torch.tensor(float(any("the link of" in words for words in said)))
        dist.all_reduce(found)
        if found:
            break
    if dist.get_rank() == 0:
        answer.write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.program
@pytest.mark.parametrize("_", [pytest.param(None, marks=needs_lab)])
def test_the_host_whose_link_becomes_slow_is_named_and_no_rank_is(_: None) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(LabPlan(name=f"links{os.getpid()}", hosts=3, rate=Rate.parse("500mbit"))) as lab,
    ):
        answer = Path(folder) / "said"
        fork_ranks(lab, lambda: train_over_a_link_that_becomes_slow(lab, answer), timeout=90.0)
        said = json.loads(answer.read_text())
    assert any(words.startswith("communication has become slow: it takes ") for words in said)
    assert any(words.startswith(f"communication is as slow as the link of host{SLOW}: ") for words in said)
    assert not any("computes" in words for words in said), said
