"""Compiled regions under a sharded or overlapped optimizer: each waits for its own parameters, and none recompiles."""

import warnings
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from gradsync import DistributedDataParallel, OverlappedOptimizer, ShardedOptimizer
from gradsync.communicator import Handle, choose_communicator
from gradsync.core.bucket import Bucket
from gradsync.core.engine.observer import Observer
from tests.optim.training import assert_same, batch, filled, parameters_of
from tests.ranks import RankPool, Ranks

pytestmark = [pytest.mark.timeout(120), pytest.mark.program]

KINDS = ["sharded", "overlapped"]
in_processes = pytest.mark.parametrize("ranks", [("processes", 2)], indirect=True, ids=["processes-2"])
# A block is a bucket.
BLOCK_MB = 9 * 10 * 8 / 2**20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(9, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh()


class Blocks(nn.Module):
    """Blocks one after the other, compiled in ``place``."""

    def __init__(self, place: str, begun: list[str]) -> None:
        super().__init__()
        blocks: list[nn.Module] = [filled(Block().double()) for _ in range(4)]
        if place == "in blocks":
            for block in blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        if place == "around blocks":
            blocks = [torch.compile(block, backend="aot_eager", fullgraph=True) for block in blocks]  # type: ignore[misc]
        self.blocks = nn.ModuleList(blocks)
        self._begun = begun

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if not torch.compiler.is_compiling():
                self._begun.append(f"block {number}")
                x.register_hook(partial(self._note_backward, number))
        return x

    def _note_backward(self, number: int, gradient: torch.Tensor) -> None:
        self._begun.append(f"backward of block {number}")


class Notes(Observer):
    def __init__(self, told: list[str]) -> None:
        self._told = told

    def gather_arrived(self, bucket: Bucket) -> None:
        self._told.append("arrived")

    def bucket_started(self, bucket: Bucket, handle: Handle) -> None:
        self._told.append("started")


def optimizer_of(kind: str, model: DistributedDataParallel) -> Any:
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    if kind == "plain":
        return plain
    return ShardedOptimizer(plain, model) if kind == "sharded" else OverlappedOptimizer(plain, model)


def train(kind: str, place: str, steps: int) -> tuple[list[torch.Tensor], list[str], int]:
    """The parameters, what came one after the other in the last step, and how many graphs were compiled late."""
    with warnings.catch_warnings():
        # The compiler looks for a gradient of what it is given, and torch warns where that is not a leaf.
        warnings.simplefilter("ignore", UserWarning)
        return train_compiled(kind, place, steps)


def train_compiled(kind: str, place: str, steps: int) -> tuple[list[torch.Tensor], list[str], int]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    rank, told = choose_communicator().rank, list[str]()
    module = Blocks(place, told)
    if place == "around the model":
        module = torch.compile(module, backend="aot_eager")  # type: ignore[assignment]
    model: Any = DistributedDataParallel(module, bucket_cap_mb=BLOCK_MB, observer=Notes(told))
    optimizer = optimizer_of(kind, model)
    called = torch.compile(model, backend="aot_eager") if place == "around the wrapper" else model
    graphs = Counter[int]()
    for step in range(steps):
        graphs[step] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        told.clear()
        called(batch(rank, step, width=9)).square().mean().backward()
        events = list(told)
        optimizer.step()
        optimizer.zero_grad()
    late = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs[3]
    assert (graphs[1] > 0) == (place != "nowhere")
    torch._dynamo.reset()
    return parameters_of(model), events, late


PLACES = ["in blocks", "around blocks", "around the model", "around the wrapper"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@in_processes
def test_they_train_as_a_plain_optimizer_and_compile_once(ranks: RankPool, kind: str, place: str) -> None:
    results = ranks.run(train, kind, place, 6)
    expected = ranks.run(train, "plain", "nowhere", 6)[0][0]
    assert_same([parameters for parameters, _, _ in results], expected)
    assert [late for _, _, late in results] == [0, 0]


@pytest.mark.parametrize("place", ["in blocks", "around blocks"])
@pytest.mark.parametrize("kind", KINDS)
@in_processes
def test_the_first_region_runs_before_the_last_has_its_parameters(ranks: Ranks, kind: str, place: str) -> None:
    for _, events, _ in ranks.run(train, kind, place, 6):
        arrivals = [number for number, event in enumerate(events) if event == "arrived"]
        assert len(arrivals) == 4
        assert events.index("block 2") < arrivals[-1] < events.index("block 3")


@pytest.mark.parametrize("place", ["in blocks", "around blocks"])
@pytest.mark.parametrize("kind", ["plain", *KINDS])
@in_processes
def test_the_first_bucket_starts_before_the_last_region_runs_backward(ranks: Ranks, kind: str, place: str) -> None:
    for _, events, _ in ranks.run(train, kind, place, 6):
        assert events.count("started") == 4
        assert events.index("backward of block 3") < events.index("started") < events.index("backward of block 0")
