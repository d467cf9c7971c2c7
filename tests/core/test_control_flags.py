"""What ranks tell each other in the control flags: where there is no bucket to carry it, and where it is read a window
later.

On an accelerator the host does not wait for what it could read. Here control flags of the CPU are held back in the same
way.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import pytest
import torch
from torch import nn

from gradsync import (
    BadStepError,
    DistributedDataParallel,
    MisuseError,
    PeerFailedError,
    ShardedOptimizer,
    clip_grad_norm_,
)
from gradsync.communicator import choose_communicator
from gradsync.communicator.transport_state import TransportState
from gradsync.core.bucket.control_flags import step_gate
from gradsync.errors import CommunicatorLostError
from gradsync.reduction import Mean
from tests.core.common import in_threads_and_processes
from tests.fuse import Explosion, Fuse
from tests.ranks import Ranks, ThreadRanks

pytestmark = pytest.mark.timeout(60)


class Words(nn.Module):
    """A table of two words with sparse gradients, which is all there is, or together with a number."""

    def __init__(self, with_number: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 1, sparse=True, dtype=torch.float64)
        nn.init.constant_(self.table.weight, 0.5)
        self.number = nn.Parameter(torch.ones((), dtype=torch.float64)) if with_number else 1.0

    def forward(self, x: float, lit: bool) -> torch.Tensor:
        return Fuse.apply(self.table(torch.tensor([0, 1])) * self.number, lit).sum() * x


def train(
    batches: int,
    work: Callable[[DistributedDataParallel, int], torch.Tensor],
    module: nn.Module,
    *,
    fused: bool = False,
) -> list[str]:
    """What each batch came to: the gradient of the first parameter, or the error."""
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=fused)
    came = []
    for batch in range(batches):
        try:
            work(model, batch).backward()
            optimizer.step()
            gradient = next(model.parameters()).grad
            came.append("none" if gradient is None else str(float(gradient.to_dense().view(-1)[0])))
        except (Explosion, PeerFailedError, MisuseError) as error:
            came.append(f"{type(error).__name__}: {error}")
        model.zero_grad()
    return came


def fail_once(with_number: bool, at: int) -> list[str]:
    rank = choose_communicator().rank
    return train(6, lambda model, batch: model(batch + 1.0, batch == at and rank == 0), Words(with_number))


@in_threads_and_processes
@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_a_failure_is_told_where_there_are_no_buckets(ranks: Ranks, at: int) -> None:
    first, *others = ranks.run(fail_once, False, at)
    means = [str(batch + 1.0) for batch in range(6)]
    assert [*first[:at], *first[at + 1 :]] == [*means[:at], *means[at + 1 :]]
    assert first[at].startswith("Explosion")
    for came in others:
        assert came[:at] + came[at + 1 :] == means[:at] + means[at + 1 :]
        assert "the backward of rank 0 failed" in came[at]


# -- control flags that are read later, as on accelerators ------------------------------------------------------------


class Unread:
    """Numbers on their way to the host, which have not arrived before somebody waits for them."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers.tolist()

    def wait(self) -> list[float]:
        return self._numbers


@pytest.fixture
def read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradsync.core.engine import flag_reader
    from gradsync.core.window import skip_vote, weights

    for module in (flag_reader, weights):
        monkeypatch.setattr(module, "HostCopy", Unread)
    for module in (flag_reader, weights, skip_vote):
        monkeypatch.setattr(module, "reads_at_once", lambda _: False)


class Numbers(nn.Module):
    """Two numbers; the second is frozen to begin with. The fuse burns between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(2))
        self.second.requires_grad_(False)

    def forward(self, x: float, lit: bool = False) -> torch.Tensor:
        return self.first * Fuse.apply(self.second * x, lit)


def fail_unseen(fused: bool) -> list[str]:
    rank, module = choose_communicator().rank, Numbers().requires_grad_(True)
    return train(8, lambda model, batch: model(1.0, batch == 1 and rank == 0), module, fused=fused)


def test_a_host_that_waits_before_its_step_hears_of_a_failure_in_time(read_later: None) -> None:
    first, other = ThreadRanks(2).run(fail_unseen, False)
    assert first[1].startswith("Explosion")
    assert "the backward of rank 0 failed" in other[1]
    assert [*first[:1], *first[2:]] == other[:1] + other[2:] == ["1.0"] * 7


def test_no_control_flags_goes_unread(read_later: None) -> None:
    first, other = ThreadRanks(2).run(fail_unseen, True)
    assert first[1].startswith("Explosion")
    # They have gone on when they hear of it, at the end of their next window.
    assert "the backward of rank 0 failed" in other[2]
    assert "No optimizer step was taken on them" in other[2]
    assert [*first[:1], *first[2:]] == ["1.0"] * 7
    assert [*other[:1], *other[3:]] == ["1.0"] * 6


Step = tuple[str, list[float], list[float]]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "fused SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "fused Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1, fused=True),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "SGD by closure": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "fused AdamW, sharded in plain steps": lambda model: ShardedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), model, mode="plain"
    ),
    **dict.fromkeys(
        ("AdamW, sharded", "AdamW, sharded, clipped", "AdamW, sharded, clipped by torch"),
        lambda model: ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), model),
    ),
}


def fail_at(name: str, at: int, scales: bool) -> list[Step]:
    """What each window came to, the parameters after it, and the state of the optimizer. One backward of rank 0
    fails, and whoever hears of a failure goes on."""
    communicator = choose_communicator()
    model = DistributedDataParallel(Numbers().requires_grad_(True))
    optimizer = OPTIMIZERS[name](model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scales)
    came: list[Step] = []
    for window in range(7):

        def backward(window: int = window, scaler: torch.amp.GradScaler = scaler) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(communicator.rank + 1.0, window == at and communicator.rank == 0)
            scaler.scale(loss).backward()
            return loss

        try:
            if "closure" in name:
                optimizer.step(backward)
            else:
                backward()
                if "clipped" in name:
                    scaler.unscale_(optimizer)
                    clip = nn.utils.clip_grad_norm_ if "by torch" in name else clip_grad_norm_
                    clip(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
            said = ""
        except (Explosion, PeerFailedError) as error:
            said = f"{type(error).__name__}: {error}"
            # This one may be in the middle of a step.
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scales)
        optimizer.zero_grad()
        by_parameter = getattr(optimizer, "_outside", optimizer).state
        states = [value for state in by_parameter.values() for value in state.values()]
        assert not hasattr(optimizer, "found_inf")
        came.append(
            (
                said,
                [float(parameter.detach()) for parameter in model.parameters()],
                [float(value) for value in states if isinstance(value, torch.Tensor)],
            )
        )
    return came


def abstain_and_contribute() -> list[str]:
    """In the second window rank 1 abstains from the first micro-batch, and has a gradient of the second."""
    rank, model = choose_communicator().rank, DistributedDataParallel(Numbers().requires_grad_(True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    came = []
    for window in range(4):
        said = ""
        try:
            for micro_batch in model.accumulate(range(2)):
                if (rank, window, micro_batch) == (1, 1, 0):
                    model.abstain()
                else:
                    model(1.0).backward()
            optimizer.step()
        except PeerFailedError as error:
            said = str(error)
        optimizer.zero_grad()
        came.append(said)
    return came


def test_a_rank_that_abstains_and_contributes_starts_no_collective_alone(read_later: None) -> None:
    for came in ThreadRanks(2).run(abstain_and_contribute):
        assert came[1].startswith("a rank abstains from a window")
        assert [came[0], *came[2:]] == [""] * 3


def rebuild_before_the_step() -> list[list[float]]:
    """Rank 0 fails in the second window. All ranks lay out their buckets again before the others step."""
    communicator = choose_communicator()
    model = DistributedDataParallel(Numbers().requires_grad_(True))
    optimizer = OPTIMIZERS["fused AdamW"](model)
    values = []
    for window in range(4):
        failed = False
        with suppress(Explosion, PeerFailedError):
            failed = True
            model(communicator.rank + 1.0, window == 1 and communicator.rank == 0).backward()
            failed = False
        if window == 1:
            model.synchronizer.reduce_with(Mean())
        if not failed:
            optimizer.step()
        optimizer.zero_grad()
        values.append([float(parameter.detach()) for parameter in model.parameters()])
    return values


def test_nobody_steps_on_a_failed_window_whose_buckets_are_gone(read_later: None) -> None:
    first, *others = ThreadRanks(3).run(rebuild_before_the_step)
    assert first[1] == first[0]
    assert others == [first] * 2


@pytest.mark.parametrize("scales", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.cpu_ranks("torch has none for CUDA") if name == "fused Adagrad" else ())
        for name in OPTIMIZERS
    ],
)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_nobody_steps_on_a_failed_window_and_replicas_stay_equal(
    read_later: None, name: str, at: int, scales: bool
) -> None:
    if scales and "closure" in name:
        pytest.skip("a GradScaler takes no closure")
    ranks = ThreadRanks(3).run(fail_at, name, at, scales)
    for window in range(7):
        first, *others = (came[window] for came in ranks)
        assert [each[1] for each in others] == [first[1]] * 2, f"window {window}"
        # A first step that changes nothing makes a state of zeros, where there was none.
        assert window == at == 0 or [each[2] for each in others] == [first[2]] * 2, f"window {window}"
    assert ranks[0][at][0].startswith("Explosion")
    before = ranks[0][at - 1][1:] if at else ([1.0, 1.0], None)
    assert ranks[0][at][1] == before[0], "a parameter has changed"
    if at:
        assert ranks[0][at][2] == before[1], "the state of the optimizer has changed"
    for came in ranks[1:]:
        told = [window for window in range(7) if "the backward of rank 0 failed" in came[window][0]]
        is_gated = "fused" in name and not (name == "fused SGD" and at == 0)
        assert told == [at + 1 if is_gated else at]
    # From then on all is as before.
    assert all(came[window][0] == "" for came in ranks for window in range(at + 2, 7))
    assert ranks[0][6][1] != ranks[0][5][1]


def test_what_a_step_must_not_be_taken_on() -> None:
    """Of three ranks, as a sum and as a mean."""
    marks = {"nothing": [], "failed": [1], "late": [3], "skip vote": [4], "weights": [5], "trained": [6]}
    for name, places in marks.items():
        for readers in (0, 1, 3):
            control = torch.zeros(9)
            control[places] = 1.0
            control[-2], control[-1] = readers, 3.0
            is_bad = name in ("failed", "late") or (name != "nothing" and readers < 3)
            for divisor in (1.0, 3.0):
                for dtype in (torch.float32, torch.float64, torch.bfloat16):
                    found = step_gate((control / divisor).to(dtype), [torch.zeros(())])
                    assert (found.dtype, found.item()) == (torch.float32, float(is_bad)), (name, readers)
    aborted = TransportState()
    before, failure = aborted.flag.clone(), CommunicatorLostError("rank 1 was killed")
    aborted.fail(failure)
    aborted.fail(CommunicatorLostError("and another one"))
    assert [before.item(), aborted.flag.item(), aborted.failure] == [0.0, 1.0, failure]
    assert step_gate(torch.zeros(9), [TransportState().flag, aborted.flag]).item() == 1.0


def test_collectives_after_the_buckets_wait_for_the_control_flags(read_later: None) -> None:
    """A rank that has failed takes no part in those that gather sparse gradients."""
    for with_number in (True, False):
        first, other = ThreadRanks(2).run(fail_once, with_number, 2)
        assert first[2].startswith("Explosion")
        assert "the backward of rank 0 failed" in other[2]
        assert first[:2] + first[3:] == other[:2] + other[3:] == ["1.0", "2.0", "4.0", "5.0", "6.0"]


def thaw(on: tuple[int, ...], fused: bool = False) -> list[str]:
    """From the fourth window on these ranks train a further parameter."""
    rank = choose_communicator().rank

    def work(model: DistributedDataParallel, batch: int) -> torch.Tensor:
        model.module.second.requires_grad_(batch >= 3 and rank in on)
        return model(rank + 1.0)

    return train(6, work, Numbers(), fused=fused)


def test_what_all_ranks_ask_for_is_done(read_later: None) -> None:
    assert ThreadRanks(2).run(thaw, (0, 1)) == [["1.5"] * 6] * 2


def test_what_some_ranks_ask_for_is_refused_on_all(read_later: None) -> None:
    """Nobody waits for a rank that has not heard of it."""
    asking, other = ThreadRanks(2).run(thaw, (0,))
    assert asking[:3] == other[:3] == ["1.5"] * 3
    for said in (asking, other):
        assert "some ranks train a parameter that was frozen before and others do not" in said[3]
    asking, other = ThreadRanks(2).run(thaw, (0,), fused=True)
    assert "some ranks train a parameter that was frozen before and others do not" in asking[3]
    assert other[3] == "1.5"
    assert "No optimizer step was taken on them" in other[4]


def mix_weights() -> list[str]:
    """Windows with weights, but rank 1 gives none in the third."""
    communicator = choose_communicator()
    model, said = DistributedDataParallel(Numbers()), []
    for window in range(5):
        try:
            loss = model(communicator.rank + 1.0)
            if window == 2 and communicator.rank == 1:
                loss.backward()
            else:
                model.backward(loss, weight=communicator.rank + 1)
            said.append(str(round(float(model.module.first.grad), 9)))
        except (MisuseError, PeerFailedError) as error:
            said.append(str(error))
        model.zero_grad()
    return said


def test_ranks_that_mix_are_told_in_the_next_window(read_later: None) -> None:
    for said in ThreadRanks(2).run(mix_weights):
        assert [said[0], said[1], said[4]] == [str(round(5 / 3, 9))] * 3
        assert "some ranks gave weights to the backwards of the window before" in said[3]


def skip_vote(on_bad_step: Literal["raise", "skip", "drop-rank"]) -> list[str]:
    """In the fourth window the gradient of one parameter is not finite on rank 1."""
    communicator = choose_communicator()
    model = DistributedDataParallel(Numbers().requires_grad_(True), on_bad_step=on_bad_step, bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    said = []
    for window in range(6):
        before = [float(parameter.detach()) for parameter in model.parameters()]
        try:
            loss = model(communicator.rank + 1.0)
            if window == 3 and communicator.rank == 1:
                loss = loss + model.module.second * float("nan")
            loss.backward()
            optimizer.step()
            skipped = before == [float(parameter.detach()) for parameter in model.parameters()]
            said.append("skipped" if skipped else str(round(float(model.module.second.grad) / before[0], 9)))
        except BadStepError as error:
            said.append(str(error))
        model.zero_grad()
    return said


def test_with_a_policy_all_ranks_wait_for_the_control_flags(read_later: None) -> None:
    """They hear of a skip vote before they step, on an accelerator too."""
    good = ["1.5"] * 3
    for said in ThreadRanks(2).run(skip_vote, "skip"):
        assert said == [*good, "skipped", "1.5", "1.5"]
    for said in ThreadRanks(2).run(skip_vote, "drop-rank"):
        assert said == [*good, "1.0", "1.5", "1.5"]
    for said in ThreadRanks(2).run(skip_vote, "raise"):
        assert said[:3] + said[4:] == ["1.5"] * 5
        assert "the gradient of parameter 'second' on rank 1 is not finite" in said[3]


def abstain_unheard(fused: bool) -> list[str]:
    rank = choose_communicator().rank

    def work(model: DistributedDataParallel, batch: int) -> torch.Tensor:
        if batch == 2 and rank == 1:
            model.abstain()
        return model(1.0)

    return train(5, work, Numbers(), fused=fused)


def test_without_a_policy_a_rank_that_abstains_is_an_error(read_later: None) -> None:
    """It is told so itself. The others hear of it before they step, or do not step and hear in their next window."""
    other, abstaining = ThreadRanks(2).run(abstain_unheard, False)
    assert "on_bad_step='skip'" in abstaining[2]
    assert "on_bad_step='skip'" in other[2]
    assert abstaining[:2] + abstaining[3:] == other[:2] + other[3:] == ["1.0"] * 4
    other, abstaining = ThreadRanks(2).run(abstain_unheard, True)
    assert "on_bad_step='skip'" in abstaining[2]
    assert "on_bad_step='skip'" in other[3]
    assert "No optimizer step was taken on them" in other[3]
    assert abstaining[:2] + abstaining[3:] == ["1.0"] * 4
    assert other[:3] + other[4:] == ["1.0", "1.0", "0.5", "1.0"]
