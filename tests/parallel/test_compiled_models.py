"""Compiled models: windows are those of the same compiled model without a wrapper, and nothing is compiled late."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradsync import (
    DistributedDataParallel,
    OverlappedOptimizer,
    ShardedOptimizer,
    average_gradients,
    synchronize_gradients,
)
from gradsync.communicator import Handle, choose_communicator
from gradsync.core.bucket import Bucket
from gradsync.core.engine.observer import Observer
from gradsync.reduction import Cast
from tests.optim.training import batch, filled
from tests.ranks import RankPool, pool_of

pytestmark = [pytest.mark.timeout(240), pytest.mark.program]

# A block has more than the smallest bucket at which torch cuts a graph.
WIDTH = 400
STEPS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh() / WIDTH


class Blocks(nn.Module):
    """Three blocks, of which the last may go unused, under activation checkpointing if ``reentrant`` is given."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor, whole: bool = True) -> torch.Tensor:
        for block in self.blocks if whole else self.blocks[:2]:
            x = block(x) if self._reentrant is None else checkpoint(block, x, use_reentrant=self._reentrant)
        return x


Wrapped = tuple[Any, Any]


def compiled_in(place: str, module: nn.Module) -> Any:
    """The model to wrap."""
    if place == "blocks":
        for block in module.blocks:  # type: ignore[union-attr]
            block.compile(backend="aot_eager", fullgraph=True)
    elif place == "in place":
        module.compile(backend="aot_eager")
    elif place == "model":
        return torch.compile(module, backend="aot_eager")
    return module


def wrap(place: str, module: nn.Module, **options: Any) -> Wrapped:
    """What is called, and what has the methods of a wrapper."""
    if place == "attached":
        attached = synchronize_gradients(module, bucket_cap_mb=1, **options)
        return torch.compile(module, backend="aot_eager"), attached
    wrapper = DistributedDataParallel(compiled_in(place, module), bucket_cap_mb=1, **options)
    return torch.compile(wrapper, backend="aot_eager") if place == "wrapper" else wrapper, wrapper


def window(kind: str, model: Any, wrapper: Any, rank: int, step: int) -> None:
    """One window of ``model``, with a wrapper or without."""
    count = 2 if kind in ("accumulate", "no_sync") else 1

    def loss(micro: int) -> torch.Tensor:
        whole = kind != "unused" or (step + rank) % 3 == 0
        # Reentrant checkpointing has a backward only if an input has.
        return model(batch(rank, step, micro, WIDTH).requires_grad_(), whole).square().mean()

    if wrapper is None:
        for micro in range(count):
            (loss(micro) / (count if kind == "accumulate" else 1)).backward()
    elif kind == "accumulate":
        for micro in wrapper.accumulate(range(count)):
            wrapper.backward(loss(micro))
    elif kind == "no_sync":
        with wrapper.no_sync():
            loss(0).backward()
        loss(1).backward()
    else:
        loss(0).backward()


def train(place: str, kind: str) -> tuple[float, list[int]]:
    """The largest difference of parameters to a model without a wrapper, and the graphs compiled by each step."""
    torch._dynamo.reset()
    rank, graphs, difference = choose_communicator().rank, list[int](), 0.0
    reentrant = {"checkpointed": False, "checkpointed reentrantly": True}.get(kind)
    module, plain = (filled(Blocks(reentrant).double()) for _ in range(2))
    model, wrapper = wrap(place, module, **{"reduction": Cast(torch.float32)} if kind == "compressed" else {})
    inner = "model" if place in ("wrapper", "attached") else place
    reference = compiled_in(inner, plain)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    ours: dict[str, Callable[..., Any]] = {"sharded": ShardedOptimizer, "overlapped": OverlappedOptimizer}
    if kind in ours:
        optimizer = ours[kind](optimizer, wrapper)
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    for step in range(STEPS):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        window(kind, model, wrapper, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
        window(kind, reference, None, rank, step)
        average_gradients(plain)
        expected.step()
        expected.zero_grad()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        difference = max(difference, (mine - theirs).abs().max().item())
    torch._dynamo.reset()
    return difference, graphs


KINDS = [
    *("plain", "accumulate", "no_sync", "unused", "checkpointed", "checkpointed reentrantly"),
    *("sharded", "overlapped", "compressed"),
]


def run(ranks: RankPool, place: str, kind: str) -> None:
    for difference, graphs in ranks.run(quietly, train, place, kind):
        assert difference < (1e-7 if kind == "compressed" else 1e-12)
        assert graphs[0] > 0
        assert graphs[3:] == [0] * (STEPS - 3)


def quietly(function: Callable[..., Any], *args: Any) -> Any:
    with warnings.catch_warnings():
        # The compiler looks for a gradient of what it is given, and torch warns where that is not a leaf.
        warnings.simplefilter("ignore", UserWarning)
        return function(*args)


@pytest.mark.parametrize("place", ["blocks", "model", "wrapper", "attached"])
@pytest.mark.parametrize("kind", KINDS)
def test_windows_equal_those_of_the_compiled_model_alone(kind: str, place: str) -> None:
    run(pool_of(2), place, kind)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("place", ["blocks", "model"])
@pytest.mark.parametrize("kind", ["accumulate", "sharded"])
def test_windows_equal_those_alone_on_any_number_of_ranks(kind: str, place: str, world_size: int) -> None:
    run(pool_of(world_size), place, kind)


class Starts(Observer):
    def __init__(self, told: list[str]) -> None:
        self._told = told

    def bucket_started(self, bucket: Bucket, handle: Handle) -> None:
        self._told.append("started")


def order_of_events(place: str, options: dict[str, Any]) -> tuple[list[str], int]:
    """What came one after the other in the last backward, and how many graph breaks the compiler noted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    told: list[str] = []
    module = filled(Blocks().double())
    model = compiled_in(place, module) if place == "in place" else torch.compile(module, backend="aot_eager", **options)
    wrapper = DistributedDataParallel(model, bucket_cap_mb=1, observer=Starts(told))
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: told.append(name))
    for step in range(4):
        told.clear()
        wrapper(batch(choose_communicator().rank, step, width=WIDTH)).square().mean().backward()
        wrapper.zero_grad()
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    torch._dynamo.reset()
    return told, breaks


@pytest.mark.parametrize(
    ("place", "options"),
    [("in place", {}), ("model", {}), ("model", {"fullgraph": True}), ("model", {"dynamic": True})],
    ids=["in place", "model", "fullgraph", "dynamic"],
)
def test_a_compiled_backward_starts_a_bucket_before_its_last_gradient(place: str, options: dict[str, Any]) -> None:
    for told, breaks in pool_of(2).run(quietly, order_of_events, place, options):
        assert told.count("started") >= 3
        assert told.index("started") < told.index("blocks.0.inner.weight")
        assert breaks == 0


def how_compiled(place: str, optimize: bool) -> str:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=optimize):
        module = filled(Blocks().double())
        model, wrapper = wrap(place, module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(4):
            model(batch(0, step, width=WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        told = str(wrapper.explain().timeline.recordings[0].header.compiled)
        assert told in wrapper.synchronizer.describe()
    torch._dynamo.reset()
    return told


@pytest.mark.parametrize(
    ("place", "optimize", "said"),
    [
        ("nowhere", True, ""),
        ("blocks", True, "compiled blocks: 3. Communication overlaps block by block"),
        ("model", True, "compiled as a whole: backward is cut where buckets end"),
        ("in place", True, "compiled as a whole: backward is cut where buckets end"),
        ("wrapper", True, "compiled as a whole: backward is cut where buckets end"),
        ("wrapper", False, "compiled as a whole: torch._dynamo.config.optimize_ddp is off"),
        ("attached", True, "compiled as a whole: all gradients arrive when backward has run. Compile its blocks"),
    ],
)
def test_a_model_says_what_is_compiled(place: str, optimize: bool, said: str) -> None:
    for told in pool_of(2).run(quietly, how_compiled, place, optimize):
        assert told.startswith(said)
        assert bool(told) == bool(said)
