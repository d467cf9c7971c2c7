import gc
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from tests import zygote
from tests.ranks import RankPool, Ranks, ThreadRanks, close_pools, nccl_pool_of, pool_of

# No deadline: the first example may start processes. No database: no run remembers another. How deep laws are tried is
# for `make laws`; here they only must not rot.
settings.register_profile("gradsync", deadline=None, max_examples=8, database=None, derandomize="CI" in os.environ)
settings.register_profile("deep", deadline=None, max_examples=200, database=None)
settings.load_profile("gradsync")

THREADS = (1, 3)
PROCESSES = (2, 4)
GPU_RANKS = (2, 3, 4)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of xdist, for each worker: what they all would import is imported by one process."""
    node.workerinput["zygote"] = zygote.address()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        zygote.share(config.workerinput["zygote"])


@pytest.fixture(scope="session", autouse=True)
def _close_pools() -> Iterator[None]:
    yield
    close_pools()


# Session scope: these hold no state of a test, hypothesis may use them, and pytest groups the tests by pool.


@pytest.fixture(scope="session", params=PROCESSES, ids="processes-{}".format)
def process_ranks(request: pytest.FixtureRequest) -> RankPool:
    return pool_of(request.param)


@pytest.fixture(scope="session", params=THREADS, ids="threads-{}".format)
def thread_ranks(request: pytest.FixtureRequest) -> ThreadRanks:
    return ThreadRanks(request.param)


@pytest.fixture(
    scope="session",
    params=[("threads", n) for n in THREADS] + [("processes", n) for n in PROCESSES],
    ids=lambda kind_and_size: "{}-{}".format(*kind_and_size),
)
def ranks(request: pytest.FixtureRequest) -> Ranks:
    kind, world_size = request.param
    return ThreadRanks(world_size) if kind == "threads" else pool_of(world_size)


@pytest.fixture(
    scope="session",
    params=[(way, n) for way in ("slices", "mps") for n in GPU_RANKS],
    ids=lambda way_and_size: "nccl-{}-{}".format(*way_and_size),
)
def nccl_ranks(request: pytest.FixtureRequest) -> RankPool:
    """NCCL ranks that share one GPU, by time slices or side by side."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    way, world_size = request.param
    return nccl_pool_of(world_size, way)


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """Of a rank that is alone on a CUDA device: two would need two devices."""
    torch.cuda.set_device(0)
    store, device = f"file://{tmp_path}/nccl", torch.device("cuda", 0)
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


def pytest_runtest_teardown() -> None:
    """Accelerate keeps the world of the process, which our Accelerator fills in: no test knows another one's."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of a test need look at it."""
    gc.collect()
    gc.freeze()


# Before -m looks at the marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one worker must run by itself begins first, so that it does not run alone at the end."""
    mark_breadth(items)
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def is_law(item: pytest.Item) -> bool:
    return item.get_closest_marker("hypothesis") is not None


# Settings of a test, from which on each is tried on some of the kinds of ranks, and not on all.
SEVERAL = 3
# The same, from which on some are left out where there is only one kind.
MANY = 25
KIND = re.compile(r"(?:threads|processes)-\d+")


def mark_breadth(items: list[pytest.Item]) -> None:
    """Not all combinations of settings with all kinds of ranks: those that are marked are left to `make more`.

    Four processes on two cores take longest, and each of their cases also runs on two or on threads: of a file's tests
    every second runs on four, with one of six of its cases, and no law does. Of the cases on other ranks half are not
    marked, by turns, so that every setting is tried on one kind at least. Where there is one kind only, two of three of
    many are not.
    """
    on_four = defaultdict[Path, dict[str, list[pytest.Item]]](lambda: defaultdict(list))
    on_others = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if KIND.search(item.name):
            test = item.nodeid.partition("[")[0]
            (on_four[item.path] if "processes-4" in item.name else on_others)[test].append(item)
    left = [
        item
        for tests in on_four.values()
        for place, cases in enumerate(tests.values())
        for number, item in enumerate(cases)
        if place % 2 or number % 6 or is_law(item)
    ]
    left += [item for cases in on_others.values() for item in left_out(cases)]
    for item in left:
        item.add_marker(pytest.mark.breadth)


def left_out(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Of the cases of one test."""
    settings = defaultdict[str, list[pytest.Item]](list)
    for case in cases:
        settings[KIND.sub("", case.name, count=1)].append(case)
    if len(settings) == len(cases):
        return cases[2::3] if len(cases) >= MANY else []
    if len(settings) < SEVERAL or any(case.get_closest_marker("breadth") for case in cases):
        # Few, or chosen by the test itself.
        return []
    # The turns are those of Thue and Morse: whatever the period of a parameter, its values meet every kind.
    return [
        case
        for number, kinds in enumerate(settings.values())
        for place, case in enumerate(kinds)
        if len(kinds) > 1 and (number.bit_count() + place) % 2
    ]
