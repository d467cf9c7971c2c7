"""Forward hooks that say which parameters are about to be used: early enough for all, late for most."""

from typing import Any

import pytest
import torch
from torch import nn

from gradsync.parallel.parameter_use import ParameterUse


class Branches(nn.Module):
    """Uses a child's weight without calling the child, and one of two children by what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.first = nn.Linear(4, 4)
        self.borrowed = nn.Linear(4, 4)
        self.rarely = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor, rarely: bool = False) -> torch.Tensor:
        x = self.first(x * self.scale)
        x = nn.functional.linear(x, self.borrowed.weight, self.borrowed.bias)
        return self.last(self.rarely(x) if rarely else x)


class Late:
    """Values that are only there once somebody has asked for them; NaN before."""

    def __init__(self, module: nn.Module) -> None:
        self.values = {parameter: parameter.detach().clone() for parameter in module.parameters()}
        self.asked: list[list[nn.Parameter]] = []
        self.take_away()

    def take_away(self) -> None:
        self.asked = []
        for parameter in self.values:
            parameter.data.fill_(float("nan"))

    def bring(self, parameters: Any) -> None:
        self.asked.append(list(parameters))
        for parameter in parameters:
            parameter.data.copy_(self.values[parameter])


def outputs(module: nn.Module, calls: list[dict[str, Any]], *args: torch.Tensor) -> tuple[list[torch.Tensor], Late]:
    expected = [module(*args, **call) for call in calls]
    late = Late(module)
    use = ParameterUse(module, late.bring)
    for call, right in zip(calls, expected, strict=True):
        late.take_away()
        result = module(*args, **call)
        for one, other in zip(_flat(result), _flat(right), strict=True):
            assert torch.equal(one, other)
    use.remove()
    return expected, late


def _flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def test_values_are_there_in_time_on_every_way_through() -> None:
    calls: list[dict[str, Any]] = [{}, {"rarely": True}, {}, {"rarely": True}]
    outputs(Branches(), calls, torch.randn(2, 4))


def test_the_first_forward_may_take_the_rare_way() -> None:
    outputs(Branches(), [{"rarely": True}, {}, {"rarely": True}], torch.randn(2, 4))


def test_attention_uses_a_child_that_it_does_not_call() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 3, 8)
    _, late = outputs(attention, [{}, {}], x, x, x)
    assert len(late.asked) == 1


def test_parameters_are_asked_for_one_module_after_the_other() -> None:
    """From the second forward on nobody waits for the last layer before the first one runs."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    _, late = outputs(model, [{}, {}], torch.randn(2, 4))
    assert late.asked == [list(layer.parameters()) for layer in model]


def test_a_forward_that_fails_or_begins_inside_teaches_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    late = Late(model)
    use = ParameterUse(model, late.bring)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(2, 3))
    late.take_away()
    assert model[1](torch.randn(2, 4)).isfinite().all()
    for _ in range(2):
        late.take_away()
        assert model(torch.randn(2, 4)).isfinite().all()
    assert late.asked == [list(layer.parameters()) for layer in model]
    use.remove()


def test_nothing_is_left_when_the_hooks_are_removed() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    late = Late(model)
    ParameterUse(model, late.bring).remove()
    assert model(torch.randn(2, 4)).isnan().all()
    assert late.asked == []
