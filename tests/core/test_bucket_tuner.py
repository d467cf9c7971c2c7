"""Bucket sizes that are found while training: the arithmetic, and that it changes nothing but sizes."""

import pytest
import torch
from torch import nn

from gradsync.communicator import (
    BaseCommunicator,
    Collective,
    Communicator,
    Handle,
    InProcessWorld,
    ReduceOp,
    choose_communicator,
)
from gradsync.core.bucket.layout import BucketCaps, ParameterSpec, plan_layout
from gradsync.core.bucket.sizes import TUNED_AFTER, WINDOWS, BucketTuner, LinkCost
from gradsync.core.engine.policy import SynchronizerOptions
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.errors import ConfigurationError
from gradsync.testing import run_ranks

pytestmark = pytest.mark.timeout(120)

MIB = 1024 * 1024
LAYERS = 8
CPU = torch.device("cpu")

# -- in a training ----------------------------------------------------------------------------------------------------


SECONDS_A_LAYER = 0.002


class NotedCommunicator(BaseCommunicator):
    """The ranks of another communicator. Notes what it carries, and knows how long that would have taken.

    No time of the machine is measured: a window takes as long as its buckets would, one after the other over a link of
    that cost, each ready when the layers before it have run their backward.
    """

    def __init__(self, over: Communicator, cost: LinkCost) -> None:
        super().__init__(over.rank, over.world_size)
        self._over, self._cost = over, cost
        self._now = 0.0
        self._sent: list[int] = []
        self.collectives: list[int] = []

    def clock(self) -> float:
        """Asked at the begin and at the end of each window."""
        buckets, self._sent = [nbytes for nbytes in self._sent if nbytes > 1000], []
        total, ready, free = sum(buckets), 0.0, 0.0
        for nbytes in buckets:
            ready += LAYERS * SECONDS_A_LAYER * nbytes / total
            free = max(ready, free) + self._cost.latency + nbytes * self._cost.seconds_per_byte
        self._now += free
        return self._now

    def _all_reduce(self, collective: Collective, tensor: torch.Tensor, op: ReduceOp) -> Handle:
        self._sent.append(tensor.nbytes)
        self.collectives.append(tensor.nbytes)
        return self._issue(collective, lambda: self._over.all_reduce(tensor, op))

    def _broadcast(self, collective: Collective, tensor: torch.Tensor, source: int) -> Handle:
        return self._issue(collective, lambda: self._over.broadcast(tensor, source))


class Layers(nn.Module):
    """One after the other."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=torch.float64) for _ in range(count))
        # Not the global generator: ranks are threads here.
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=width**-0.5, generator=generator)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def train(cost: LinkCost, windows: int) -> dict[str, object]:
    communicator = NotedCommunicator(choose_communicator(), cost)
    model = Layers(count=LAYERS, width=128)
    specs = [ParameterSpec.of(name, parameter) for name, parameter in model.named_parameters()]
    options = SynchronizerOptions(
        communicator=communicator,
        caps=BucketCaps.uniform(100 * MIB),
        tuner=BucketTuner(communicator.clock),
    )
    engine = Synchronizer(list(model.parameters()), specs, options)
    caps, gradients = [], []
    for number in range(windows):
        model.zero_grad()
        inputs = torch.full((2, 128), float(communicator.rank + number), dtype=torch.float64)
        engine.begin_forward()
        output = model(inputs)
        engine.end_forward(output)
        output.sum().backward()
        caps.append(engine.caps)
        gradients.append(model.layers[0].weight.grad.clone())  # type: ignore[union-attr, operator]
    assert options.tuner is not None
    return {
        "caps": caps,
        "gradients": gradients,
        "rounds": options.tuner.rounds,
        "still watching": engine.engine.observer is not None,
        "buckets": len(engine.buckets),
    }


def expected_gradient(number: int, world_size: int) -> torch.Tensor:
    model = Layers(count=8, width=128)
    total = sum(
        model(torch.full((2, 128), float(rank + number), dtype=torch.float64)).sum() for rank in range(world_size)
    )
    (total / world_size).backward()  # type: ignore[union-attr]
    gradient = model.layers[0].weight.grad
    assert isinstance(gradient, torch.Tensor)
    return gradient


def test_sizes_are_found_together_and_then_stay() -> None:
    """On a slow link one bucket is cut. All ranks come to the same, at the same windows."""
    windows = TUNED_AFTER[-1] + 4
    results = run_ranks(train, 2, LinkCost(latency=1e-4, seconds_per_byte=1e-8), windows)
    for result in results:
        assert result["caps"] == results[0]["caps"]
        assert result["rounds"] == len(TUNED_AFTER)
        assert not result["still watching"]
        assert result["buckets"] > 1  # type: ignore[operator]
        caps = result["caps"]
        assert isinstance(caps, list)
        assert caps[: TUNED_AFTER[0]] == [BucketCaps.uniform(100 * MIB)] * TUNED_AFTER[0]
        assert len(set(caps[TUNED_AFTER[-1] :])) == 1
    for number in (0, TUNED_AFTER[0], windows - 1):
        expected = expected_gradient(number, 2)
        for result in results:
            gradients = result["gradients"]
            assert isinstance(gradients, list)
            torch.testing.assert_close(gradients[number], expected, rtol=1e-12, atol=0.0)


def test_where_every_bucket_is_dear_there_is_one() -> None:
    windows = TUNED_AFTER[-1] + 1
    results = run_ranks(train, 2, LinkCost(latency=0.03, seconds_per_byte=1e-11), windows)
    assert [result["buckets"] for result in results] == [1, 1]
    # Two, four and eight buckets were tried, and then no more.
    assert len(set(results[0]["caps"])) == 4  # type: ignore[call-overload]


@pytest.mark.parametrize("lucky", [None, 1, 4])
def test_luck_does_not_last(lucky: int | None) -> None:
    """Two buckets are best. Another number may look better in its first trial; tried again it is found out."""
    tuner, total = BucketTuner(), MIB
    seconds = {1: 1.5, 2: 1.0, 4: 1.2, 8: 1.4, 16: 1.6}
    caps, tried = BucketCaps.uniform(total), []

    def sizes(proposed: BucketCaps) -> list[int]:
        return [proposed.caps[0]] * (total // proposed.caps[0])

    while not tuner.finished:
        parts = total // caps.caps[0]
        for _ in range(WINDOWS):
            tuner.backward_began(synchronizes=True)
            tuner.synchronization_finished()
        luck = 0.9 if parts == lucky and parts not in tried else seconds[parts]
        tuner._windows = [(0.0, luck)] * WINDOWS
        tried.append(parts)
        caps = tuner.propose(tuner.times, caps, sizes)
    assert total // caps.caps[0] == 2
    assert sorted(tried[-2:]) == sorted({2, lucky or 4})


@pytest.mark.parametrize("tapers", [True, False])
def test_what_is_tried_ends_as_the_guess_does(tapers: bool) -> None:
    """Where communication needs no core the guess ends in small buckets; elsewhere they would only cost."""
    tuner, total = BucketTuner(), 8 * MIB
    guess = BucketCaps.tapered(MIB, least=1) if tapers else BucketCaps.uniform(MIB)
    caps, tried = guess, []
    while not tuner.finished:
        tuner._windows = [(0.0, 1.0 / (1 + len(tried)))] * WINDOWS
        caps = tuner.propose(tuner.times, caps, lambda proposed: [max(proposed.caps), total - max(proposed.caps)])
        tried.append(caps)
    finer = [each for each in tried if each != guess and max(each.caps) < total]
    assert finer
    assert all(each.from_the_end == tapers and (each.cap(0) < each.cap(9)) == tapers for each in finer)


@pytest.mark.parametrize(("tapers", "coarsest"), [(True, 8), (False, 1)])
def test_whoever_wants_pieces_gets_them_where_they_cost_nothing(tapers: bool, coarsest: int) -> None:
    tuner, total = BucketTuner(), 16 * MIB
    tuner.fewest = 8
    caps = guess = BucketCaps.tapered(3 * MIB, least=1) if tapers else BucketCaps.uniform(3 * MIB)
    tried = []
    while not tuner.finished:
        tuner._windows = [(0.0, 1.0)] * WINDOWS
        caps = tuner.propose(tuner.times, caps, lambda proposed: [max(proposed.caps), total - max(proposed.caps)])
        tried.append(caps)
    assert max(max(each.caps) for each in tried if each != guess) == total // coarsest
    # The guess is too coarse, though nothing was faster.
    assert (tried[-1] == guess) != tapers


# -- a parameter that is larger than a bucket -------------------------------------------------------------------------


def layout_of(numels: list[int], cap: int) -> list[list[int]]:
    specs = [ParameterSpec.of(f"p{n}", torch.empty(numel, device="meta")) for n, numel in enumerate(numels)]
    layout = plan_layout(specs, range(len(specs)), BucketCaps.uniform(cap), control=2)
    return [
        [len(part) * 4 for part in torch.empty(plan.numel, device="meta").split(plan.piece)] for plan in layout.buckets
    ]


def test_a_huge_parameter_is_sent_in_pieces() -> None:
    first, huge, last = layout_of([100_000, 10 * MIB // 4, 100_000], 2 * MIB)
    assert len(first) == len(last) == 1
    assert len(huge) == 5
    assert max(huge) - min(huge) < 64


def test_small_parameters_never_do() -> None:
    assert all(len(pieces) == 1 for pieces in layout_of([MIB // 8] * 50, 2 * MIB))


def test_pieces_are_worth_a_collective() -> None:
    assert [len(pieces) for pieces in layout_of([3 * MIB // 4], 1000)] == [3]


def reduce_huge() -> tuple[list[int], torch.Tensor]:
    communicator = NotedCommunicator(choose_communicator(), LinkCost(latency=0.0, seconds_per_byte=0.0))
    parameter = nn.Parameter(torch.zeros(MIB, dtype=torch.float64))
    options = SynchronizerOptions(communicator=communicator, caps=BucketCaps.uniform(3 * MIB))
    engine = Synchronizer([parameter], [ParameterSpec.of("huge", parameter)], options)
    engine.begin_forward()
    output = parameter * torch.arange(MIB, dtype=torch.float64) * (communicator.rank + 1)
    engine.end_forward(output)
    output.sum().backward()
    assert parameter.grad is not None
    return [nbytes for nbytes in communicator.collectives if nbytes > 1000], parameter.grad.clone()


def test_a_communicator_that_lacks_a_collective_says_which() -> None:
    communicator = NotedCommunicator(InProcessWorld(1).communicator(0), LinkCost(latency=0.0, seconds_per_byte=0.0))
    with pytest.raises(ConfigurationError, match="NotedCommunicator has no all_to_all"):
        communicator.all_to_all(torch.zeros(2), torch.zeros(2))
    # Nothing was sent, so nothing is broken.
    communicator.all_reduce(torch.zeros(2)).wait()


def test_pieces_add_up() -> None:
    for collectives, gradient in run_ranks(reduce_huge, 2):
        assert len(collectives) == 2
        assert torch.equal(gradient, torch.arange(MIB, dtype=torch.float64) * 1.5)
