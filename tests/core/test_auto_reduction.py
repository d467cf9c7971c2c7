"""``reduction="auto"``: what is chosen, by a clock that the communicator drives, so that no machine's speed matters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync.communicator import Communicator, choose_communicator
from gradsync.core.engine.blocks import load_window, save_window
from gradsync.core.reduction.auto import DECIDED_AFTER, predict
from gradsync.core.reduction.measurement import Speed
from gradsync.errors import ConfigurationError
from gradsync.reduction import Auto, Mean, Reduction, reduction_by_name
from gradsync.testing import run_ranks

pytestmark = pytest.mark.timeout(120)


class TimedCommunicator:
    """A communicator, and a clock on which nothing takes time but ``compute`` and the bytes that this rank sends.

    ``hidden`` seconds of a collective pass while something else is computed.
    """

    def __init__(self, inner: Communicator, *, seconds_a_byte: float, hidden: float = 0.0) -> None:
        self._inner, self._seconds_a_byte, self._hidden = inner, seconds_a_byte, hidden
        self.now = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def clock(self) -> float:
        return self.now

    def _send(self, nbytes: int) -> None:
        self.now += max(nbytes * self._seconds_a_byte - self._hidden, 0.0)

    def all_reduce(self, tensor: torch.Tensor, *args: Any) -> Any:
        self._send(2 * tensor.nbytes)
        return self._inner.all_reduce(tensor, *args)

    def all_gather(self, output: torch.Tensor, *args: Any) -> Any:
        self._send(output.nbytes)
        return self._inner.all_gather(output, *args)

    def all_to_all(self, output: torch.Tensor, *args: Any) -> Any:
        self._send(output.nbytes)
        return self._inner.all_to_all(output, *args)


def candidates(*names: str) -> dict[str, Callable[[], Reduction]]:
    return {name: partial(reduction_by_name, name) for name in names}


def wrapped(communicator: Any, auto: Auto) -> Any:
    with seeded(0):
        module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return gradsync.DistributedDataParallel(module, communicator=communicator, reduction=auto, bucket_cap_mb=1.0)


def train(model: Any, communicator: Any, windows: int, compute: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of the first weight's gradients in the last window, and that rank's own gradient."""
    weight = model.module[0].weight
    for window in range(windows):
        model.zero_grad()
        communicator.now += compute
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(7 * window + communicator.rank))
        loss = model(inputs).square().sum()
        (own,) = torch.autograd.grad(loss, [weight], retain_graph=True)
        loss.backward()
    return weight.grad.clone(), own


# One window's float32 is 33 kB, sent twice.
SLOW = 1e-3


def decide(
    names: tuple[str, ...], seconds_a_byte: float, hidden: float = 0.0
) -> tuple[str | None, str, torch.Tensor, torch.Tensor]:
    communicator = TimedCommunicator(choose_communicator(), seconds_a_byte=seconds_a_byte, hidden=hidden)
    auto = Auto(candidates(*names), clock=communicator.clock)
    # Ranks that do not compute equally fast decide alike.
    mean, own = train(wrapped(communicator, auto), communicator, DECIDED_AFTER + 2, compute=1.0 + communicator.rank)
    return auto.chosen, repr(auto.current), mean, own


@pytest.mark.parametrize(
    ("names", "seconds_a_byte", "hidden", "chosen", "current"),
    [
        (("bf16", "int8"), SLOW, 0.0, "int8", "Quantize(8)"),
        (("bf16",), SLOW, 0.0, "bf16", "Cast(torch.bfloat16)"),
        # Whatever hides communication is enough: no more is taken away than that needs.
        (("bf16", "int8", "int4"), SLOW, 35.0, "bf16", "Cast(torch.bfloat16)"),
        (("bf16", "int8", "int4"), SLOW, 18.0, "int8", "Quantize(8)"),
        # Nothing to gain.
        (("bf16", "int8"), 1e-9, 0.0, "mean", "Mean()"),
        (("bf16", "int8"), SLOW, 70.0, "mean", "Mean()"),
    ],
)
def test_the_mildest_that_hides_communication_is_chosen(
    names: tuple[str, ...], seconds_a_byte: float, hidden: float, chosen: str, current: str
) -> None:
    results = run_ranks(decide, 2, names, seconds_a_byte, hidden)
    assert [(name, now) for name, now, _, _ in results] == [(chosen, current)] * 2
    exact = (results[0][3] + results[1][3]) / 2
    for _, _, mean, _ in results:
        assert torch.equal(mean, results[0][2])
        torch.testing.assert_close(mean, exact, rtol=0.02, atol=float(exact.abs().max()) / 50)


@pytest.mark.parametrize(
    ("speed", "step", "exposed"),
    [
        # Half of the bytes, for nothing: what was waited for becomes less by what is saved.
        (Speed(seconds=200.0, busy=0.0), 100.0 + 150.0, 150.0),
        # A quarter, and half of that time the cores are busy: half of it is waited for anyway.
        (Speed(seconds=100.0, busy=50.0), 100.0 + 50.0 + 25.0, 50.0),
        # All of it is hidden, and what takes cores away from compute adds to it.
        (Speed(seconds=40.0, busy=30.0), 100.0 + 30.0, 0.0),
        # Slower than what it replaces.
        (Speed(seconds=500.0, busy=0.0), 100.0 + 450.0, 450.0),
    ],
)
def test_what_is_predicted(speed: Speed, step: float, exposed: float) -> None:
    prediction = predict("it", 100.0, 350.0, speed, Speed(seconds=400.0, busy=0.0))
    assert (prediction.step, prediction.exposed) == (step, exposed)
    assert prediction.hides_communication == (exposed == 0.0)


class Taking(Mean):
    """Takes so many seconds for a bucket, whatever is in it."""

    def __init__(self, communicator: TimedCommunicator, seconds: float) -> None:
        self._communicator, self._seconds = communicator, seconds

    def start(self, bucket: Any, communicator: Any, divisor: float) -> Any:
        before, handle = self._communicator.now, super().start(bucket, communicator, divisor)
        self._communicator.now = before + self._seconds
        return handle


def believe() -> tuple[str | None, bool, list[str]]:
    """The candidate is fast when it is measured, before it is taken, and slow afterwards."""
    communicator = TimedCommunicator(choose_communicator(), seconds_a_byte=SLOW)
    seconds = iter((0.0, 0.0, 100.0))
    auto, seen = Auto({"promising": lambda: Taking(communicator, next(seconds))}, clock=communicator.clock), []
    model = wrapped(communicator, auto)
    for _ in range(DECIDED_AFTER + 1):
        train(model, communicator, 1)
        seen.append(type(auto.current).__name__)
    return auto.chosen, "101000.0 ms a step with promising" in auto.report, seen


def test_what_does_not_keep_what_it_promised_goes() -> None:
    for chosen, told, seen in run_ranks(believe, 2):
        assert (chosen, told, seen[-1]) == ("mean", True, "Mean")
        assert "Taking" in seen


def go_on() -> tuple[str | None, str, str, bool]:
    communicator = TimedCommunicator(choose_communicator(), seconds_a_byte=SLOW)
    first = Auto(candidates("int8", "int4"), clock=communicator.clock)
    model = wrapped(communicator, first)
    train(model, communicator, DECIDED_AFTER + 1)
    state = save_window(model.synchronizer.engine)
    second = Auto(candidates("int8", "int4"), clock=communicator.clock)
    model = wrapped(communicator, second)
    load_window(model.synchronizer.engine, state)
    # Saved before a window has run, it is still there.
    saved_again = save_window(model.synchronizer.engine)["reduction"]["chosen"]
    train(model, communicator, 1)
    residuals = second.state_dict()["state"]["residuals"]
    return second.chosen, repr(second.current), saved_again, len(residuals) == 4


def test_a_choice_is_saved_with_what_belongs_to_it() -> None:
    assert run_ranks(go_on, 2) == [("int4", "ErrorFeedback(Quantize(4))", "int4", True)] * 2


def load_other() -> str:
    communicator = TimedCommunicator(choose_communicator(), seconds_a_byte=SLOW)
    auto = Auto(candidates("bf16"))
    model = wrapped(communicator, auto)
    with pytest.raises(ConfigurationError, match=r"reduced by 'int4', which Auto\(bf16\) does not choose from"):
        auto.load_state_dict({"chosen": "int4"})
    train(model, communicator, 1)
    return repr(auto.current)


def test_a_choice_that_is_not_on_offer_is_refused_and_nothing_changes() -> None:
    assert run_ranks(load_other, 2) == ["Mean()"] * 2


class Alone(nn.Module):
    """One parameter, of any type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=dtype))

    def forward(self) -> torch.Tensor:
        return self.weight.abs().sum()


def by_name(dtype: torch.dtype) -> tuple[str, bool]:
    model = gradsync.DistributedDataParallel(Alone(dtype), reduction="auto")
    model().backward()
    reduction: Any = model.synchronizer.reduction
    return repr(reduction), reduction.chosen is None


def test_by_name() -> None:
    assert run_ranks(by_name, 2, torch.float32)[0] == ("Auto(bf16, int8, int4)", True)
    assert run_ranks(by_name, 2, torch.complex64)[0] == ("Auto(bf16, int8, int4)", True)
    # In a world of one nothing is sent.
    assert run_ranks(by_name, 1, torch.float32)[0][1] is False


def test_there_must_be_something_to_choose_from() -> None:
    with pytest.raises(ConfigurationError, match="at least one candidate"):
        Auto({})
