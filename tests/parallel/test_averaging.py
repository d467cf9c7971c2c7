"""`average_gradients`: the reference the engine is compared with, so it is compared with sums done by hand."""

import inspect
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.communicator import choose_communicator
from tests.ranks import RankError, RankPool, Ranks

pytestmark = pytest.mark.timeout(120)


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Another tensor on every rank, the same one for the same rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def parameter(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


class Bag(nn.Module):
    """Parameters by name and nothing else."""

    def __init__(self, **parameters: nn.Parameter) -> None:
        super().__init__()
        for name, each in parameters.items():
            self.register_parameter(name, each)


def average(make: Callable[[int], nn.Module | list[nn.Parameter]]) -> list[torch.Tensor | None]:
    """The gradients of what `make(rank)` made, after averaging."""
    made = make(choose_communicator().rank)
    # An iterator is as good as a list.
    gradsync.average_gradients(made if isinstance(made, nn.Module) else iter(made))
    parameters: Iterable[nn.Parameter] = made.parameters() if isinstance(made, nn.Module) else made
    return [each.grad for each in parameters]


def assert_mean(
    results: list[torch.Tensor | None], contributions: list[torch.Tensor], tolerance: float = 1e-12
) -> None:
    """All ranks hold the same bits, the mean of the contributions, in their dtype."""
    expected = torch.stack([each.to_dense() for each in contributions]).sum(0) / len(contributions)
    for result in results:
        assert result is not None
        assert result.dtype == contributions[0].dtype
        assert torch.equal(result.to_dense(), results[0].to_dense())
        error = (result.to_dense() - expected).abs().max()
        assert error <= tolerance * expected.abs().max()


# -- what is averaged -------------------------------------------------------------------------------------------------


def with_gradient(rank: int, dtype: torch.dtype) -> nn.Module:
    module = Bag(weight=parameter(4, 3, dtype=dtype))
    module.weight.grad = values(rank, 4, 3, dtype=dtype)
    return module


def float64_gradient(rank: int) -> nn.Module:
    return with_gradient(rank, torch.float64)


def complex_gradient(rank: int) -> nn.Module:
    return with_gradient(rank, torch.complex128)


@pytest.mark.parametrize("make", [float64_gradient, complex_gradient])
def test_a_dense_gradient_becomes_the_mean(ranks: Ranks, make: Callable[[int], Bag]) -> None:
    results = [gradients[0] for gradients in ranks.run(average, make)]
    assert_mean(results, [make(rank).weight.grad for rank in range(ranks.world_size)])


def parameters_of_many_kinds(rank: int) -> list[nn.Parameter]:
    """In an order in which dtypes and shapes alternate."""
    dtypes = (torch.float64, torch.float32, torch.float64, torch.complex64, torch.bfloat16, torch.float32)
    parameters = [parameter(size, 2, dtype=dtype) for size, dtype in enumerate(dtypes)]
    for each in parameters:
        each.grad = values(rank, *each.shape, dtype=each.dtype)
    return parameters


def test_dtypes_may_be_mixed_and_parameters_come_as_an_iterable(ranks: Ranks) -> None:
    results = ranks.run(average, parameters_of_many_kinds)
    made = [parameters_of_many_kinds(rank) for rank in range(ranks.world_size)]
    assert results[0][0].shape == (0, 2)
    for number in range(1, 6):
        contributions = [parameters[number].grad for parameters in made]
        # At most a rounding for the division and one for every sum.
        tolerance = (ranks.world_size + 1) * torch.finfo(contributions[0].dtype).eps
        assert_mean([gradients[number] for gradients in results], contributions, tolerance)


def partly_none(rank: int) -> Bag:
    """One has a gradient on all ranks, one on the last rank only, one nowhere."""
    module = Bag(everywhere=parameter(2), somewhere=parameter(3), nowhere=parameter(4))
    module.everywhere.grad = values(rank, 2)
    if rank == choose_communicator().world_size - 1:
        module.somewhere.grad = values(rank, 3)
    return module


def test_none_on_some_ranks_counts_as_zeros_and_none_on_all_stays_none(ranks: Ranks) -> None:
    """As contract point 5 demands of the engine."""
    results = ranks.run(average, partly_none)
    last = ranks.world_size - 1
    assert_mean([gradients[0] for gradients in results], [values(rank, 2) for rank in range(ranks.world_size)])
    zeros = [torch.zeros(3, dtype=torch.float64)] * last
    assert_mean([gradients[1] for gradients in results], [*zeros, values(last, 3)])
    assert [gradients[2] for gradients in results] == [None] * ranks.world_size


def channels_last(rank: int) -> list[nn.Parameter]:
    each = nn.Parameter(torch.zeros(2, 3, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last))
    # Ranks may hold the same gradient in different memory formats.
    each.grad = values(rank, 2, 3, 4, 5)
    if rank == 0:
        each.grad = each.grad.to(memory_format=torch.channels_last)
    return [each]


def test_memory_formats_do_not_matter(ranks: Ranks) -> None:
    results = [gradients[0] for gradients in ranks.run(average, channels_last)]
    assert_mean(results, [values(rank, 2, 3, 4, 5) for rank in range(ranks.world_size)])


def keep_identity() -> tuple[bool, bool]:
    each = parameter(3)
    each.grad = before = values(choose_communicator().rank, 3)
    gradsync.average_gradients([each])
    return each.grad is before, before.requires_grad


def test_gradients_are_averaged_in_place(ranks: Ranks) -> None:
    assert ranks.run(keep_identity) == [(True, False)] * ranks.world_size


# -- sparse gradients -----------------------------------------------------------------------------------------------


def sparse_embedding(rank: int) -> nn.Module:
    """Rows 1 and 2 on every rank, a row of its own on each, and row 1 twice."""
    module = nn.Embedding(8, 3, sparse=True, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(values(99, 8, 3))
    (module(torch.tensor([1, 2, 1, 3 + rank])) * values(rank, 4, 3)).sum().backward()
    return module


def no_rows(rank: int) -> nn.Module:
    """An empty batch on every rank."""
    module = nn.Embedding(8, 3, sparse=True, dtype=torch.float64)
    module(torch.zeros(0, dtype=torch.int64)).sum().backward()
    return module


def sparse_on_rank_0_only(rank: int) -> nn.Module:
    module = sparse_embedding(rank)
    if rank > 0:
        module.weight.grad = None
    return module


def sparse_here_dense_there(rank: int) -> nn.Module:
    """As where a tied weight is used as a matrix on some ranks."""
    module = sparse_embedding(rank)
    if rank == 0:
        module.weight.grad = module.weight.grad.to_dense()
    return module


def contribution(module: nn.Module) -> torch.Tensor:
    gradient = module.weight.grad
    return torch.zeros_like(module.weight).detach() if gradient is None else gradient.to_dense()


# Of torch before 2.12, where a sparse tensor is unpickled.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("make", [sparse_embedding, no_rows, sparse_on_rank_0_only])
def test_sparse_gradients_stay_sparse(ranks: Ranks, make: Callable[[int], nn.Module]) -> None:
    results = [gradients[0] for gradients in ranks.run(average, make)]
    assert all(gradient.is_sparse for gradient in results)
    assert_mean(results, [contribution(make(rank)) for rank in range(ranks.world_size)])


def test_a_gradient_that_is_dense_somewhere_becomes_dense_everywhere(ranks: Ranks) -> None:
    results = [gradients[0] for gradients in ranks.run(average, sparse_here_dense_there)]
    assert not any(gradient.is_sparse for gradient in results)
    assert_mean(results, [contribution(sparse_embedding(rank)) for rank in range(ranks.world_size)])


# -- what is refused ------------------------------------------------------------------------------------------------


def mismatched(what: str) -> tuple[str, bool]:
    """The last rank differs. The error's text, and whether all gradients are as before."""
    communicator = choose_communicator()
    odd = communicator.rank == communicator.world_size - 1
    module = Bag(
        same=parameter(2),
        weight=parameter(*((3, 2) if odd and what == "shape" else (2, 3))),
        **({} if odd and what == "missing" else {"bias": parameter(2)}),
    )
    if odd and what == "dtype":
        module.float()
    for each in module.parameters():
        each.grad = values(communicator.rank, *each.shape, dtype=each.dtype)
    with pytest.raises(gradsync.MismatchError) as raised:
        gradsync.average_gradients(module)
    untouched = [torch.equal(p.grad, values(communicator.rank, *p.shape, dtype=p.dtype)) for p in module.parameters()]
    return str(raised.value), all(untouched)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("shape", ["weight", "[2, 3]", "[3, 2]"]),
        ("dtype", ["same", "torch.float64", "torch.float32"]),
        ("missing", ["bias"]),
    ],
)
def test_a_mismatch_is_refused_by_all_ranks_and_named(ranks: Ranks, what: str, named: list[str]) -> None:
    """Nothing is hung, nothing is half averaged; the message has the parameter, both values and both ranks."""
    if ranks.world_size == 1:
        pytest.skip("one rank agrees with itself")
    for message, untouched in ranks.run(mismatched, what):
        assert untouched
        for word in [*named, "0", str(ranks.world_size - 1)]:
            assert word in message


def test_one_tensor_and_named_parameters_are_refused_with_the_remedy() -> None:
    with pytest.raises(gradsync.ConfigurationError, match=r"Pass \[parameter\]"):
        gradsync.average_gradients(parameter(2))
    with pytest.raises(gradsync.ConfigurationError, match=r"Pass model\.parameters\(\)"):
        gradsync.average_gradients(nn.Linear(1, 1).named_parameters())


# -- groups -----------------------------------------------------------------------------------------------------------


def average_in_halves() -> list[torch.Tensor | None]:
    """Even and odd ranks by themselves, then the even ones only."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group(list(range(start, world_size, 2))) for start in (0, 1)]
    each = parameter(3)
    gradients = []
    for group in (halves[rank % 2], halves[0] if rank % 2 == 0 else None):
        each.grad = values(rank, 3)
        if group is not None:
            gradsync.average_gradients([each], group)
        gradients.append(each.grad)
    return gradients


def test_a_group_is_averaged_by_itself(process_ranks: RankPool) -> None:
    results = process_ranks.run(average_in_halves)
    for start in (0, 1):
        half = range(start, process_ranks.world_size, 2)
        assert_mean([results[rank][0] for rank in half], [values(rank, 3) for rank in half])
    for rank, (_, second) in enumerate(results):
        expected = results[rank][0] if rank % 2 == 0 else values(rank, 3)
        assert torch.equal(second, expected)


def average_where_rank_0_alone_is_a_member() -> None:
    alone = dist.new_group([0])
    gradsync.average_gradients([parameter(3)], alone)


def test_a_group_without_this_rank_is_refused(process_ranks: RankPool) -> None:
    answers = process_ranks.run(average_where_rank_0_alone_is_a_member, expect_errors=True)
    assert answers[0] is None
    for rank, answer in enumerate(answers[1:], 1):
        assert isinstance(answer, RankError)
        assert isinstance(answer.exception, gradsync.ConfigurationError)
        assert f"rank {rank}" in answer.message


def test_the_signature_is_the_documented_one() -> None:
    assert list(inspect.signature(gradsync.average_gradients).parameters) == ["model_or_parameters", "group"]
