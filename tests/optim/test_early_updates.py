"""Shares that are updated and gathered before ``step()``: it takes them where it would have made the same, to the bit,
and leaves no trace of them where it would not."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradsync import DistributedDataParallel
from gradsync.communicator import choose_communicator
from gradsync.errors import MisuseError, PeerFailedError
from gradsync.optim.sharded import ShardedOptimizer, gather_pipeline
from gradsync.optim.sharded.pace import MEASURE, SETTLE, Pace, Times, plan_early
from tests.optim.test_sharded import assert_same, batch, filled, groups_of, make, parameters_of
from tests.ranks import Ranks, ThreadRanks

pytestmark = pytest.mark.timeout(120)

in_threads_and_processes = pytest.mark.parametrize(
    "ranks", [("threads", 3), ("processes", 2)], indirect=True, ids="{0[0]}-{0[1]}".format
)


# A layer is a bucket.
TINY = 7e-4


class AtOnce(Pace):
    """As if it had been measured in the first window that the forward is too short for ``part`` of the gathers."""

    def __init__(self, part: float) -> None:
        super().__init__()
        self._part, self._has_agreed = part, False

    def restart(self) -> None:
        super().restart()
        self._has_agreed = False

    def window_began(self) -> bool:
        is_first, self._has_agreed = not self._has_agreed, True
        return is_first

    def agree(self, communicator: Any) -> Times:
        return Times(forward=1 - self._part, backward=100, gathers=1)


class Branches(nn.Module):
    """A chain of layers, of which the middle one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(7))
        self.skipped: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != self.skipped:
                x = torch.tanh(layer(x))
        return x


def wrapped(wire: str = "auto", **settings: Any) -> DistributedDataParallel:
    given = choose_communicator() if wire == "group" else None
    return DistributedDataParallel(
        filled(Branches().double()), bucket_cap_mb=TINY, communicator=given, find_unused_parameters=True, **settings
    )


def optimizer_for(
    kind: str,
    part: float,
    model: DistributedDataParallel,
    settings: dict[str, Any],
    *,
    pause: int = 0,
) -> Any:
    optimizer = make(kind, settings.pop("optimizer", torch.optim.AdamW), model, groups_of(model), lr=1e-2, **settings)
    if kind == "sharded":
        optimizer._gather_pipeline.pace, optimizer._gather_pipeline.early.pause = AtOnce(part), pause
    return optimizer


Disturb = Callable[[DistributedDataParallel, Any, int, int], None]


def train(
    kind: str,
    part: float = 1.0,
    disturb: Disturb | None = None,
    wire: str = "auto",
    every: int = 2,
    pause: int = 0,
    **settings: Any,
) -> tuple[list[torch.Tensor], int, int]:
    """Parameters after some steps, and how many took early updates, or undid them."""
    rank = choose_communicator().rank
    model = wrapped(wire)
    optimizer = optimizer_for(kind, part, model, settings, pause=pause)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    for step in range(12):
        model(batch(rank, step, width=9)).square().mean().backward()
        if disturb is not None and step % every == every - 1:
            disturb(model, optimizer, rank, step)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    parameters = parameters_of(model)
    told = optimizer._gather_pipeline.early if kind == "sharded" else None
    return parameters, getattr(told, "held", 0), getattr(told, "undone", 0)


# -- they hold --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "wire", "settings"),
    [
        pytest.param(ranks, wire, settings, id=f"{settings_id}-{ranks_id}", marks=marks)
        for ranks, wire, ranks_id in (
            (("threads", 3), "auto", "threads-3"),
            (("processes", 2), "auto", "processes-2"),
            (("processes", 3), "group", "processes-3-group"),
        )
        for settings, settings_id in (
            ({}, "AdamW"),
            ({"optimizer": torch.optim.SGD, "momentum": 0.9}, "SGD"),
            ({"optimizer": torch.optim.NAdam}, "NAdam"),
        )
        for marks in [() if settings_id == "AdamW" and ranks_id != "processes-3-group" else pytest.mark.breadth]
    ],
    indirect=["ranks"],
)
def test_early_and_late_updates_are_the_same(ranks: Ranks, wire: str, settings: dict[str, Any]) -> None:
    late = ranks.run(train, "sharded", 0.0, None, wire, **settings)
    for part in (0.4, 1.0):
        ours = ranks.run(train, "sharded", part, None, wire, **settings)
        for (mine, held, undone), (theirs, none, _) in zip(ours, late, strict=True):
            assert all(map(torch.equal, mine, theirs))
            # The order is learned in the first window, and buckets are laid out by it.
            assert held >= 10
            assert undone == none == 0
    plain = ranks.run(train, "plain", 0.0, None, wire, **settings)[0]
    assert_same([each[0] for each in late], plain[0])


def change_rates(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 1 + 0.1 * step


def clip(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    model.clip_grad_norm_(0.01)


@pytest.mark.parametrize("disturb", [None, change_rates, clip])
@in_threads_and_processes
def test_all_may_be_early(ranks: Ranks, disturb: Disturb | None) -> None:
    """Also what the next forward needs first: it is sent before the others are updated, unless it is early."""
    theirs = ranks.run(train, "plain", 1.0, disturb)[0][0]
    ours = ranks.run(train_all_early, disturb)
    assert_same([each for each, _, _ in ours], theirs)
    assert all(held >= 4 for _, held, _ in ours)
    assert all(bool(undone) is (disturb is not None) for _, _, undone in ours)


def train_all_early(disturb: Disturb | None) -> tuple[list[torch.Tensor], int, int]:
    with all_early():
        return train("sharded", 1.0, disturb)


_patching = threading.Lock()
_patched = 0


@contextmanager
def all_early() -> Iterator[None]:
    """Ranks may be threads."""
    global _patched
    with _patching:
        _patched += 1
        gather_pipeline.plan_early = lambda times, sizes, gathered: range(len(sizes))
    try:
        yield
    finally:
        with _patching:
            _patched -= 1
            if not _patched:
                gather_pipeline.plan_early = plan_early


def train_scaled(kind: str) -> tuple[list[torch.Tensor], int]:
    rank, model, scaler = choose_communicator().rank, wrapped(), torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = optimizer_for(kind, 1.0, model, {})
    for step in range(6):
        scaler.scale(model(batch(rank, step, width=9)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return parameters_of(model), optimizer._gather_pipeline.early.undone if kind == "sharded" else 0


@in_threads_and_processes
def test_scaled_gradients_are_not_what_a_step_uses(ranks: Ranks) -> None:
    """torch's own version counters do not tell that a GradScaler has divided them by its scale."""
    theirs = ranks.run(train_scaled, "plain")[0][0]
    ours = ranks.run(train_scaled, "sharded")
    assert_same([each for each, _ in ours], theirs)
    assert all(undone > 0 for _, undone in ours)


def train_otherwise(kind: str, part: float, how: str) -> tuple[list[torch.Tensor], int, int]:
    """Through a narrower wire; in windows whose weights are known late; with narrow parameters and wide shares."""
    rank = choose_communicator().rank
    settings = {"narrow wire": {"reduction": "bf16"}, "narrow parameters": {"accumulation_dtype": torch.float32}}
    narrow = how == "narrow parameters"
    module = filled(Branches().to(torch.bfloat16 if narrow else torch.float32))
    model = DistributedDataParallel(module, bucket_cap_mb=TINY, **settings.get(how, {}))
    optimizer = optimizer_for(kind, part, model, {})
    for step in range(8):
        x = batch(rank, step, width=9).to(next(module.parameters()).dtype)
        if how == "late weights":
            for micro in model.accumulate(range(2)):
                model.backward(model(x * (1 + micro)).square().sum(), weight=1.0 + (rank + step + micro) % 3)
        else:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model), optimizer._gather_pipeline.early.held, optimizer._gather_pipeline.early.undone


@pytest.mark.parametrize("how", ["narrow wire", "narrow parameters", "late weights"])
@in_threads_and_processes
def test_other_roads_lead_to_the_same_bits(ranks: Ranks, how: str) -> None:
    late = ranks.run(train_otherwise, "sharded", 0.0, how)
    early = ranks.run(train_otherwise, "sharded", 1.0, how)
    for (mine, held, undone), (theirs, _, _) in zip(early, late, strict=True):
        assert all(map(torch.equal, mine, theirs))
        assert held + undone >= 6


# -- they do not ------------------------------------------------------------------------------------------------------


def change_options(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.7


def clip_values(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def clip_norms(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def clip_our_norms(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    model.clip_grad_norm_(1e-2)


def change_parameters(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    for parameter in model.parameters():
        # Which no version tells of.
        parameter.data.mul_(0.9)


def replace_gradients(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    parameter = list(model.parameters())[step % 14]
    parameter.grad = torch.full_like(parameter, 0.1)


def zero_gradients(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)


def drop_gradients(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()


def drop_one_gradient(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    list(model.parameters())[step % 14].grad = None


def add_a_backward(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    model(batch(rank, 100 + step, width=9)).square().mean().backward()


def skip_a_step(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    drop_gradients(model, optimizer, rank, step)
    add_a_backward(model, optimizer, rank, step)


def skip_a_layer(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    """In the next window, on all ranks."""
    model.module.skipped = step % 7


def consolidate(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.consolidate()
        optimizer.load_state_dict(optimizer.state_dict())


def look_alone(model: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    """One rank does something that changes no number, but might have."""
    if rank == step // 2 % 2:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1.0)


@pytest.mark.breadth
@pytest.mark.parametrize(
    "disturb",
    [
        *(change_options, clip_values, clip_norms, clip_our_norms, change_parameters, replace_gradients),
        *(zero_gradients, drop_gradients, drop_one_gradient, add_a_backward, skip_a_step, skip_a_layer),
        *(consolidate, look_alone),
    ],
    ids=lambda disturb: disturb.__name__,
)
@in_threads_and_processes
def test_what_comes_between_backward_and_step_counts(ranks: Ranks, disturb: Disturb) -> None:
    theirs, _, _ = ranks.run(train, "plain", 0.0, disturb)[0]
    ours = ranks.run(train, "sharded", 0.7, disturb)
    assert_same([parameters for parameters, _, _ in ours], theirs)
    # Not all gradients belong to early shares. One of the user's own is averaged first, in a window of its own.
    fewest = {replace_gradients: 0, drop_one_gradient: 1, skip_a_layer: 1, skip_a_step: 0, add_a_backward: 0}.get(
        disturb, 5
    )
    for _, held, undone in ours:
        assert held >= 5, "those in between hold"
        assert undone >= fewest


@in_threads_and_processes
def test_a_pause_follows_what_was_undone(ranks: Ranks) -> None:
    for _, held, undone in ranks.run(train, "sharded", 1.0, clip_norms, every=1, pause=2):
        # In steps 1, 3 and 7: pauses take 1, 3 and 7 more.
        assert (held, undone) == (0, 3)


# -- failures ---------------------------------------------------------------------------------------------------------


class Faulty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Branches()
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            x = x.requires_grad_()
            x.register_hook(_fail)
        return self.layers(x)


def _fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("a fault in backward")


def fail_a_backward(kind: str) -> list[torch.Tensor]:
    rank = choose_communicator().rank
    faulty = Faulty().double()
    model = DistributedDataParallel(filled(faulty), bucket_cap_mb=TINY)
    optimizer = optimizer_for(kind, 1.0, model, {})
    for step in range(9):
        faulty.fails = rank == 1 and step % 3 == 2
        try:
            model(batch(rank, step, width=9)).square().mean().backward()
        except (RuntimeError, PeerFailedError):
            # All have updated shares by then, with means of which nothing is to stay.
            optimizer.zero_grad()
            continue
        assert step % 3 != 2
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model)


@in_threads_and_processes
def test_of_a_failed_backward_nothing_stays(ranks: Ranks) -> None:
    theirs = ranks.run(fail_a_backward, "plain")[0]
    assert_same(ranks.run(fail_a_backward, "sharded"), theirs)


def raise_in_an_update() -> list[str]:
    rank, step = choose_communicator().rank, 0

    class Raising(torch.optim.SGD):
        element_wise = True

        def step(self, closure: Any = None) -> Any:
            if rank == 1 and step >= 2:
                raise ArithmeticError("no update today")
            return super().step(closure)

    model = wrapped("group")
    optimizer = optimizer_for("sharded", 1.0, model, {"optimizer": Raising})
    errors = []
    for step in range(4):
        try:
            model(batch(rank, step, width=9)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        except (ArithmeticError, PeerFailedError, MisuseError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_an_update_that_raises_is_told_to_all_and_ends_the_wire() -> None:
    for errors in ThreadRanks(2).run(raise_in_an_update):
        assert len(errors) == 2, "what is broken stays broken"
        assert "ArithmeticError: no update today" in errors[0]


# -- when, and which --------------------------------------------------------------------------------------------------


@given(
    st.tuples(*[st.floats(0, 10)] * 3),
    st.lists(st.integers(1, 1000), min_size=1, max_size=30),
    st.sampled_from((0.5, 1.0)),
)
def test_early_gathers_fit_into_the_time_there_is(
    measured: tuple[float, ...], sizes: list[int], gathered: float
) -> None:
    times = Times(**dict(zip(("forward", "backward", "gathers"), measured, strict=True)))
    early = plan_early(times, sizes, gathered=gathered)
    seconds = [times.gathers * size / sum(sizes) for size in sizes]
    assert len(sizes) - 1 not in early, "needed at once, and there is nothing behind which it could travel"
    between = sum(seconds[place] for place in early)
    assert between <= max(0.0, times.backward - sum(seconds[:-1]) / gathered) + 1e-9
    assert between <= max(0.0, times.gathers - times.forward) + 1e-9
    # They are spread: never is more of them done than their part of what was reduced.
    part = (times.gathers - times.forward) / times.gathers if early else 0.0
    for end in early:
        assert sum(seconds[place] for place in early if place <= end) <= part * sum(seconds[: end + 1]) + 1e-9


class Alone:
    """A communicator of one rank, for what it needs here."""

    world_size = 1
    device = torch.device("cpu")

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        return self

    def wait(self) -> None:
        return


class Gathering:
    """A gather that ends when the test says so."""

    def when_done(self, callback: Callable[[], None]) -> None:
        self.end = callback


def plan_for(*, forward: float, backward: float, wire: float, buckets: int = 12) -> list[int]:
    """What is chosen where all buckets are ready one after the other, and gathers are half of what the wire does."""
    now = 0.0
    pace = Pace(clock=lambda: now)
    for _ in range(SETTLE + MEASURE):
        pace.forward_ended()
        assert not pace.window_began()
        for _ in range(buckets):
            now += backward / buckets
            pace.bucket_started()
        gathers = [Gathering() for _ in range(buckets)]
        for gather in gathers:
            pace.gather_started(gather)  # type: ignore[arg-type]
        pace.stepped()
        for gather in gathers:
            now += wire / 2 / buckets
            if pace.is_measuring:
                gather.end()
        # Nothing of the forward is done meanwhile.
        pace.waited(wire / 2)
        now += forward
    assert pace.window_began()
    return plan_early(pace.agree(Alone()), [1] * buckets, gathered=1.0)  # type: ignore[arg-type]


def test_as_much_is_early_as_the_wire_has_time_for_and_the_forward_has_not() -> None:
    # Of three seconds of wire 1.5 are gathers, of which a third does not fit behind forward.
    assert plan_for(forward=1, backward=2, wire=3) == [4, 8]
    # All of them fit.
    assert plan_for(forward=1, backward=2, wire=1.9) == []
    # Backward has no time left.
    assert plan_for(forward=1, backward=2, wire=12) == []
    # More would be needed than there is time for.
    assert plan_for(forward=0.1, backward=2, wire=3) == [4, 8]


def refuse_gradients_after_the_step() -> None:
    rank = choose_communicator().rank
    model = wrapped()
    optimizer = optimizer_for("sharded", 1.0, model, {})
    for step in range(3):
        model(batch(rank, step, width=9)).square().mean().backward()
        optimizer.step()
        if step < 2:
            optimizer.zero_grad()
    with pytest.raises(MisuseError, match="zero_grad"):
        model(batch(rank, 3, width=9)).square().mean().backward()


@in_threads_and_processes
def test_gradients_are_gone_after_an_early_step_too(ranks: Ranks) -> None:
    """Though they are still there."""
    ranks.run(refuse_gradients_after_the_step)
