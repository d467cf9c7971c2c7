"""Error feedback over long runs: what was sent, what is held back and what was forgotten are what was computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradsync.communicator import choose_communicator
from gradsync.core.bucket import ParameterSpec
from gradsync.optim.local_steps.tensor_exchange import TensorExchange
from gradsync.reduction import ErrorFeedback, Quantize, TopK
from gradsync.testing import run_ranks
from tests.core.test_compression import SHAPES, draw

pytestmark = pytest.mark.timeout(120)

WINDOWS = 200
EXACT = 1e-9
KEYS = ("applied", "mine", "forgotten")
MAKERS: dict[str, Callable[..., ErrorFeedback]] = {
    "2 bits": lambda **settings: ErrorFeedback(Quantize(2), **settings),
    "top k in 2 bits": lambda **settings: ErrorFeedback(TopK(0.05, Quantize(2)), **settings),
    "top k in 4 bits": lambda **settings: ErrorFeedback(TopK(0.05, Quantize(4)), **settings),
}


def train(kind: str, windows: range, states: list[dict[str, Any]] | None, decay: float) -> dict[str, Any]:
    """Windows of one rank: what was applied, and by parameter what this rank computed, holds back and has forgotten.

    The buckets change every 30 windows. Every 50 the run is resumed from its state, in a new object.
    """
    communicator = choose_communicator()
    reduction = MAKERS[kind](decay=decay)
    if states is not None:
        reduction.load_state_dict(states[communicator.rank])
    names = list(SHAPES)
    parameters = [nn.Parameter(torch.zeros(SHAPES[name]).double()) for name in names]
    specs = [ParameterSpec.of(name, each) for name, each in zip(names, parameters, strict=True)]
    sums = {name: {key: torch.zeros(SHAPES[name]).double() for key in KEYS} for name in names}
    exchange = None
    for window in windows:
        if window % 50 == 49:
            state, reduction = reduction.state_dict(), MAKERS[kind](decay=decay)
            reduction.load_state_dict(state)
        if exchange is None or window % 50 == 49 or window % 30 == 29:
            cut = window // 30 % 4
            runs = [range(cut), range(cut, len(names))] if cut else [range(len(names))]
            exchange = TensorExchange(parameters, specs, runs, reduction, communicator)
        for name, residual in reduction.state_dict()["residuals"].items():
            sums[name]["forgotten"] += (1.0 - decay) * residual
        gradients = draw(window, communicator.rank, dtype=torch.float64)
        fragments = range(len(exchange.runs))
        exchange.start(fragments, [gradients[name] for name in names], None)
        exchange.wait()
        for index, applied in exchange.results(fragments).items():
            sums[names[index]]["applied"] += applied
            sums[names[index]]["mine"] += gradients[names[index]] / communicator.world_size
    return {"sums": sums, "state": reduction.state_dict()}


def off_by(results: list[dict[str, Any]], before: list[dict[str, Any]] | None = None) -> float:
    """By how much the law is off, at most. ``before``: the states that the ranks started from."""
    worst = 0.0
    for name in SHAPES:
        sums = [result["sums"][name] for result in results]
        assert all(torch.equal(sums[0]["applied"], other["applied"]) for other in sums)
        came = sum(each["mine"] for each in sums) + sum(state["residuals"][name] for state in before or [])
        kept = sum(result["state"]["residuals"][name] for result in results) + sum(each["forgotten"] for each in sums)
        worst = max(worst, float((sums[0]["applied"] + kept - came).abs().max()))
        assert all(result["state"]["residuals"][name].dtype == torch.float64 for result in results)
    return worst


@pytest.mark.parametrize(
    ("kind", "decay"),
    [
        pytest.param(kind, decay, marks=() if (kind, decay) == ("top k in 2 bits", 0.9) else pytest.mark.breadth)
        for kind in MAKERS
        for decay in (1.0, 0.9)
    ],
)
def test_nothing_is_lost_in_200_windows_on_ranks_that_become_fewer(kind: str, decay: float) -> None:
    """A lost rank takes only what it held back itself."""
    three = run_ranks(train, 3, kind, range(WINDOWS // 2), None, decay)
    assert off_by(three) <= EXACT
    survivors = [result["state"] for result in three[:2]]
    two = run_ranks(train, 2, kind, range(WINDOWS // 2, WINDOWS), survivors, decay)
    assert off_by(two, survivors) <= EXACT


def test_what_decays_is_forgotten_and_the_rest_stays_bounded() -> None:
    whole, decayed = (run_ranks(train, 2, "top k in 2 bits", range(60), None, decay) for decay in (1.0, 0.5))
    held = [
        sum(float(each.square().sum()) for each in results[0]["state"]["residuals"].values())
        for results in (whole, decayed)
    ]
    assert held[1] < held[0] / 2
