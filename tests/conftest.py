import gc
import inspect
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
from tests.cpu_ranks import CPU_RANKS
from tests.ranks import (
    PRETEND,
    RankPool,
    Ranks,
    Sharing,
    ThreadRanks,
    close_pools,
    join_mps,
    mps_for_all,
    nccl_pool_of,
    over_nccl,
    pool_of,
)

# No deadline: the first example may start processes. No database: no run remembers another. How deep laws are tried is
# for `make laws`; here they only must not rot.
settings.register_profile("gradsync", deadline=None, max_examples=8, database=None, derandomize="CI" in os.environ)
# For ranks that share a GPU by time slices, where a collective takes milliseconds.
settings.register_profile("gpu", deadline=None, max_examples=3, database=None, derandomize=True)
settings.register_profile("deep", deadline=None, max_examples=200, database=None)
settings.load_profile("gradsync")

THREADS = (1, 3)
PROCESSES = (2, 4)
GPU_RANKS = (2, 3, 4)
# Ranks on one GPU, where there is one, run the tests of the others, too. Counting GPUs starts nothing on them.
HAS_GPU = PRETEND in os.environ or torch.cuda.device_count() > 0
NCCL: list[tuple[Sharing, int]] = [("mps", 2), ("mps", 3), ("slices", 2), ("slices", 3)]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of xdist, for each worker: what they all would import is imported by one process, and they share one MPS."""
    node.workerinput["zygote"] = zygote.address()
    if HAS_GPU and PRETEND not in os.environ:
        node.workerinput["mps"] = mps_for_all()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--at-once", action="store_true", help="print failures and times as they come: for runs that may be cut off"
    )


SLOW_SECONDS = 4.0


class AtOnce:
    """Prints failures as they happen, and how long slow tests took."""

    @staticmethod
    def pytest_runtest_logreport(report: pytest.TestReport) -> None:
        if report.duration > SLOW_SECONDS:
            print(f"\n{report.duration:.0f} s {report.nodeid} ({report.when})", file=sys.__stdout__, flush=True)
        if report.failed:
            print(
                f"\n{'_' * 20} {report.nodeid} ({report.when})\n{report.longreprtext}", file=sys.__stdout__, flush=True
            )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--at-once") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(AtOnce())
    if hasattr(config, "workerinput"):
        zygote.share(config.workerinput["zygote"])
        if "mps" in config.workerinput:
            join_mps(config.workerinput["mps"])


@pytest.fixture(scope="session", autouse=True)
def _close_pools() -> Iterator[None]:
    yield
    close_pools()


# Session scope: these hold no state of a test, hypothesis may use them, and pytest groups the tests by pool.


def kinds(*cpu: tuple[str, tuple[int, ...]]) -> Any:
    """The params of a fixture: these, and NCCL ranks where there is a GPU."""
    given = [pytest.param((kind, n), id=f"{kind}-{n}") for kind, sizes in cpu for n in sizes]
    on_gpu = [pytest.param((way, n), id=f"nccl-{way}-{n}", marks=pytest.mark.gpu) for way, n in NCCL]
    return given + (on_gpu if HAS_GPU else [])


def ranks_of(kind: Any, world_size: int) -> Any:
    if kind in ("slices", "mps"):
        return nccl_pool_of(world_size, kind)
    return ThreadRanks(world_size) if kind == "threads" else pool_of(world_size)


@pytest.fixture(scope="session", params=kinds(("processes", PROCESSES)))
def process_ranks(request: pytest.FixtureRequest) -> RankPool:
    pool: RankPool = ranks_of(*request.param)
    return pool


@pytest.fixture(scope="session", params=kinds(("threads", THREADS)))
def thread_ranks(request: pytest.FixtureRequest) -> Ranks:
    ranks: Ranks = ranks_of(*request.param)
    return ranks


@pytest.fixture(scope="session", params=kinds(("threads", THREADS), ("processes", PROCESSES)))
def ranks(request: pytest.FixtureRequest) -> Ranks:
    ranks: Ranks = ranks_of(*request.param)
    return ranks


# For every test: pytest leaves out a fixture that only parametrize names, where the test has parameters of its own.
@pytest.fixture(autouse=True)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a test that makes its ranks itself: a second time, these are NCCL ranks."""
    sharing = getattr(request, "param", None)
    if sharing is None:
        yield
        return
    with over_nccl(sharing):
        if hasattr(request.module, "run_ranks"):
            monkeypatch.setattr(request.module, "run_ranks", run_over_nccl)
        yield


def run_over_nccl(function: Any, world_size: int, *args: Any, **kwargs: Any) -> Any:
    return ThreadRanks(world_size).run(function, *args, **kwargs)


# Who calls one of these makes ranks.
MAKERS = {"pool_of", "ThreadRanks", "run_ranks"}
GIVEN_RANKS = {"ranks", "process_ranks", "thread_ranks", "nccl_ranks"}


def makes_ranks(function: Any, seen: set[Any] | None = None) -> bool:
    """Whether it does, or a function of its module that it calls."""
    seen = set() if seen is None else seen
    seen.add(function)
    names = set(function.__code__.co_names)
    if names & MAKERS:
        return True
    called = [function.__globals__.get(name) for name in names]
    return any(
        makes_ranks(each, seen)
        for each in called
        if inspect.isfunction(each) and each.__module__ == function.__module__ and each not in seen
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Where there is a GPU: a test that makes or chooses its ranks itself runs over NCCL ranks, too."""
    if not HAS_GPU or metafunc.module.__name__.rpartition(".")[2] in CPU_RANKS:
        return
    own_kinds = any("ranks" in str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    if GIVEN_RANKS & set(metafunc.fixturenames) and not own_kinds:
        return
    test = getattr(metafunc.function, "hypothesis", None)
    fixtures = [each[-1].func for each in metafunc._arg2fixturedefs.values()]
    functions = [metafunc.function if test is None else test.inner_test]
    functions += [each for each in fixtures if each.__module__ == metafunc.module.__name__]
    if not own_kinds and not any(map(makes_ranks, functions)):
        return
    if any(metafunc.definition.get_closest_marker(name) for name in ("gpu", "program")):
        return
    on_cpu = pytest.param(None, id=getattr(pytest, "HIDDEN_PARAM", "cpu"))
    on_gpu = [pytest.param(way, id=f"nccl-{way}", marks=pytest.mark.gpu) for way in ("slices", "mps")]
    metafunc.parametrize("stand_in", [on_cpu, *on_gpu], indirect=True)


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
    on_gpu = [item for item in items if ON_GPU.search(item.name) and not item.path.stem.startswith("test_gpu")]
    mark_breadth([item for item in items if item not in set(on_gpu)])
    choose_on_gpu(on_gpu)
    take_turns(items)
    # Programs with a GPU of their own take longest.
    items.sort(key=lambda item: (item.get_closest_marker("xdist_group") is None, item.path.stem not in LONG_ON_GPU))


LONG_ON_GPU = {"test_bench_gpu", "test_gpu_faults", "test_gpu_stragglers", "test_lab_gpu", "test_one_gpu"}


def is_law(item: pytest.Item) -> bool:
    return item.get_closest_marker("hypothesis") is not None


# Settings of a test, from which on each is tried on some of the kinds of ranks, and not on all.
SEVERAL = 3
# The same, from which on some are left out where there is only one kind.
MANY = 25
KIND = re.compile(r"(?:threads|processes)-(\d+)")
ON_GPU = re.compile(r"nccl-(slices|mps)(?:-(\d+))?")


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


# What is tried over NCCL ranks on more than one kind of them.
CORE = ("test_contract", "test_window")
# How ranks share a GPU, and how many. Time slices find missing dependencies between streams, and take their time.
TURNS = (("mps", "2"), ("mps", "3"))
CORE_TURNS = (("slices", "2"), ("mps", "3"))


def choose_on_gpu(items: list[pytest.Item]) -> None:
    """Of the tests over NCCL ranks, what runs in minutes keeps its mark: the rest is marked as breadth.

    Of each test one case runs, by turns on two ranks side by side and on three, and with the first, the second or
    another of its settings. Those of the core also run by time slices.
    """
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        names = item.path.stem, f"{item.path.stem}::{item.name.partition('[')[0]}"
        for reason in filter(None, map(CPU_RANKS.get, names)):
            item.add_marker(pytest.mark.cpu_ranks(reason))
        mark = item.get_closest_marker("cpu_ranks")
        if mark is not None:
            item.add_marker(pytest.mark.skip(reason=f"not over NCCL ranks: {mark.args[0]}"))
        tests[item.nodeid.partition("[")[0]].append(item)
    for number, cases in enumerate(tests.values()):
        kinds = defaultdict[tuple[str, ...], list[pytest.Item]](list)
        for case in cases:
            found, replaced = ON_GPU.search(case.name), KIND.search(case.name)
            assert found is not None
            kinds[found.group(1), found.group(2) or (replaced.group(1) if replaced else "2")].append(case)
        is_core = cases[0].path.stem in CORE
        turns = CORE_TURNS if is_core else (TURNS[number % len(TURNS)], *TURNS)
        found_kinds = [kinds[turn] for turn in turns if kinds[turn]] or [cases]
        if not is_core:
            found_kinds = found_kinds[:1]
        chosen = [those[(number + place) % len(those)] for place, those in enumerate(found_kinds)]
        for case in cases:
            if case not in chosen:
                case.own_markers = [mark for mark in case.own_markers if mark.name != "gpu"]
                case.add_marker(pytest.mark.breadth)


def take_turns(items: list[pytest.Item]) -> None:
    """Time slices are shared by all that run: more workers would not be faster. And MPS has 48 clients at most."""
    for item in items:
        found = ON_GPU.search(item.name)
        if found is not None and found.group(1) == "slices":
            item.add_marker(pytest.mark.xdist_group("slices"))
        elif found is not None and found.group(2) == "4":
            item.add_marker(pytest.mark.xdist_group("mps-4"))


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
