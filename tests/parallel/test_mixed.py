"""Low precision on the wire (``Cast``) and in the computation (``mixed_precision``); parameters stay what they are."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel.distributed import _MixedPrecision

from gradsync import DistributedDataParallel
from gradsync.reduction import Cast
from tests.parallel.training import assert_same_bits, filled, rank_here, values
from tests.ranks import RankPool

BF16 = torch.bfloat16


class Model(nn.Module):
    """Autograd saves ``gain`` and ``last`` themselves, of the first weight only a view. Notes the dtypes it runs in."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.gain = nn.Parameter(torch.empty(8))
        self.last = nn.Parameter(torch.empty(8, 3))
        filled(self).to(dtype)
        self.seen: list[dict[str, torch.dtype]] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs)))
        output = (hidden * self.gain.to(hidden.dtype)) @ self.last
        tensors = {"inputs": inputs, "output": output, **dict(self.named_parameters())}
        self.seen.append({name: tensor.dtype for name, tensor in tensors.items()})
        return output


def loss_of(model: nn.Module, rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs, targets = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
    return mse_loss(model(inputs.to(dtype)).float(), targets)


def dtypes(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters()}


def seen_in(model: Model) -> set[torch.dtype]:
    return {dtype for forward in model.seen for dtype in forward.values()}


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient.detach().clone() for gradient in found if gradient is not None]


def by_hand(rank: int, steps: Sequence[int] = (0,), dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """One rank's gradients: every micro-batch computed in ``dtype``, added up in float32."""
    total = [torch.zeros_like(value) for value in values(Model())]
    for step in steps:
        model = Model(dtype)
        loss_of(model, rank, step, dtype).backward()
        for sum_of_steps, gradient in zip(total, gradients(model), strict=True):
            sum_of_steps += gradient
    return total


def mean(*of_ranks: list[torch.Tensor], communicator: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Their mean, halved and added up in ``communicator``."""
    return [sum((one / 2).to(communicator) for one in pair).float() for pair in zip(*of_ranks, strict=True)]  # type: ignore[union-attr]


def assert_close(found: Any, expected: Any, rtol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol / 10)


# -- on the wire ------------------------------------------------------------------------------------------------------


def cast_gradients(kwargs: dict[str, Any]) -> list[torch.Tensor]:
    wrapper = DistributedDataParallel(Model(), **kwargs)
    loss_of(wrapper, rank_here()).backward()
    return gradients(wrapper)


@pytest.mark.parametrize(
    "kwargs",
    [{"reduction": Cast(BF16)}, {"mixed_precision": _MixedPrecision(reduce_dtype=BF16)}],
    ids=["reduction", "reduce_dtype"],
)
def test_gradients_are_halved_and_added_in_the_dtype_of_the_communicator(
    pair: RankPool, kwargs: dict[str, Any]
) -> None:
    expected = mean(by_hand(0), by_hand(1), communicator=BF16)
    assert_same_bits([expected, *pair.run(cast_gradients, kwargs)])


def train_cast(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    wrapper = DistributedDataParallel(Model(), reduction=Cast(dtype), bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(wrapper, rank_here(), step).backward()
        optimizer.step()
    return values(wrapper), gradients(wrapper)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float64], ids=str)
def test_ranks_that_reduce_in_another_dtype_hold_the_same_bits(process_ranks: RankPool, dtype: torch.dtype) -> None:
    results = process_ranks.run(train_cast, dtype)
    assert_same_bits(results)
    assert {gradient.dtype for gradient in results[0][1]} == {torch.float32}
    plain = Model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        for rank in range(process_ranks.world_size):
            (loss_of(plain, rank, step) / process_ranks.world_size).backward()
        optimizer.step()
    assert_close(results[0][0], values(plain), rtol={BF16: 0.1, torch.float16: 0.01, torch.float64: 1e-5}[dtype])


# -- in the computation -----------------------------------------------------------------------------------------------


def mixed_training(config: Any) -> dict[str, Any]:
    model = Model()
    wrapper = DistributedDataParallel(model, mixed_precision=config)
    before, after_backward = values(wrapper), []
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.0)
    for step in (1, 2, 0):
        optimizer.zero_grad()
        loss_of(wrapper, rank_here(), step).backward()
        after_backward.append(dtypes(wrapper))
        optimizer.step()
    assert_same_bits([before, values(wrapper)])
    state = {value.dtype for value in wrapper.state_dict().values()}
    return {"seen": seen_in(model), "after": after_backward, "state": state, "gradients": gradients(wrapper)}


@pytest.mark.parametrize(
    ("config", "communicator"),
    [
        (_MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32, buffer_dtype=torch.float32), torch.float32),
        (_MixedPrecision(param_dtype=BF16), BF16),
        (_MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16), BF16),
    ],
    ids=["reduce-float32", "reduce-as-computed", "all-bfloat16"],
)
def test_the_model_computes_in_bfloat16_and_keeps_float32(
    pair: RankPool, config: Any, communicator: torch.dtype
) -> None:
    results = pair.run(mixed_training, config)
    expected = mean(by_hand(0, dtype=BF16), by_hand(1, dtype=BF16), communicator=communicator)
    for result in results:
        assert result["seen"] == {BF16}
        assert result["after"] == [{torch.float32}] * 3
        assert result["state"] == {torch.float32}
        assert_close(result["gradients"], expected)
        assert_close(result["gradients"], mean(by_hand(0), by_hand(1)), rtol=0.1)  # the float32 ones
    assert_same_bits([result["gradients"] for result in results])


def mixed_wrapper(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, mixed_precision=_MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32))


def accumulate() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    wrapper = mixed_wrapper(Model())
    with wrapper.no_sync():
        for step in range(3):
            loss_of(wrapper, rank_here(), step).backward()
            assert dtypes(wrapper) == {torch.float32}
        local = gradients(wrapper)
    loss_of(wrapper, rank_here(), 3).backward()
    return local, gradients(wrapper)


def test_micro_batches_are_added_up_in_float32(pair: RankPool) -> None:
    expected = mean(by_hand(0, range(4), BF16), by_hand(1, range(4), BF16))
    for rank, (local, synchronized) in enumerate(pair.run(accumulate)):
        assert_close(local, by_hand(rank, range(3), BF16))
        assert_close(synchronized, expected)


def evaluate_between() -> list[torch.Tensor]:
    model = Model()
    wrapper = mixed_wrapper(model)
    before = values(wrapper)
    loss = loss_of(wrapper, rank_here())
    with torch.no_grad():
        loss_of(wrapper, rank_here(), 1)
    loss.backward()
    assert seen_in(model) == {BF16}
    assert_same_bits([before, values(wrapper)])
    return gradients(wrapper)


def test_an_evaluation_between_a_forward_and_its_backward_does_no_harm(pair: RankPool) -> None:
    expected = mean(by_hand(0, dtype=BF16), by_hand(1, dtype=BF16))
    for found in pair.run(evaluate_between):
        assert_close(found, expected)


def two_forwards(one_backward: bool) -> list[torch.Tensor]:
    wrapper = mixed_wrapper(Model())
    first, second = loss_of(wrapper, rank_here(), 0), loss_of(wrapper, rank_here(), 1)
    if one_backward:
        (first + second).backward()
    else:
        with wrapper.no_sync():
            first.backward()
        second.backward()
    assert dtypes(wrapper) == {torch.float32}
    return gradients(wrapper)


@pytest.mark.parametrize("one_backward", [True, False], ids=["one-backward", "two-backwards"])
def test_two_forwards_may_come_before_their_backward(pair: RankPool, one_backward: bool) -> None:
    expected = mean(by_hand(0, [0, 1], BF16), by_hand(1, [0, 1], BF16))
    for found in pair.run(two_forwards, one_backward):
        # In one backward autograd adds the two in bfloat16.
        assert_close(found, expected, rtol=0.05 if one_backward else 1e-6)


def cast_buffers() -> tuple[dict[str, torch.dtype], set[torch.dtype]]:
    model = Model(norm=True)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["norm.running_var"])
    config = _MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32, buffer_dtype=BF16)
    wrapper = DistributedDataParallel(model, mixed_precision=config)
    return {name: buffer.dtype for name, buffer in model.named_buffers()}, dtypes(wrapper)


def test_buffers_are_cast_once_unless_they_are_ignored(pair: RankPool) -> None:
    for found, parameters in pair.run(cast_buffers):
        assert found == {
            "norm.running_mean": BF16,
            "norm.running_var": torch.float32,
            "norm.num_batches_tracked": torch.int64,
        }
        assert parameters == {torch.float32}


def ignore_a_parameter() -> tuple[dict[str, torch.dtype], set[torch.dtype], dict[str, bool]]:
    model = Model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["gain"])
    model.first.bias.requires_grad_(False)
    wrapper = mixed_wrapper(model)
    loss_of(wrapper, rank_here()).backward()
    return model.seen[0], dtypes(wrapper), {name: p.grad is not None for name, p in model.named_parameters()}


def test_ignored_parameters_stay_in_float32_and_frozen_ones_are_cast(pair: RankPool) -> None:
    for during, after, has_gradient in pair.run(ignore_a_parameter):
        assert [name for name, dtype in during.items() if dtype != BF16] == ["gain"]
        assert after == {torch.float32}
        assert has_gradient == {"gain": True, "last": True, "first.weight": True, "first.bias": False}
