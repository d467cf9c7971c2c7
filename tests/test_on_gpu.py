"""The world of a worker of NCCL ranks, as far as it can be tried without a GPU: the device is "meta"."""

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import RandomSampler

from tests.cpu_ranks import CPU_RANKS
from tests.on_gpu import compute_on
from tests.ranks import _CodePickler, _dump

TESTS = Path(__file__).parent
META = torch.device("meta")


def in_a_worker(function: Callable[[], Any]) -> Any:
    """What it returns on a thread whose tests compute on the device."""
    results = []

    def work() -> None:
        compute_on(META)
        results.append(function())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(results) == 1
    return results[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2),
        lambda: torch.tensor([1.0]),
        lambda: torch.arange(3),
        lambda: torch.randn(2, generator=torch.Generator().manual_seed(0)),
        lambda: torch.randperm(3),
        lambda: torch.zeros_like(torch.ones(2)),
        lambda: nn.Linear(2, 3).weight,
        lambda: nn.BatchNorm1d(2).running_mean,
        lambda: nn.Sequential(nn.Conv2d(1, 1, 1), nn.Embedding(2, 2))[1].weight,
        lambda: torch.randn_like(torch.ones(2)),
        lambda: torch.rand(2, requires_grad=True),
    ],
)
def test_what_a_test_makes_is_on_the_device(make: Callable[[], torch.Tensor]) -> None:
    assert in_a_worker(make).device == META


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, device="cpu"),
        lambda: torch.get_default_device(),
        lambda: torch.tensor(torch.ones(2, device="cpu")[0]),
    ],
)
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_what_says_its_device_is_where_it_says(make: Callable[[], Any]) -> None:
    made = in_a_worker(make)
    assert (made if isinstance(made, torch.device) else made.device) == torch.device("cpu")


@pytest.mark.parametrize("module", ["gradsync.core.bucket.bucket", "torch.optim.adam", "tests.ranks", "numpy"])
def test_what_others_make_is_where_it_is_in_a_program(module: str) -> None:
    def make() -> torch.Tensor:
        names: dict[str, Any] = {"__name__": module, "torch": torch}
        exec("made = torch.zeros(2)", names)
        made: torch.Tensor = names["made"]
        return made

    assert in_a_worker(make).device == torch.device("cpu")


def test_a_shuffled_loader_and_an_optimizer_work() -> None:
    def use() -> list[int]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert optimizer.state[model.weight]["step"].device == torch.device("cpu")
        return sorted(RandomSampler(range(5), generator=torch.Generator().manual_seed(1)))

    assert in_a_worker(use) == [0, 1, 2, 3, 4]


def test_it_needs_no_gradient_where_none_is_asked_for() -> None:
    def make() -> tuple[bool, bool, bool]:
        leaf = torch.rand(2, requires_grad=True)
        return torch.rand(2).requires_grad, leaf.requires_grad, leaf.is_leaf

    assert in_a_worker(make) == (False, True, True)


def test_functions_of_a_test_are_sent_with_what_they_refer_to() -> None:
    number, text = 3, ["a"]

    def inner(more: int, *, factor: int = 2) -> Any:
        return number + factor * more, text, META

    loaded = pickle.loads(_dump((inner, lambda: inner(1)), _CodePickler))
    assert loaded[0](5, factor=1) == (8, ["a"], META)
    assert loaded[1]() == (5, ["a"], META)


def test_what_is_not_for_nccl_ranks_exists() -> None:
    """A test that was renamed would run over them again."""
    texts = {path.stem: path.read_text() for path in TESTS.rglob("test_*.py")}
    missing = [
        name
        for name, (file, _, test) in ((name, name.partition("::")) for name in CPU_RANKS)
        if file not in texts or (f"def {test}(" not in texts[file] and test)
    ]
    assert missing == []
