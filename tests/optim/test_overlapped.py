"""Optimizers of any kind whose means travel behind the next forward, and the choice between that and plain steps."""

import copy
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from gradsync import DistributedDataParallel, OverlappedOptimizer, ShardedOptimizer
from gradsync.communicator import choose_communicator
from gradsync.core.reduction.auto import SIZES_CHOSEN_AFTER
from gradsync.errors import ConfigurationError, GradsyncError, MisuseError
from gradsync.optim.sharded.bucket_optimizer import BucketOptimizer
from gradsync.optim.sharded.gather import AwaitedParameter
from gradsync.optim.sharded.mode import DECIDED_AFTER, TRIALS
from tests.optim.training import (
    TINY,
    assert_as_plain,
    assert_same,
    batch,
    filled,
    in_threads_and_processes,
    net,
    parameters_of,
    take_steps,
    train_step,
)
from tests.ranks import Ranks, ThreadRanks, run_once

pytestmark = pytest.mark.timeout(120)


class Lamb(torch.optim.Optimizer):
    """Scales the update of a matrix by its norms; counts its steps in the group, as some do."""

    parameter_wise = True

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                ratio = parameter.norm() / momentum.norm().clamp(min=1e-9)
                parameter.add_(momentum, alpha=float(-group["lr"] * ratio / group["step"] ** 0.5))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


def vectors(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() != 2]


def both(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Muon(matrices(model), lr=1e-2), torch.optim.AdamW(vectors(model), lr=1e-2)]


def lamb(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [Lamb([{"params": matrices(model)}, {"params": vectors(model), "lr": 2e-2}])]


def two_lambs(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Whose parameters lie in other buckets, so that not all updates have some of both."""
    parameters = list(model.parameters())
    return [Lamb(parameters[:2]), Lamb(parameters[2:])]


Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


class Several:
    """Plain optimizers, as one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)


def wrapped(bucket_cap_mb: Any = TINY) -> DistributedDataParallel:
    return DistributedDataParallel(net(), bucket_cap_mb=bucket_cap_mb)


def train(kind: str, make: Make, steps: int, bucket_cap_mb: Any = TINY) -> tuple[list[torch.Tensor], list[Any]]:
    rank, model = choose_communicator().rank, wrapped(bucket_cap_mb)
    optimizers = make(model)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) for optimizer in optimizers]
    optimizer: Any = Several(optimizers) if kind == "plain" else OverlappedOptimizer(optimizers, model)
    for step in range(steps):
        for micro in model.accumulate(range(3)):
            model(batch(rank, step, micro)).square().mean().backward()
        model.clip_grad_norm_(0.05)
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        optimizer.zero_grad(set_to_none=bool(step % 3))
    if kind != "plain":
        optimizer.flush()
    groups = [{key: value for key, value in g.items() if key != "params"} for o in optimizers for g in o.param_groups]
    return parameters_of(model), groups


@pytest.mark.parametrize("make", [both, lamb, two_lambs])
@pytest.mark.parametrize(
    ("ranks", "bucket_cap_mb"),
    [
        (("threads", 3), TINY),
        (("processes", 2), TINY),
        pytest.param(("processes", 3), "auto", marks=pytest.mark.breadth),
    ],
    indirect=["ranks"],
    ids=["threads-3", "processes-2", "processes-3-auto"],
)
def test_it_trains_to_the_parameters_of_plain_optimizers(ranks: Ranks, make: Make, bucket_cap_mb: Any) -> None:
    """With schedules, clipping, windows of three micro-batches, and numbers that an optimizer keeps in its groups."""
    theirs, groups = ranks.run(train, "plain", make, 12, bucket_cap_mb)[0]
    ours = ranks.run(train, "overlapped", make, 12, bucket_cap_mb)
    assert_same([mine for mine, _ in ours], theirs)
    assert ours[0][1] == groups


def wait_for_means() -> None:
    model = wrapped()
    optimizer = OverlappedOptimizer(both(model), model)
    take_steps(model, optimizer, range(4))
    assert all(type(p) is AwaitedParameter for p in model.parameters())
    first = next(model.parameters())
    before = optimizer._shadows[id(first)].itself.detach().clone()
    assert not torch.equal(first.detach(), before)
    optimizer.flush()
    assert all(type(p) is nn.Parameter for p in model.parameters())


@in_threads_and_processes
def test_after_a_step_parameters_wait_for_their_means(ranks: Ranks) -> None:
    ranks.run(wait_for_means)


def with_unused(kind: str) -> list[torch.Tensor]:
    """A layer is used every other step; a gradient is replaced by another, and zeroed after the step."""
    rank = choose_communicator().rank
    module = nn.ModuleList([filled(nn.Linear(7, 7).double()) for _ in range(3)])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module

        def forward(self, x: torch.Tensor, *, third: bool) -> torch.Tensor:
            x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
            return self.layers[2](x) if third else x

    model = DistributedDataParallel(Model(), bucket_cap_mb=TINY)
    # The last layer has an optimizer of its own, which counts steps in which it has nothing to do.
    optimizers = [Lamb(module[:2].parameters()), Lamb(module[2].parameters())]
    optimizer: Any = Several(optimizers) if kind == "plain" else OverlappedOptimizer(optimizers, model)
    for step in range(6):
        model(batch(rank, step), third=step % 2 == 0).square().mean().backward()
        weight = model.module.layers[0].weight
        replaced = torch.full_like(weight, 0.25)
        weight.grad = replaced
        optimizer.step()
        replaced.zero_()
        optimizer.zero_grad()
    return parameters_of(model)


@in_threads_and_processes
def test_unused_parameters_and_replaced_gradients_are_as_ever(ranks: Ranks) -> None:
    assert_as_plain(ranks, with_unused, kind="overlapped")


def trained_and_saved(steps: int, state: dict[str, Any] | None, kind: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    model = wrapped()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2)]
    optimizer: Any = optimizers[0] if kind == "plain" else OverlappedOptimizer(optimizers, model)
    first = 0
    if state is not None:
        # Ranks that are threads would update one tensor.
        state = copy.deepcopy(state)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = 5
    take_steps(model, optimizer, range(first, first + steps))
    saved = {"model": copy.deepcopy(model.module.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}
    return parameters_of(model), saved


@pytest.mark.parametrize("writer", ["plain", "overlapped"])
@pytest.mark.parametrize("reader", ["plain", "overlapped"])
@in_threads_and_processes
def test_states_are_those_of_a_plain_optimizer(ranks: Ranks, writer: str, reader: str) -> None:
    _, state = ranks.run(trained_and_saved, 5, None, writer)[0]
    _, plain = run_once(ranks, trained_and_saved, 5, None, "plain")[0]
    assert state["optimizer"].keys() == plain["optimizer"].keys()
    assert state["optimizer"]["state"].keys() == plain["optimizer"]["state"].keys()
    whole, _ = run_once(ranks, trained_and_saved, 9, None, "plain")[0]
    assert_same([mine for mine, _ in ranks.run(trained_and_saved, 4, state, reader)], whole)


def test_states_of_several_optimizers_are_loaded_one_after_the_other() -> None:
    def work() -> None:
        model, twin = wrapped(), wrapped()
        optimizer, other = OverlappedOptimizer(both(model), model), OverlappedOptimizer(both(twin), twin)
        rank = choose_communicator().rank
        for step in range(8):
            train_step(model, optimizer, batch(rank, step))
            if step == 3:
                twin.module.load_state_dict(model.module.state_dict())
                other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif step > 3:
                train_step(twin, other, batch(rank, step))
        assert all(map(torch.equal, parameters_of(model), parameters_of(twin)))

    ThreadRanks(2).run(work)


class Undeclared(torch.optim.Optimizer):
    """May look at all gradients at once, for what anybody knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


class Fragile(Lamb):
    """Raises in the middle of an update."""

    raises, times = False, 0

    def step(self, closure: Any = None) -> None:
        super().step()
        if self.raises:
            self.times += 1
            raise RuntimeError("out of luck")


def zero_behind_the_step() -> list[bool]:
    """Whether means that were zeroed in place after a step count as changed, before others are written over them."""
    rank, model = choose_communicator().rank, wrapped()
    optimizer = OverlappedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    found = []
    for step in range(4):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        found.append(model.synchronizer.window._snapshot.is_unchanged)
        optimizer.flush()
    return found


def test_means_that_are_zeroed_behind_a_step_are_changed_at_once(ranks: Ranks) -> None:
    for found in ranks.run(zero_behind_the_step):
        assert not any(found)


def raise_in_an_update() -> tuple[list[str], int]:
    rank, model = choose_communicator().rank, wrapped()
    optimizer = OverlappedOptimizer(Fragile(model.parameters()), model)
    told = []
    for step in range(3):
        if step == 2:
            optimizer._inner[0].raises = rank == 0
        try:
            train_step(model, optimizer, batch(rank, step))
        except (RuntimeError, GradsyncError) as error:
            told.append(str(error))
    for _ in range(2):
        try:
            optimizer.flush()
        except (RuntimeError, GradsyncError) as error:
            told.append(str(error))
    if not told:
        with pytest.raises(GradsyncError) as raised:
            model(batch(rank, 3)).square().mean().backward()
            optimizer.step()
        told.append(str(raised.value))
    return told, optimizer._inner[0].times


def test_an_optimizer_that_raises_is_not_run_again_and_all_ranks_hear_of_it() -> None:
    told = ThreadRanks(3).run(raise_in_an_update)
    assert told[0] == (["out of luck"] * 3, 1)
    assert all("out of luck" in words[0] and not times for words, times in told[1:])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda model: OverlappedOptimizer([], model), "at least one optimizer"),
        (lambda model: OverlappedOptimizer(torch.optim.LBFGS(model.parameters()), model), "closure several times"),
        (lambda model: OverlappedOptimizer(net(), model), "got Sequential"),
        (lambda model: OverlappedOptimizer(Undeclared(model.parameters()), model), "Undeclared.parameter_wise = True"),
        (lambda model: OverlappedOptimizer(both(model), model, mode="later"), "got 'later'"),
        (
            lambda model: ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, mode="often"),
            "got 'often'",
        ),
        (lambda model: OverlappedOptimizer(torch.optim.SGD(net().parameters()), model), "does not belong"),
        (lambda model: OverlappedOptimizer(both(model), net()), "gradients gradsync averages"),
    ],
    ids=["none", "lbfgs", "module", "undeclared", "mode", "mode-sharded", "foreign", "unwrapped"],
)
def test_what_cannot_be_honoured_is_refused_and_nothing_is_left(wrong: Callable[[Any], Any], words: str) -> None:
    def work() -> None:
        model = wrapped()
        with pytest.raises(ConfigurationError, match=words):
            wrong(model)
        first = OverlappedOptimizer(both(model), model)
        with pytest.raises(ConfigurationError, match="another sharded optimizer"):
            OverlappedOptimizer(both(model), model)
        with pytest.raises(ConfigurationError, match="works in the buckets already"):
            OverlappedOptimizer(first, model)
        first.close()
        with pytest.raises(MisuseError, match="was closed"):
            first.step()
        # Means are whole again.
        model(batch(0, 0)).square().mean().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)

    ThreadRanks(2).run(work)


@pytest.mark.parametrize("mode", ["next-forward", "plain"])
def test_the_originals_refuse_until_they_have_their_state_back(mode: Any) -> None:
    def work() -> None:
        model = wrapped()
        original = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = OverlappedOptimizer(original, model, mode=mode)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)
        for step in range(3):
            model(batch(choose_communicator().rank, step)).square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        for call in (original.step, original.state_dict, lambda: original.load_state_dict({})):
            with pytest.raises(MisuseError, match="which has its state"):
                call()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.close()
        assert original.state_dict()["param_groups"] == saved["param_groups"]
        for ours, theirs in zip(original.state_dict()["state"].values(), saved["state"].values(), strict=True):
            assert all(torch.equal(ours[key], theirs[key]) for key in ours | theirs)
        original.step()

    ThreadRanks(2).run(work)


@pytest.mark.parametrize("mode", ["plain", "next-forward"])
def test_added_groups_keep_their_state_when_it_closes(mode: Any) -> None:
    def work() -> None:
        rank, model = choose_communicator().rank, wrapped()
        parameters = list(model.parameters())
        originals = [torch.optim.SGD(parameters[:2], lr=0.1, momentum=0.9), torch.optim.AdamW(parameters[2:-2])]
        optimizer = OverlappedOptimizer(originals, model, mode=mode)
        for step in range(4):
            train_step(model, optimizer, batch(rank, step))
            if step == 1:
                optimizer.add_param_group({"params": parameters[-2:], "lr": 3e-3})
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.close()
        assert [len(group["params"]) for group in originals[1].param_groups] == [len(parameters) - 4, 2]
        assert originals[1].param_groups[-1]["lr"] == 3e-3
        states = [state for original in originals for state in original.state_dict()["state"].values()]
        assert len(states) == len(parameters) == len(saved["state"])
        for ours, theirs in zip(states, saved["state"].values(), strict=True):
            assert all(torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])) for key in ours | theirs)
        model(batch(rank, 4)).square().mean().backward()
        for original in originals:
            original.step()

    ThreadRanks(2).run(work)


def test_an_interrupted_close_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    close = BucketOptimizer.close

    def close_and_interrupt(self: BucketOptimizer) -> None:
        was_open = not self._is_closed
        close(self)
        if was_open:
            raise KeyboardInterrupt

    monkeypatch.setattr(BucketOptimizer, "close", close_and_interrupt)

    def work() -> None:
        model = wrapped()
        original = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = OverlappedOptimizer(original, model)
        model(batch(choose_communicator().rank, 0)).square().mean().backward()
        optimizer.step()
        model.zero_grad()
        with pytest.raises(KeyboardInterrupt):
            optimizer.close()
        optimizer.close()
        assert len(original.state_dict()["state"]) == len(list(model.parameters()))
        # Once only: by now it may have gone on.
        original.state.clear()
        optimizer.close()
        assert not original.state

    ThreadRanks(2).run(work)


def test_the_state_may_be_asked_for_while_a_group_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread."""
    take_group, seen = OverlappedOptimizer._take_group, list[int]()

    def ask_first(self: OverlappedOptimizer, group: dict[str, Any]) -> None:
        asking = threading.Thread(target=lambda: seen.append(len(self.state_dict()["state"])))
        asking.start()
        asking.join()
        take_group(self, group)

    monkeypatch.setattr(OverlappedOptimizer, "_take_group", ask_first)

    def work() -> None:
        rank, model = choose_communicator().rank, wrapped()
        parameters = list(model.parameters())
        optimizer = OverlappedOptimizer(torch.optim.SGD(parameters[:-2], lr=0.1, momentum=0.9), model)
        model(batch(rank, 0)).square().mean().backward()
        optimizer.step()
        model.zero_grad()
        optimizer.add_param_group({"params": parameters[-2:]})

    ThreadRanks(2).run(work)
    assert len(seen) == 2
    assert all(seen)


def step_as_one_likes(kind: str, mode: Any) -> list[torch.Tensor]:
    """Gradients are zeroed in place, kept, and used twice; a parameter is in no optimizer."""
    rank, model = choose_communicator().rank, wrapped()
    given = list(model.parameters())[:-1]
    plain = torch.optim.AdamW(given, lr=1e-2)
    optimizer: Any = plain if kind == "plain" else OverlappedOptimizer(plain, model, mode=mode)
    for step in range(6):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        if mode == "plain" and step == 3:
            optimizer.step()
            continue
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return parameters_of(model)


@pytest.mark.parametrize(("ranks", "mode"), [(2, "plain"), (1, "next-forward"), (2, "next-forward")])
def test_gradients_may_be_zeroed_and_used_as_ever(ranks: int, mode: str) -> None:
    world = ThreadRanks(ranks)
    assert_as_plain(world, step_as_one_likes, mode, kind="overlapped")


@pytest.mark.parametrize("kind", ["sharded", "overlapped"])
def test_who_raises_before_anything_is_sent_tells_the_others(kind: str) -> None:
    """An optimizer of a sparse parameter, which has no place in a bucket; or a hook."""

    def work() -> str:
        rank = choose_communicator().rank
        module = nn.Sequential(nn.EmbeddingBag(5, 4, sparse=True), nn.Linear(4, 2)).double()
        model = DistributedDataParallel(filled(module))
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer: Any = ShardedOptimizer(plain, model) if kind == "sharded" else OverlappedOptimizer(plain, model)

        def stumble(*_: Any) -> None:
            if rank == 1:
                raise RuntimeError("stumbled")

        inner = optimizer._outside if kind == "sharded" else plain
        inner.register_step_pre_hook(stumble)
        try:
            for _ in range(2):
                model(torch.tensor([[rank, 3]])).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.flush()
        except RuntimeError as error:
            return str(error)
        return ""

    told = ThreadRanks(2).run(work)
    assert "rank 1" in told[0]
    assert "stumbled" in told[0]
    assert told[1] == "stumbled"


# -- plain, or behind the next forward -------------------------------------------------------------------------------


class Clock:
    """Windows take so long, in seconds, by what they are reduced with."""

    def __init__(self, plain: float, behind: float) -> None:
        self._seconds = {False: plain, True: behind}
        self._now = 0.0
        self.optimizer: Any = None

    def __call__(self) -> float:
        self._now += self._seconds[self.optimizer.choice.scatters]
        return self._now


def choose(kind: str, clock: Clock | None, steps: int, state: Any = None) -> dict[str, Any]:
    rank, model = choose_communicator().rank, wrapped()
    options = {"lr": 1e-2}
    if kind == "plain":
        optimizer: Any = torch.optim.AdamW(model.parameters(), **options)
    elif kind == "overlapped":
        optimizer = OverlappedOptimizer(torch.optim.AdamW(model.parameters(), **options), model, mode="auto")
    else:
        optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters(), **options), model, mode="auto")
    if clock is not None:
        clock = copy.deepcopy(clock)
        clock.optimizer = optimizer
        optimizer.choice._watch.clock = clock
    if state is not None:
        optimizer.choice.load_state_dict(state)
    scattered = []
    for step in range(steps):
        model(batch(rank, step)).square().mean().backward()
        scattered.append(model.synchronizer.reduction.scatters)
        optimizer.step()
        optimizer.zero_grad()
    found = {"parameters": parameters_of(model), "scattered": scattered}
    if clock is not None:
        found |= {"chosen": optimizer.choice.chosen, "report": optimizer.choice.report}
        found["saved"] = model.synchronizer.reduction.state_dict()
    return found


@pytest.mark.parametrize("kind", ["sharded", "overlapped"])
@pytest.mark.parametrize(("plain", "behind", "chosen"), [(2.0, 1.0, "next-forward"), (1.0, 0.995, "plain")])
@in_threads_and_processes
def test_auto_takes_what_is_faster_and_stays_exact(
    ranks: Ranks, kind: str, plain: float, behind: float, chosen: str
) -> None:
    """The state moves from every rank to its owner and back, through all trials."""
    steps = DECIDED_AFTER + 3
    theirs = run_once(ranks, choose, "plain", None, steps)[0]
    ours = ranks.run(choose, kind, Clock(plain, behind), steps)
    assert_same([mine["parameters"] for mine in ours], theirs["parameters"])
    tried = [number for number, scattered in enumerate(ours[0]["scattered"]) if scattered]
    # Windows are counted from nought, and a trial begins in the window in which the one before it ends.
    first, end = SIZES_CHOSEN_AFTER + TRIALS[0] - 1, SIZES_CHOSEN_AFTER + TRIALS[1] - 1
    assert tried[: end - first] == list(range(first, end))
    assert ours[0]["scattered"][-1] is (chosen == "next-forward")
    assert {mine["chosen"] for mine in ours} == {chosen}
    assert ("overlaps the next forward from now on: 1000.0 ms" in ours[0]["report"]) is (chosen == "next-forward")
    assert ("steps wait for the whole mean from now on: 1000.0 ms" in ours[0]["report"]) is (chosen == "plain")


def test_a_choice_is_loaded_and_not_made_again() -> None:
    ranks = ThreadRanks(2)
    saved = ranks.run(choose, "sharded", Clock(2.0, 1.0), DECIDED_AFTER + 2)[0]["saved"]
    assert saved["chosen"] == "next-forward"
    loaded = ranks.run(choose, "sharded", Clock(1.0, 2.0), 5, saved)
    assert all(each["chosen"] == "next-forward" and all(each["scattered"]) for each in loaded)


def test_auto_says_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gradsync"):
        ThreadRanks(2).run(choose, "sharded", Clock(2.0, 1.0), DECIDED_AFTER + 2)
    assert [record.getMessage() for record in caplog.records] == [
        "mode auto: communication overlaps the next forward from now on: 1000.0 ms per step instead of 2000.0 ms"
    ]


def test_plain_steps_have_whole_means_and_whole_states() -> None:
    def work() -> None:
        model = wrapped()
        optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model, mode="plain")
        model(batch(choose_communicator().rank, 0)).square().mean().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        assert not any(type(p) is AwaitedParameter for p in model.parameters())
        optimizer.consolidate()
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))

    ThreadRanks(2).run(work)


# -- states that differ in kind ----------------------------------------------------------------------------------------


def narrow(kind: str, state: Any, steps: int) -> tuple[list[torch.Tensor], Any]:
    """Parameters of bfloat16 with means of float32, which a sharded optimizer updates in float32."""
    rank, state = choose_communicator().rank, copy.deepcopy(state)
    model = DistributedDataParallel(net().bfloat16(), bucket_cap_mb=TINY, accumulation_dtype=torch.float32)
    mode: Any = "plain" if kind == "unshared" else "next-forward"
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind != "plain":
        optimizer = ShardedOptimizer(optimizer, model, mode=mode)
    if state is not None:
        optimizer.load_state_dict(state)
    for step in range(steps):
        train_step(model, optimizer, batch(rank, step).bfloat16())
    if kind != "plain":
        optimizer.consolidate()
    return parameters_of(model), copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("writer", ["plain", "sharded", "unshared"])
@pytest.mark.parametrize("reader", ["plain", "sharded", "unshared"])
def test_states_of_narrow_parameters_go_from_each_kind_to_each(writer: str, reader: str) -> None:
    ranks = ThreadRanks(2)
    _, state = ranks.run(narrow, writer, None, 3)[0]
    results = ranks.run(narrow, reader, state, 2)
    for parameters, later in results:
        assert all(map(torch.equal, parameters, results[0][0]))
        assert all(float(each["step"]) == 5 for each in later["state"].values())
        kept = later["state"][0]["exp_avg"].dtype
        assert kept == (torch.float32 if reader == "sharded" else torch.bfloat16)


def sparse_with_momentum(kind: str) -> tuple[list[torch.Tensor], Any]:
    rank = choose_communicator().rank
    model = DistributedDataParallel(filled(nn.Sequential(nn.EmbeddingBag(5, 4, sparse=True), nn.Linear(4, 2)).double()))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "sharded":
        optimizer = ShardedOptimizer(optimizer, model)
    for step in range(3):
        model(torch.tensor([[rank, (step + 2) % 5]])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if kind == "sharded":
        optimizer.consolidate()
    return parameters_of(model), optimizer.state_dict()["state"][0]["momentum_buffer"]


def test_a_sparse_momentum_is_saved() -> None:
    theirs, momentum = ThreadRanks(2).run(sparse_with_momentum, "plain")[0]
    ours = ThreadRanks(2).run(sparse_with_momentum, "sharded")
    assert_same([mine for mine, _ in ours], theirs)
    assert all(torch.equal(mine, momentum.to_dense()) for _, mine in ours)


def skip_some(kind: str, on_bad_step: Any) -> list[torch.Tensor]:
    """A rank abstains from one window and has NaN in another."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY, on_bad_step=on_bad_step)
    optimizers = both(model)
    optimizer: Any = Several(optimizers) if kind == "plain" else OverlappedOptimizer(optimizers, model)
    for step in range(8):
        if step == 3 and rank == 1:
            model.abstain("nothing to learn")
        else:
            x = batch(rank, step)
            model(x * float("nan") if step == 5 and rank == 0 else x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model)


@pytest.mark.parametrize("on_bad_step", ["skip", "drop-rank"])
@in_threads_and_processes
def test_rejected_windows_are_as_with_plain_optimizers(ranks: Ranks, on_bad_step: str) -> None:
    theirs = ranks.run(skip_some, "plain", on_bad_step)[0]
    assert all(torch.isfinite(each).all() for each in theirs)
    assert_same(ranks.run(skip_some, "overlapped", on_bad_step), theirs)
