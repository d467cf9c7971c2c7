"""The samples of the pages on reductions and communicators keep what the pages promise.

Ranks are threads: those of the reduction speak through memory, those of the communicator through files, as processes
would.
"""

import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync.communicator import BaseCommunicator, choose_communicator
from gradsync.testing import run_ranks

pytestmark = pytest.mark.timeout(60)

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> Any:
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


TopK = load("stateful_reduction").TopK
FolderCommunicator = load("own_communicator").FolderCommunicator


@pytest.mark.parametrize("name", ["stateful_reduction", "own_communicator"])
def test_a_sample_is_a_page(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 80


# -- the reduction ----------------------------------------------------------------------------------------------------

NAMES = ["a", "b", "c", "d"]
SHAPES = [(20, 10), (150,), (7,), (10, 2, 10)]
WINDOWS, SAVED = 16, 10  # in all; and after how many of them the state is saved, and another wrapper goes on with it


class Given(nn.Module):
    """Its parameters get the gradients that are passed, the last one first."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in zip(NAMES, SHAPES, strict=True):
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for name, gradient in gradients.items():
            loss = loss + (self.get_parameter(name) * gradient).sum()
        return loss


class Counted(TopK):  # type: ignore[misc]
    layouts = 0

    def rebuilt(self, layout: object) -> None:
        super().rebuilt(layout)
        self.layouts += 1


def gradients_of(window: int, rank: int) -> dict[str, Tensor]:
    """In an order that changes, and with parameters that a rank, or all of them, do not use."""
    generator = torch.Generator().manual_seed(2 * window + rank)
    values = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in SHAPES]
    gradients = dict(zip(NAMES, values, strict=True))
    names = NAMES[window // 2 % 4 :] + NAMES[: window // 2 % 4]
    unused = {"a" if rank == 1 and window % 3 == 1 else "", "b" if window % 5 == 4 else ""}
    unused |= {"d"} if frozen(window) else set()
    return {name: gradients[name] for name in names if name not in unused}


def frozen(window: int) -> bool:
    return 3 <= window < 6  # engines look at the order, and at what has ceased, after 2, 4, 8, … windows


def train_with_top_k() -> dict[str, Any]:
    rank = choose_communicator().rank
    sent, given = ({name: torch.zeros_like(value) for name, value in Given().named_parameters()} for _ in range(2))
    reduction, windows, layouts = Counted(), [], []
    for window in range(WINDOWS):
        if window in (0, SAVED):
            saved = io.BytesIO()
            torch.save(reduction.state_dict(), saved)
            saved.seek(0)
            reduction = Counted()
            reduction.load_state_dict(torch.load(saved))
            model = gradsync.DistributedDataParallel(Given(), reduction=reduction, bucket_cap_mb=0.002)
        model.zero_grad()
        model.module.d.requires_grad_(not frozen(window))
        gradients = gradients_of(window, rank)
        model(gradients).backward()
        for name, gradient in gradients.items():
            given[name] += gradient / 2
        means = {name: each.grad for name, each in model.module.named_parameters() if each.grad is not None}
        for name, mean in means.items():
            sent[name] += mean
        windows.append({name: mean.clone() for name, mean in means.items()})
        layouts.append(reduction.layouts)
    return {"sent": sent, "given": given, "kept": reduction.residuals, "windows": windows, "layouts": layouts}


def test_what_was_sent_and_what_is_kept_is_the_sum_of_all_gradients() -> None:
    ranks = run_ranks(train_with_top_k, 2)
    for wrapper in (SAVED, WINDOWS):
        assert ranks[0]["layouts"][wrapper - 1] > 2, "buckets were not laid out again, so this shows nothing"
    for name in NAMES:
        zero = torch.zeros_like(ranks[0]["sent"][name])
        kept = sum((each["kept"].get(name, zero) for each in ranks), zero)
        given = ranks[0]["given"][name] + ranks[1]["given"][name]
        assert bool(kept.any()) == (name != "c"), "what is very small is sent whole, of all else a part is kept"
        difference = (ranks[0]["sent"][name] + kept - given).abs().max()
        assert difference <= 1e-12 * given.abs().max(), name


def test_gradients_are_the_same_bits_on_all_ranks() -> None:
    first, second = (each["windows"] for each in run_ranks(train_with_top_k, 2))
    for window, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        assert ours.keys() == theirs.keys()
        assert ("b" in ours) == (window % 5 != 4), "a parameter that no rank uses has no gradient"
        for name, mean in ours.items():
            assert torch.equal(mean, theirs[name]), (window, name)
            if (window, name) == (6, "d"):
                # Trained again: in its first window it has no place in a bucket yet, and is averaged beside them.
                continue
            # A tenth of each rank, and nothing else; those of seven elements are sent whole.
            assert name == "c" or 0 < mean.count_nonzero() <= 2 * (mean.numel() // 10), (window, name)


def test_settings_are_compared_over_ranks() -> None:
    def wrap() -> None:
        gradsync.DistributedDataParallel(Given(), reduction=TopK(0.1 * (1 + choose_communicator().rank)))

    with pytest.raises(gradsync.MismatchError, match=r"TopK\(share=0\.2\)"):
        run_ranks(wrap, 2)


# -- the communicator -------------------------------------------------------------------------------------------------


def test_only_the_files_of_the_last_collective_are_left(tmp_path: Path) -> None:
    def use() -> None:
        wire: BaseCommunicator = FolderCommunicator(tmp_path, choose_communicator().rank, 3)
        for _ in range(5):
            wire.reduce_scatter(torch.zeros(2), torch.zeros(6)).wait()
            wire.all_reduce(torch.zeros(3)).wait()

    run_ranks(use, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10-0-0", "10-1-0", "10-2-0"]


def test_who_does_not_come_is_named_and_the_next_use_is_refused(tmp_path: Path) -> None:
    def use(rank: int) -> BaseCommunicator:
        wire: BaseCommunicator = FolderCommunicator(tmp_path, rank, 3, timeout=0.2)
        with pytest.raises(
            gradsync.PeerFailedError, match=rf"rank {rank} misses ranks \[2\] in collective 1.*max of 4"
        ):
            wire.all_reduce(torch.zeros(4), "max").wait()
        return wire

    for rank, wire in enumerate(run_ranks(lambda: use(choose_communicator().rank), 2)):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(gradsync.PeerFailedError, match=rf"rank {rank} misses ranks \[2\] in collective 1"):
            wire.broadcast(torch.zeros(1), 0)
        assert isinstance(wire.failure, gradsync.PeerFailedError)
        assert sorted(tmp_path.iterdir()) == before, "something was sent"
