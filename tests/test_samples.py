"""The samples of the pages on reductions and communicators keep what the pages promise.

Ranks are threads: those of the reduction speak through memory, those of the communicator through files, as processes
would.
"""

import importlib.util
import io
from collections.abc import Callable
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
        assert ranks[0]["layouts"][wrapper - 1] > 2, "buckets were not laid out anew, so this shows nothing"
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

sizes = pytest.mark.parametrize("world_size", [1, 2, 3])
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)


def over_files(
    folder: Path, world_size: int, function: Callable[[BaseCommunicator], Any], timeout: float = 30.0
) -> list[Any]:
    return run_ranks(
        lambda: function(FolderCommunicator(folder, choose_communicator().rank, world_size, timeout)), world_size
    )


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small whole numbers, so that sums are exact in every dtype; now this rank has the largest, now that one."""
    return ((torch.arange(torch.Size(shape).numel()) * (rank + 2)) % 7 + rank).to(dtype).view(shape)


def reduced(values: list[Tensor], op: str) -> Tensor:
    stacked = torch.stack(values)
    return stacked.amax(0) if op == "max" else stacked.sum(0) / (len(values) if op == "average" else 1)


@sizes
@dtypes
@pytest.mark.parametrize("op", ["sum", "average", "max"])
@pytest.mark.parametrize("shape", [(), (0,), (5, 3)], ids=str)
def test_all_reduce(world_size: int, dtype: torch.dtype, op: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    if op == "average" and not dtype.is_floating_point:
        return  # whole numbers have no average

    def reduce(wire: BaseCommunicator) -> tuple[Tensor, Tensor]:
        tensor = numbers(wire.rank, *shape, dtype=dtype)
        strided = torch.zeros(*shape, 2, dtype=dtype)[..., 0]
        strided.copy_(tensor)
        wire.all_reduce(tensor, op).wait()
        wire.all_reduce(strided, op).wait()
        return tensor, strided

    results = over_files(tmp_path, world_size, reduce)
    expected = reduced([numbers(rank, *shape, dtype=dtype) for rank in range(world_size)], op)
    for tensor, strided in results:
        torch.testing.assert_close(tensor, expected.to(dtype))
        assert torch.equal(tensor, results[0][0])
        assert torch.equal(strided, tensor)


@sizes
@dtypes
def test_broadcast(world_size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    def broadcast(wire: BaseCommunicator) -> list[Tensor]:
        tensors = [numbers(wire.rank, 4, 2, dtype=dtype) for _ in range(world_size)]
        handles = [wire.broadcast(tensor, source) for source, tensor in enumerate(tensors)]
        for handle in reversed(handles):
            handle.wait()
        return tensors

    for tensors in over_files(tmp_path, world_size, broadcast):
        for source, tensor in enumerate(tensors):
            assert torch.equal(tensor, numbers(source, 4, 2, dtype=dtype))


@sizes
@dtypes
@pytest.mark.parametrize("counts", [None, [0, 5, 2], [0, 0, 0]], ids=str)
def test_all_gather(world_size: int, dtype: torch.dtype, counts: list[int] | None, tmp_path: Path) -> None:
    shares = counts[:world_size] if counts else [4] * world_size

    def gather(wire: BaseCommunicator) -> Tensor:
        output = torch.zeros(sum(shares), dtype=dtype)
        sent = numbers(wire.rank, shares[wire.rank], dtype=dtype)
        wire.all_gather(output, sent, shares if counts else None).wait()
        return output

    expected = torch.cat([numbers(rank, share, dtype=dtype) for rank, share in enumerate(shares)])
    for output in over_files(tmp_path, world_size, gather):
        assert torch.equal(output, expected)


@sizes
@pytest.mark.parametrize("op", ["sum", "average", "max"])
@pytest.mark.parametrize("counts", [None, [0, 5, 2], [0, 0, 0]], ids=str)
def test_reduce_scatter(world_size: int, op: Any, counts: list[int] | None, tmp_path: Path) -> None:
    shares = counts[:world_size] if counts else [4] * world_size

    def scatter(wire: BaseCommunicator) -> Tensor:
        output = torch.zeros(shares[wire.rank], dtype=torch.float64)
        wire.reduce_scatter(output, numbers(wire.rank, sum(shares)), op, shares if counts else None).wait()
        return output

    expected = reduced([numbers(rank, sum(shares)) for rank in range(world_size)], op).split(shares)
    for rank, output in enumerate(over_files(tmp_path, world_size, scatter)):
        torch.testing.assert_close(output, expected[rank])


@sizes
@dtypes
@pytest.mark.parametrize("even", [True, False])
def test_all_to_all(world_size: int, dtype: torch.dtype, even: bool, tmp_path: Path) -> None:
    """Uneven: rank 0 sends rank 1 one element and rank 2 two of them, and nobody itself anything but rank 1."""
    counts = [[3, 3, 3]] * 3 if even else [[0, 1, 2], [3, 2, 0], [0, 4, 0]]
    counts = [row[:world_size] for row in counts[:world_size]]

    def exchange(wire: BaseCommunicator) -> Tensor:
        leaving, arriving = counts[wire.rank], [row[wire.rank] for row in counts]
        output = torch.zeros(sum(arriving), dtype=dtype)
        tensor = numbers(wire.rank, sum(leaving), dtype=dtype)
        wire.all_to_all(output, tensor, *(() if even else (arriving, leaving))).wait()
        return output

    sent = [numbers(rank, sum(row), dtype=dtype).split(row) for rank, row in enumerate(counts)]
    for rank, output in enumerate(over_files(tmp_path, world_size, exchange)):
        assert torch.equal(output, torch.cat([parts[rank] for parts in sent]))


@sizes
def test_stages_keep_the_order_of_all_ranks(world_size: int, tmp_path: Path) -> None:
    def chain(wire: BaseCommunicator) -> list[Tensor]:
        total, other = numbers(wire.rank, 3), numbers(wire.rank, 2)
        everyones = torch.zeros(world_size, dtype=torch.float64)
        whole = wire.all_reduce(total).then(lambda: wire.all_gather(everyones, total[:1] * wire.rank))
        after = wire.all_reduce(other, "max")
        after.wait()
        whole.wait()
        return [total, everyones, other]

    total = reduced([numbers(rank, 3) for rank in range(world_size)], "sum")
    other = reduced([numbers(rank, 2) for rank in range(world_size)], "max")
    for result in over_files(tmp_path, world_size, chain):
        for each, expected in zip(result, [total, total[:1] * torch.arange(world_size), other], strict=True):
            assert torch.equal(each, expected)


def test_only_the_files_of_the_last_collective_are_left(tmp_path: Path) -> None:
    def use(wire: BaseCommunicator) -> None:
        for _ in range(5):
            wire.reduce_scatter(torch.zeros(2), torch.zeros(6)).wait()
            wire.all_reduce(torch.zeros(3)).wait()

    over_files(tmp_path, 3, use)
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


def small_model() -> nn.Sequential:
    layers = [nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)]
    for number, parameter in enumerate(nn.Sequential(*layers).parameters()):
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    return nn.Sequential(*layers).double()


@sizes
def test_a_model_trained_over_it_equals_average_gradients(world_size: int, tmp_path: Path) -> None:
    def train(wire: BaseCommunicator) -> float:
        model, reference = small_model(), small_model()
        wrapped = gradsync.DistributedDataParallel(model, communicator=wire, bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD([*wrapped.parameters(), *reference.parameters()], lr=0.1)
        generator = torch.Generator().manual_seed(wire.rank)
        for _ in range(6):
            inputs = torch.randn(8, 6, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            for each in (wrapped, reference):
                (each(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            gradsync.average_gradients(reference)  # through memory, by the ambient communicator
            optimizer.step()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        return max(((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs)

    assert max(over_files(tmp_path, world_size, train)) <= 1e-12
