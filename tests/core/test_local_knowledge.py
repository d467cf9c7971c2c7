"""Contract points 12 and 13: what one rank alone knows, or what fails on it alone, never decides a collective.

Each test has a rank that differs: it has no backward, trains another parameter, is watched by somebody who raises, or
fails. All ranks must come to the right mean, or to one error that says what is wrong, and go on together.
"""

import contextlib
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from gradsync import DistributedDataParallel, LayerDrop, MisuseError, PeerFailedError
from gradsync.communicator import choose_communicator
from gradsync.core.engine.state import Phase
from tests.core.common import TINY, gradients, in_threads_and_processes, still
from tests.fuse import Explosion, Fuse
from tests.ranks import RankPool, Ranks, ThreadRanks

pytestmark = pytest.mark.timeout(60)

WIDTH = 4


class Line(nn.Module):
    """Two layers of one number each; the gradient of the first, and of the second's bias, is the input's mean times a
    constant, so that every mean can be told in the head."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([scale * x for scale in self.scales]).sum()


def wrap(module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module or Line(), bucket_cap_mb=TINY, **options)


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


# -- weights: a rank without a backward ----------------------------------------------------------------------------


def weighted_windows(kinds: str) -> list[list[float | None]]:
    """A window for each letter: ``w`` weighted, ``p`` plain, ``a`` in accumulate(). The last rank has no backward, in
    the first window or any other; the others see rank + 1, with weight rank + 1."""
    communicator = choose_communicator()
    model = wrap()
    optimizer = still(model)
    seen = []
    for kind in kinds:
        x, idle = number(communicator.rank + 1), communicator.rank == communicator.world_size - 1
        with model.accumulate(last=True) if kind == "a" else contextlib.nullcontext():
            if not idle and kind == "w":
                model.backward(model(x), weight=communicator.rank + 1)
            elif not idle:
                model(x).backward()
            else:
                # A batch without anything to learn from.
                model(x)
        optimizer.step()
        seen.append(gradients(model))
        optimizer.zero_grad()
    return seen


def mean_of(kind: str, world_size: int) -> float:
    values = range(1, world_size)
    if kind == "w":
        return sum(value * value for value in values) / sum(values)
    return sum(values) / (len(values) if kind == "a" else world_size)


@in_threads_and_processes
@pytest.mark.parametrize("kinds", ["www", "aaa", "ppp", "pwp", "wpw", "apa", "ppaapp", "pwwpa"])
def test_a_rank_without_a_backward_need_not_know_whether_the_others_count(ranks: Ranks, kinds: str) -> None:
    """Also in the first window, and where ranks begin to count or cease to."""
    expected = [[pytest.approx(mean_of(kind, ranks.world_size), rel=1e-12)] * 3 for kind in kinds]
    for seen in ranks.run(weighted_windows, kinds):
        assert seen == expected


def mixed_windows(first: str, others: str) -> list[str]:
    """Rank 0 runs the last window one way and the others another; the first one is plain on all ranks."""
    communicator = choose_communicator()
    model = wrap()
    optimizer = still(model)
    told = []
    for kind in ("p", first if communicator.rank == 0 else others, "p"):
        try:
            with model.accumulate(last=True) if kind == "a" else contextlib.nullcontext():
                model.backward(model(number(1)), weight=2) if kind == "w" else model(number(1)).backward()
            told.append("")
        except MisuseError as error:
            told.append(str(error))
        except PeerFailedError as error:
            told.append(f"peer: {error}")
        optimizer.zero_grad()
        if not told[-1]:
            optimizer.step()
    return told


@in_threads_and_processes
@pytest.mark.parametrize("kinds", ["wp", "pw", "wa", "aw", "ap", "pa"])
def test_ranks_that_count_and_ranks_that_do_not_are_told(ranks: Ranks, kinds: str) -> None:
    for before, during, after in ranks.run(mixed_windows, *kinds):
        assert not before
        assert "some ranks" in during
        assert "no right mean" in during
        assert not after


# -- what is trained -----------------------------------------------------------------------------------------------


def unfreeze(on: int | None) -> list[list[float | None]]:
    """The first layer is frozen for three windows; then rank ``on`` trains it, or all do."""
    communicator = choose_communicator()
    module = Line()
    module.scales[0].requires_grad_(False)
    model = wrap(module)
    optimizer = still(model)
    seen = []
    for window in range(6):
        if window == 3 and on in (None, communicator.rank):
            module.scales[0].requires_grad_(True)
        for last in (False, True):
            with contextlib.nullcontext() if last else model.no_sync():
                model(number(communicator.rank + 1)).backward()
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


@in_threads_and_processes
@pytest.mark.parametrize("on", [None, 0, 1])
def test_a_parameter_that_one_rank_trains_again_is_averaged_on_all(ranks: Ranks, on: int | None) -> None:
    """In the very window in which it begins, micro-batches before the last included. The others contribute nothing."""
    world_size = ranks.world_size
    everywhere = 2 * sum(range(1, world_size + 1)) / world_size
    there = everywhere if on is None else 2 * (on + 1) / world_size
    expected = [[None, everywhere, everywhere]] * 3 + [[there, everywhere, everywhere]] * 3
    for seen in ranks.run(unfreeze, on):
        assert seen == [pytest.approx(window, rel=1e-12) for window in expected]


def drop_and_look() -> list[list[float | None]]:
    """Rank 0 runs a backward that reaches no parameter before the one that does, in windows with absent layers."""
    communicator = choose_communicator()
    blocks = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)]
    for block in blocks:
        nn.init.eye_(block.weight)
    # The buffers of LayerDrop, too.
    model = wrap(LayerDrop(blocks, drop=0.5, seed=3).to(blocks[0].weight.device))
    optimizer = still(model)
    seen = []
    for _ in range(6):
        x = torch.ones(1, WIDTH, dtype=torch.float64, requires_grad=True)
        output = model(x * (communicator.rank + 1)).sum()
        if communicator.rank == 0:
            output.backward(inputs=[x], retain_graph=True)
        output.backward()
        optimizer.step()
        seen.append([None if p.grad is None else float(p.grad.sum()) for p in model.parameters()])
        optimizer.zero_grad()
    return seen


class Chosen(nn.Module):
    """One number each, of which a forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.ParameterList(nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(2))

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        return torch.stack([self.numbers[index] * x for index in used]).sum()


def train_a_thawed_parameter_alone(before: int, last: bool) -> list[list[float | None]]:
    """After ``before`` windows without it, number 1 is trained; rank 0 has a micro-batch that reaches nothing else."""
    module, rank, seen = Chosen(), choose_communicator().rank, []
    module.numbers[1].requires_grad_(False)
    model = wrap(module)
    optimizer = still(model)
    for _ in range(before):
        model(number(1.0), (0,)).backward()
        optimizer.step()
        optimizer.zero_grad()
    module.numbers[1].requires_grad_(True)
    for _ in range(3):
        batches = [(1,), (0,)] if rank == 0 else [(0, 1)]
        for place, used in enumerate(reversed(batches) if last else batches):
            with model.accumulate(last=place == len(batches) - 1):
                model(number(6.0), used).backward()
        optimizer.step()
        seen.append(gradients(model))
        optimizer.zero_grad()
    return seen


@in_threads_and_processes
@pytest.mark.parametrize("last", [False, True], ids=["first micro-batch", "last micro-batch"])
@pytest.mark.parametrize("before", [1, 2, 3, 5])
def test_a_micro_batch_counts_that_reaches_only_what_is_trained_again(ranks: Ranks, before: int, last: bool) -> None:
    """Where the parameter has no place in a bucket yet, so that no hook tells of its gradient."""
    # Two micro-batches of rank 0 and one of each other rank: each number has a gradient in all of them but one.
    mean = 6.0 * ranks.world_size / (ranks.world_size + 1)
    for seen in ranks.run(train_a_thawed_parameter_alone, before, last):
        assert seen == [[pytest.approx(mean)] * 2] * 3


def train_a_thawed_parameter_unseen(before: int) -> list[list[float | None]]:
    """Rank 0 alone trains number 1 again, and reaches nothing else, by a forward that the wrapper does not see."""
    module, rank, seen = Chosen(), choose_communicator().rank, []
    module.numbers[1].requires_grad_(False)
    model = wrap(module)
    optimizer = still(model)
    for window in range(before + 3):
        module.numbers[1].requires_grad_(rank == 0 and window >= before)
        module(number(6.0), (1,) if rank == 0 and window >= before else (0,)).backward()
        optimizer.step()
        seen.append(gradients(model))
        optimizer.zero_grad()
    return seen[before:]


@in_threads_and_processes
@pytest.mark.parametrize("before", [1, 2, 3, 5])
def test_a_step_sees_gradients_of_what_is_trained_again(ranks: Ranks, before: int) -> None:
    others = ranks.world_size - 1
    expected = [pytest.approx(6.0 * others / ranks.world_size), pytest.approx(6.0 / ranks.world_size)]
    for seen in ranks.run(train_a_thawed_parameter_unseen, before):
        assert seen == [expected] * 3


@in_threads_and_processes
def test_a_backward_that_reaches_nothing_forgets_nothing_that_ranks_agreed_on(ranks: Ranks) -> None:
    first, *others = ranks.run(drop_and_look)
    assert any(None in window for window in first)
    for other in others:
        assert other == first


# -- observers -----------------------------------------------------------------------------------------------------

EVENTS = [
    "backward_began",
    "bucket_ready",
    "bucket_started",
    "backward_ended",
    "bucket_finished",
    "synchronization_finished",
]


class Saboteur:
    """An observer that raises in one event, on rank 0."""

    def __init__(self, event: str, rank: int) -> None:
        self._event = event if rank == 0 else ""
        self.told = 0

    def __getattr__(self, name: str) -> Any:
        if name not in EVENTS:
            raise AttributeError(name)

        def tell(*_: Any, **__: Any) -> None:
            self.told += 1
            if name == self._event:
                raise ZeroDivisionError(f"in {name}")

        return tell


def watched(event: str) -> tuple[list[list[float | None]], int]:
    communicator = choose_communicator()
    observer = Saboteur(event, communicator.rank)
    model = wrap(observer=observer)
    optimizer = still(model)
    seen = []
    logging.getLogger("gradsync").disabled = True
    try:
        for _ in range(5):
            model(number(communicator.rank + 1)).backward()
            seen.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
    finally:
        logging.getLogger("gradsync").disabled = False
    return seen, observer.told


@in_threads_and_processes
@pytest.mark.parametrize("event", EVENTS)
def test_an_observer_that_raises_cannot_break_a_training(ranks: Ranks, event: str) -> None:
    mean = sum(range(1, ranks.world_size + 1)) / ranks.world_size
    (saw, told), *others = ranks.run(watched, event)
    assert saw == [[pytest.approx(mean, rel=1e-12)] * 3] * 5
    for other, told_there in others:
        assert other == saw
        assert told < told_there


def test_an_observer_that_raised_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    from gradsync.core.engine.observer import Observers

    observers = Observers(Saboteur("backward_ended", 0), Saboteur("", 1))
    with caplog.at_level(logging.ERROR, "gradsync"):
        observers.backward_ended()
        observers.backward_ended()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "Saboteur" in caplog.text
    assert "backward_ended" in caplog.text
    assert "ZeroDivisionError" in caplog.text


# -- join ----------------------------------------------------------------------------------------------------------


def epochs_of_different_length() -> list[list[float | None]]:
    """Rank r has r + 1 batches an epoch; gradients are zeroed after each step, and nowhere else."""
    communicator = choose_communicator()
    model = wrap(Line(1))
    optimizer = still(model)
    first = []
    for _ in range(3):
        with Join([model]):
            for batch in range(communicator.rank + 1):
                model(number(50.0)).backward()
                if batch == 0:
                    first.append(gradients(model))
                optimizer.step()
                optimizer.zero_grad()
    return [*first, gradients(model)]


def test_a_rank_that_ran_out_has_clean_gradients(process_ranks: RankPool) -> None:
    """Or the first gradient of the next epoch would be added to a mean of the last."""
    for first in process_ranks.run(epochs_of_different_length):
        assert first == [[pytest.approx(50.0, rel=1e-12)]] * 3 + [[None]]


# -- a backward that fails -----------------------------------------------------------------------------------------


class Fused(nn.Module):
    """The first layer's gradient is there before the fuse burns; that of the second never is."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = (nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(2))

    def forward(self, x: torch.Tensor, lit: bool) -> torch.Tensor:
        return Fuse.apply(x * self.late, lit) * self.early


def fail_in_several_models(failing: list[int]) -> tuple[list[str], list[list[float | None]]]:
    """Two models in one backward. In the windows ``failing`` rank 0's backward fails behind both of them."""
    communicator = choose_communicator()
    models = [wrap(Fused()) for _ in range(2)]
    optimizers = [still(model) for model in models]
    told, seen = [], []
    for window in range(max(failing) + 3):
        lit = window in failing and communicator.rank == 0
        try:
            sum(model(number(communicator.rank + 1), lit) for model in models).backward()
            seen.append(gradients(models[0]) + gradients(models[1]))
        except (Explosion, PeerFailedError) as error:
            told.append(type(error).__name__)
            assert all(model.synchronizer.engine.phase is Phase.BROKEN for model in models)
        for model, optimizer in zip(models, optimizers, strict=True):
            model.zero_grad()
            optimizer.step()
    return told, seen


@in_threads_and_processes
@pytest.mark.parametrize("failing", [[0], [1], [2], [0, 1, 2], [3]])
def test_models_that_share_a_failed_backward_stay_in_step(ranks: Ranks, failing: list[int]) -> None:
    """A model that follows another must meet the other ranks, too: in these windows the order is agreed on."""
    mean = sum(range(1, ranks.world_size + 1)) / ranks.world_size
    for rank, (told, seen) in enumerate(ranks.run(fail_in_several_models, failing)):
        assert told == [("Explosion" if rank == 0 else "PeerFailedError")] * len(failing)
        assert seen == [[mean] * 4] * (max(failing) + 3 - len(failing))


def test_recovery_runs_where_backward_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a finalizer, where errors vanish: what goes wrong in it is noted on the error that the user sees."""

    def work() -> list[str]:
        model = wrap(Fused())
        monkeypatch.setattr(model.synchronizer.engine, "backward_failed", lost)
        with pytest.raises(Explosion) as caught:
            model(number(1), True).backward()
        return caught.value.__notes__

    def lost(forward_synchronizes: bool) -> None:
        raise ConnectionError("the link is gone")

    (notes,) = ThreadRanks(1).run(work)
    assert notes == ["gradsync could not tell the other ranks of it: the link is gone"]


def look_then_train() -> list[list[float | None]]:
    communicator = choose_communicator()
    model = wrap()
    optimizer = still(model)
    seen = []
    for _ in range(3):
        output = model(number(communicator.rank + 1))
        if communicator.rank == 0:
            # A penalty that only this rank computes, before the backward that counts.
            torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
            assert model.synchronizer.engine.phase is Phase.IDLE
        model.backward(output, weight=communicator.rank + 1)
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


@in_threads_and_processes
def test_gradients_that_are_only_looked_at_are_no_backward(ranks: Ranks) -> None:
    expected = [pytest.approx(mean_of("w", ranks.world_size + 1), rel=1e-12)] * 3
    for seen in ranks.run(look_then_train):
        assert seen == [expected] * 3


# -- failures on other ways -------------------------------------------------------------------------------------------


def fail_before_the_model() -> list[str]:
    """Rank 0's loss fails before its backward has reached the model."""
    communicator = choose_communicator()
    model = wrap()
    told = []
    for window in range(4):
        try:
            Fuse.apply(model(number(1)), window == 2 and communicator.rank == 0).backward()
            told.append("")
        except (Explosion, PeerFailedError) as error:
            told.append(type(error).__name__)
        model.zero_grad()
    return told


class Skipping(nn.Module):
    """One number, which a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.skips = self.explodes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1 if self.skips else Fuse.apply(x * self.number, self.explodes) * 1


def count_without_telling() -> list[Any]:
    """In the third window rank 0 counts a micro-batch that reaches nothing, when the sums are on their way."""
    model, rank, outcomes = wrap(Skipping()), choose_communicator().rank, []
    for window in range(5):
        model.zero_grad()
        model.module.skips = rank == 0 and window == 2
        try:
            with model.accumulate(last=True):
                model(number(rank + 1).requires_grad_()).backward()
            outcomes.append(gradients(model)[0])
        except (MisuseError, PeerFailedError) as error:
            outcomes.append(type(error).__name__)
    return outcomes


@in_threads_and_processes
def test_a_rank_that_cannot_be_right_tells_the_others(ranks: Ranks) -> None:
    """Nobody takes a mean for right to which one rank has refused its part."""
    mean = pytest.approx(sum(range(1, ranks.world_size + 1)) / ranks.world_size)
    for rank, (first, second, third, *others) in enumerate(ranks.run(count_without_telling)):
        assert [first, second, *others] == [mean] * 4
        assert third == ("MisuseError" if rank == 0 else "PeerFailedError")


class HandingOn(nn.Module):
    """Puts out what it was given, beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x * self.number


def fail_in(kind: str) -> list[str]:
    """In the third window the backward of rank 0 fails, on its way to a model that had not begun."""
    rank, outcomes = choose_communicator().rank, []
    first, second = wrap(Skipping()), wrap(HandingOn())
    for window in range(5):
        first.zero_grad()
        second.zero_grad()
        explodes = rank == 0 and window == 2
        output = first(number(1.0))
        if kind == "an output that is handed on":
            handed, other = second(output)
            loss = handed + Fuse.apply(other, explodes)
        elif kind == "a local forward":
            first.module.explodes = explodes
            with first.no_sync():
                loss = output + first(number(1.0))
            first.module.explodes = False
        else:
            loss = Fuse.apply(output, explodes)
        try:
            if kind == "an edge of the graph":
                torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss))
            else:
                loss.backward()
            outcomes.append("fine")
        except (Explosion, PeerFailedError) as error:
            outcomes.append(type(error).__name__)
    return outcomes


@in_threads_and_processes
@pytest.mark.parametrize("kind", ["an output that is handed on", "a local forward", "an edge of the graph"])
def test_a_backward_that_fails_on_an_unusual_way_is_told(ranks: Ranks, kind: str) -> None:
    for rank, outcomes in enumerate(ranks.run(fail_in, kind)):
        failed = "Explosion" if rank == 0 else "PeerFailedError"
        assert outcomes == ["fine", "fine", failed, "fine", "fine"]


def refused_in(kind: str) -> list[str]:
    """In the third window rank 0 is refused: after a local backward failed, or for what it has done to gradients."""
    model, rank, outcomes = wrap(Skipping()), choose_communicator().rank, []
    for window in range(5):
        differs = rank == 0 and window == 2
        model.zero_grad()
        try:
            with model.accumulate(last=False):
                output = model(number(1.0))
                output.backward()
                if differs and kind == "after a failure":
                    with contextlib.suppress(RuntimeError):
                        output.backward()
            if differs and kind == "zeroed in mid-window":
                model.module.zero_grad()
            if kind == "after a failure":
                with model.accumulate(last=True):
                    model(number(1.0)).backward()
            else:
                model.synchronize()
            outcomes.append("fine")
        except (MisuseError, PeerFailedError) as error:
            outcomes.append(type(error).__name__)
    return outcomes


@in_threads_and_processes
@pytest.mark.parametrize("kind", ["after a failure", "zeroed in mid-window"])
def test_a_rank_that_is_refused_tells_the_others(ranks: Ranks, kind: str) -> None:
    for rank, outcomes in enumerate(ranks.run(refused_in, kind)):
        assert outcomes == ["fine", "fine", "MisuseError" if rank == 0 else "PeerFailedError", "fine", "fine"]


def discard_after_meeting() -> list[Any]:
    """In the third window rank 0 gives up what it has told the others, and counts something else."""
    model, rank, outcomes = wrap(Skipping()), choose_communicator().rank, []
    for window in range(5):
        model.zero_grad()
        x = number(rank + 1).requires_grad_()
        try:
            if rank == 0 and window == 2:
                with model.accumulate(last=False):
                    pass
                model.module.skips = True
                model(x).backward()
                model.module.skips = False
                model.discard()
            model.backward(model(x), weight=10.0 if window < 2 else 30.0)
            outcomes.append(gradients(model)[0])
        except (MisuseError, PeerFailedError) as error:
            outcomes.append(type(error).__name__)
    return outcomes


@in_threads_and_processes
def test_what_was_told_is_not_forgotten_with_the_window(ranks: Ranks) -> None:
    mean = pytest.approx(sum(range(1, ranks.world_size + 1)) / ranks.world_size)
    for first, second, third, *others in ranks.run(discard_after_meeting):
        assert [first, second, *others] == [mean] * 4
        assert third in ("MisuseError", "PeerFailedError")


@in_threads_and_processes
def test_a_loss_that_fails_leaves_nobody_waiting(ranks: Ranks) -> None:
    for rank, told in enumerate(ranks.run(fail_before_the_model)):
        assert told == ["", "", "PeerFailedError" if rank else "Explosion", ""]
