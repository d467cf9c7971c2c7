"""The sharded optimizer trains to the parameters of a plain one, on all ranks to the same bits."""

import copy
import gc
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gradsync import DistributedDataParallel
from gradsync.communicator import choose_communicator
from gradsync.errors import ConfigurationError, MisuseError, PeerFailedError
from gradsync.optim.sharded import ShardedOptimizer
from tests.optim.training import (
    TINY,
    assert_as_plain,
    assert_same,
    batch,
    filled,
    groups_of,
    in_threads_and_processes,
    make,
    net,
    parameters_of,
    take_steps,
    train_step,
)
from tests.ranks import Ranks, ThreadRanks

pytestmark = pytest.mark.timeout(120)

Make = Callable[..., torch.optim.Optimizer]


# -- as a plain one ---------------------------------------------------------------------------------------------------


def train(kind: str, steps: int, bucket_cap_mb: Any = TINY, communicator: str = "auto") -> list[torch.Tensor]:
    rank = choose_communicator().rank
    given = choose_communicator() if communicator == "group" else None
    model = DistributedDataParallel(net(), bucket_cap_mb=bucket_cap_mb, communicator=given)
    optimizer = make(kind, torch.optim.AdamW, model, groups_of(model), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        for micro in model.accumulate(range(3)):
            model(batch(rank, step, micro)).square().mean().backward()
        model.clip_grad_norm_(0.05)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return parameters_of(model)


@pytest.mark.parametrize(
    ("ranks", "steps", "bucket_cap_mb", "communicator"),
    [
        (("threads", 3), 30, TINY, "auto"),
        pytest.param(("processes", 2), 200, TINY, "auto", marks=pytest.mark.breadth),
        (("processes", 3), 20, "auto", "auto"),
        (("processes", 3), 20, TINY, "group"),
    ],
    indirect=["ranks"],
    ids=["threads-3", "processes-2", "processes-3", "processes-3-group"],
)
def test_it_trains_to_the_parameters_of_a_plain_optimizer(
    ranks: Ranks, steps: int, bucket_cap_mb: Any, communicator: str
) -> None:
    """With parameter groups, a schedule, clipping and windows of three micro-batches."""
    theirs = ranks.run(train, "plain", steps, bucket_cap_mb, communicator)[0]
    assert_same(ranks.run(train, "sharded", steps, bucket_cap_mb, communicator), theirs)


class Lion(torch.optim.Optimizer):
    """As a user may have it: a class of its own, with a state that it keeps by element."""

    element_wise = True

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                update = momentum.mul(group["beta"]).add(parameter.grad, alpha=1 - group["beta"])
                parameter.add_(update.sign(), alpha=-group["lr"])
                momentum.mul_(0.99).add_(parameter.grad, alpha=0.01)


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.3}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {"lr": 0.1}),
    (Lion, {}),
]


class Branches(nn.Module):
    """A trunk, and two branches of which a forward runs some; the second has its weight from the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(5, 5) for _ in range(3))
        self.right.weight = self.trunk.weight

    def forward(self, x: torch.Tensor, branches: str) -> torch.Tensor:
        x = self.trunk(x).tanh()
        for name in branches.split():
            x = x + getattr(self, name)(x).tanh()
        return x.square().mean()


# Used by all, by one rank (the last), by nobody, and again: the left branch is skipped where nobody has a gradient.
COURSE = ["left right", "right", "left right", "", "left", "right", "left right", "left right", "right", "left right"]


def train_branches(kind: str, optimizer_class: Any, options: dict[str, Any], *, alone: bool = False) -> Any:
    communicator = choose_communicator()
    model = DistributedDataParallel(filled(Branches().double()), bucket_cap_mb=1e-3)
    optimizer = make(kind, optimizer_class, model, **options)
    for step, branches in enumerate(COURSE):
        ours = "left right" if alone and communicator.rank == communicator.world_size - 1 else branches
        model(batch(communicator.rank, step, width=5), ours).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return parameters_of(model)


def optimizers_and_users() -> Iterator[Any]:
    """Every optimizer with both; which one `make test` leaves out is told by turns."""
    for place, who in enumerate(("unused by all", "used by one")):
        for number, (optimizer_class, options) in enumerate(OPTIMIZERS):
            marks = [pytest.mark.breadth] if (number + place) % 2 else []
            name = f"{who}-{number}-{optimizer_class.__name__}"
            yield pytest.param(optimizer_class, options, bool(place), marks=marks, id=name)


@pytest.mark.breadth
@pytest.mark.parametrize(("optimizer_class", "options", "alone"), list(optimizers_and_users()))
def test_optimizers_that_know_elements_only(optimizer_class: Any, options: dict[str, Any], alone: bool) -> None:
    """What nobody uses is left alone: neither decayed nor counted. Weights may be tied."""
    ranks = ThreadRanks(3)
    theirs = ranks.run(train_branches, "plain", optimizer_class, options, alone=alone)
    assert_same(ranks.run(train_branches, "sharded", optimizer_class, options, alone=alone), theirs[0])


def train_frozen(kind: str) -> list[torch.Tensor]:
    """A layer is frozen for some windows, and goes on with its state then; another is trained only later."""
    rank = choose_communicator().rank
    module = net()
    module[4].requires_grad_(False)
    model = DistributedDataParallel(module, bucket_cap_mb=TINY)
    optimizer = make(kind, torch.optim.AdamW, model, list(module.parameters()), lr=1e-2)
    for step in range(20):
        module[0].requires_grad_(not 5 <= step < 11)
        module[4].requires_grad_(step >= 7)
        train_step(model, optimizer, batch(rank, step))
    return parameters_of(model)


def train_words(kind: str) -> list[torch.Tensor]:
    """A table with sparse gradients beside layers with dense ones."""
    rank = choose_communicator().rank
    module = nn.ModuleList([nn.Embedding(6, 5, sparse=True), nn.Linear(5, 5)])
    model = DistributedDataParallel(filled(Reading(module).double()))
    optimizer = make(kind, torch.optim.SGD, model, lr=0.3)
    for step in range(6):
        model(torch.tensor([step % 6, (step + rank) % 6])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model)


class Reading(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](words))


# -- torch's own tools on gradients -----------------------------------------------------------------------------------


def train_with_tools(kind: str, tool: str) -> tuple[list[torch.Tensor], list[float]]:
    rank = choose_communicator().rank
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    optimizer = make(kind, torch.optim.SGD, model, lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    told = []
    for step in range(8):
        loss = model(batch(rank, step)).square().mean()
        # Too large on one rank in one step: all must skip it.
        loss = loss * (float("inf") if tool == "scaler" and step == 4 and rank == 1 else 1.0)
        (scaler.scale(loss) if "scaler" in tool else loss).backward()
        if "scaler" in tool:
            scaler.unscale_(optimizer)
        if "norm" in tool:
            order = float("inf") if "largest" in tool else 2.0
            told.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1, order)))
        if "value" in tool:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        if "scaler" in tool:
            scaler.step(optimizer)
            scaler.update()
            told.append(scaler.get_scale())
        else:
            optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model), told


@in_threads_and_processes
@pytest.mark.parametrize("tool", ["norm", "largest norm", "value", "scaler", "scaler and norm"])
def test_tools_of_torch_work_on_shares(ranks: Ranks, tool: str) -> None:
    theirs = ranks.run(train_with_tools, "plain", tool)
    ours = ranks.run(train_with_tools, "sharded", tool)
    assert_same([parameters for parameters, _ in ours], theirs[0][0])
    for _, told in ours:
        assert told == pytest.approx(theirs[0][1], rel=1e-12)


# -- the state --------------------------------------------------------------------------------------------------------


def train_and_save(kind: str, steps: int) -> tuple[list[torch.Tensor], Any]:
    rank = choose_communicator().rank
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    optimizer = make(kind, torch.optim.AdamW, model, groups_of(model), lr=1e-2)
    for step in range(steps):
        train_step(model, optimizer, batch(0, step))
    if kind == "sharded":
        optimizer.consolidate(to=0)
    return parameters_of(model), optimizer.state_dict() if rank == 0 else None


@in_threads_and_processes
def test_its_state_is_that_of_a_plain_one(ranks: Ranks) -> None:
    _, theirs = ranks.run(train_and_save, "plain", 5)[0]
    _, ours = ranks.run(train_and_save, "sharded", 5)[0]
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=1e-12, atol=1e-14)


def go_on(kind: str, parameters: list[torch.Tensor], state: Any, first: int) -> list[torch.Tensor]:
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    for parameter, saved in zip(model.parameters(), parameters, strict=True):
        parameter.data.copy_(saved)
    optimizer = make(kind, torch.optim.AdamW, model, groups_of(model), lr=1e-2)
    optimizer.load_state_dict(copy.deepcopy(state))
    for step in range(first, 10):
        train_step(model, optimizer, batch(0, step))
    return parameters_of(model)


@pytest.mark.parametrize("after", ["plain", "sharded"])
@pytest.mark.parametrize("before", ["plain", "sharded"])
@pytest.mark.parametrize("world_sizes", [(1, 3), (3, 1), (2, 3), (3, 3)])
def test_a_state_goes_on_in_the_other_kind_and_on_other_ranks(
    before: str, after: str, world_sizes: tuple[int, int]
) -> None:
    parameters, state = ThreadRanks(world_sizes[0]).run(train_and_save, before, 5)[0]
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    whole, _ = ThreadRanks(1).run(train_and_save, "plain", 10)[0]
    assert_same(ThreadRanks(world_sizes[1]).run(go_on, after, parameters, torch.load(buffer), 5), whole)


def save_too_early() -> str:
    model = DistributedDataParallel(net())
    optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters()), model)
    optimizer.consolidate()
    optimizer.state_dict()
    model(batch(0, 0)).sum().backward()
    optimizer.step()
    with pytest.raises(MisuseError, match=r"consolidate\(to=0\)") as raised:
        optimizer.state_dict()
    return str(raised.value)


def test_a_state_that_was_not_brought_together_is_refused() -> None:
    assert len(ThreadRanks(2).run(save_too_early)) == 2


def measure_state() -> tuple[int, int]:
    model = DistributedDataParallel(filled(nn.Linear(64, 64)), bucket_cap_mb=TINY)
    optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters()), model)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    kept = sum(
        value.numel()
        for state in optimizer._segments.optimizer.state.values()
        for value in state.values()
        if value.dim()
    )
    return kept, 2 * sum(parameter.numel() for parameter in model.parameters())


def test_every_rank_keeps_its_share_of_the_state() -> None:
    counts = ThreadRanks(4).run(measure_state)
    assert sum(kept for kept, _ in counts) == counts[0][1]
    assert max(kept for kept, _ in counts) <= counts[0][1] / 4 + 32


class Backwards(nn.Sequential):
    """Gradients come in another order than parameters were registered in, so buckets are laid out anew."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(list(self)):
            x = layer(x)
        return x


def lay_buckets_anew() -> list[int]:
    """How many buckets had memory whenever another one got its own."""
    communicator = choose_communicator()
    memory: list[StorageWeakRef] = []
    alive: list[int] = []
    allocate = communicator.allocate

    def watched(*args: Any) -> torch.Tensor:
        alive.append(sum(not reference.expired() for reference in memory))
        buffer = allocate(*args)
        memory.append(StorageWeakRef(buffer.untyped_storage()))
        return buffer

    communicator.allocate = watched  # type: ignore[method-assign]
    layers = filled(Backwards(*(nn.Linear(9, 9) for _ in range(6))).double())
    model = DistributedDataParallel(layers, bucket_cap_mb=TINY, communicator=communicator)
    optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    take_steps(model, optimizer, range(4), width=9)
    return alive


def test_memory_of_buckets_goes_with_them() -> None:
    """And not when somebody collects garbage: Python does not know how little memory a GPU has left."""
    gc.collect()
    gc.disable()
    try:
        outcomes = ThreadRanks(2).run(lay_buckets_anew)
    finally:
        gc.enable()
    for alive in outcomes:
        # Wrapped, shared out, and laid out anew: each time none is left of those before.
        assert alive == 3 * list(range(len(alive) // 3))
        assert len(alive) >= 6


def move_out_twice(kind: str) -> list[torch.Tensor]:
    """As if memory for new buckets had been short the first time that they were to be laid out."""
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    optimizer = make(kind, torch.optim.AdamW, model, lr=1e-2)
    for step in range(6):
        train_step(model, optimizer, batch(choose_communicator().rank, step))
        if isinstance(optimizer, ShardedOptimizer) and step == 3:
            optimizer.flush()
            optimizer.release_buckets()
            model.synchronizer.engine.store.build()
    return parameters_of(model)


# -- refused ----------------------------------------------------------------------------------------------------------


class Norming(torch.optim.SGD):
    """Who knows what it does?"""


def hooked(model: DistributedDataParallel) -> ShardedOptimizer:
    model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    return ShardedOptimizer(torch.optim.SGD(model.parameters()), model)


@pytest.mark.parametrize(
    ("wrong", "words", "goes_on"),
    [
        (lambda model: ShardedOptimizer(torch.optim.LBFGS(model.parameters()), model), "element_wise = True", True),
        (lambda model: ShardedOptimizer(torch.optim.Adafactor(model.parameters()), model), "element_wise = True", True),
        (lambda model: ShardedOptimizer(Norming(model.parameters()), model), "element_wise = True", True),
        (lambda model: ShardedOptimizer(torch.optim.SGD, model), "got the class SGD as the optimizer", True),  # type: ignore[arg-type]
        (
            lambda model: ShardedOptimizer(model, torch.optim.SGD(model.parameters())),  # type: ignore[arg-type]
            "got DistributedDataParallel as the optimizer",
            True,
        ),
        (lambda model: ShardedOptimizer(torch.optim.SGD(list(net().parameters())), model), "does not belong to", True),
        (lambda _: ShardedOptimizer(torch.optim.SGD(net().parameters()), net()), "DistributedDataParallel", True),  # type: ignore[arg-type]
        (hooked, "sends something else", False),
    ],
    ids=["LBFGS", "Adafactor", "undeclared", "a class", "other way round", "foreign parameters", "not wrapped", "hook"],
)
def test_what_cannot_be_sharded_is_refused(wrong: Callable[[Any], Any], words: str, goes_on: bool) -> None:
    def work() -> None:
        model = DistributedDataParallel(net())
        with pytest.raises(ConfigurationError, match=words):
            wrong(model)
        if goes_on:
            # Nothing is half done: a plain optimizer trains as ever.
            model(batch(0, 0)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()

    ThreadRanks(2).run(work)


def train_on(kinds: Sequence[str], steps: int = 3) -> list[torch.Tensor]:
    """One optimizer after the other, each with the state of the one before."""
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    state: Any = None
    for number, kind in enumerate(kinds):
        optimizer = make(kind, torch.optim.AdamW, model, lr=1e-2)
        if state is not None:
            optimizer.load_state_dict(state)
        take_steps(model, optimizer, range(number * steps, (number + 1) * steps))
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.consolidate()
            state = optimizer.state_dict()
            optimizer.close()
            optimizer.close()
        else:
            state = optimizer.state_dict()
    return parameters_of(model)


@in_threads_and_processes
def test_a_closed_one_leaves_the_model_to_others(ranks: Ranks) -> None:
    expected = ranks.run(train_on, ["plain"] * 4)[0]
    assert_same(ranks.run(train_on, ["sharded", "plain", "sharded", "sharded"]), expected)


def test_alone_one_may_be_closed_too() -> None:
    assert_same(
        ThreadRanks(1).run(train_on, ["sharded", "plain", "sharded"]), ThreadRanks(1).run(train_on, ["plain"] * 3)[0]
    )


def use_after_closing() -> None:
    model = DistributedDataParallel(net())
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters()), model)
    model(batch(0, 0)).sum().backward()
    with pytest.raises(MisuseError, match="Call step\\(\\) and zero_grad\\(\\) before close\\(\\)"):
        optimizer.close()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()
    for use in (optimizer.step, optimizer.consolidate, lambda: optimizer.load_state_dict({})):
        with pytest.raises(MisuseError, match="was closed"):
            use()
    model(batch(0, 1)).sum().backward()
    assert torch.isfinite(model.module[0].weight.grad).all()


def test_one_with_gradients_is_not_closed_and_a_closed_one_is_not_used() -> None:
    ThreadRanks(2).run(use_after_closing)


def look_at_gradients() -> None:
    model = DistributedDataParallel(net())
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(batch(0, 0)).sum().backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    for look in (torch.Tensor.norm, torch.Tensor.clone, repr, torch.Tensor.tolist):
        with pytest.raises(MisuseError, match="shared out"):
            look(gradient)
    optimizer.step()
    # Without zero_grad(): there is nothing left to add to.
    with pytest.raises(MisuseError, match="zero_grad"):
        model(batch(0, 0)).sum().backward()
    optimizer.zero_grad()
    model(batch(0, 0)).sum().backward()
    optimizer.step()


def test_gradients_that_are_shared_out_cannot_be_looked_at() -> None:
    ThreadRanks(2).run(look_at_gradients)


def step_on_zeros(kind: str) -> list[torch.Tensor]:
    """Gradients that were zeroed in place are still there: momentum goes on, also in a second step."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    optimizer = make(kind, torch.optim.SGD, model, lr=0.2, momentum=0.9)
    for step in range(4):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        for _ in range(step):
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return parameters_of(model)


@pytest.mark.parametrize("misuse", ["step twice", "local steps", "join", "hook", "detached"])
def test_misuse_is_refused(misuse: str) -> None:
    def work() -> None:
        model = DistributedDataParallel(net())
        optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        model(batch(0, 0)).sum().backward()
        if misuse == "step twice":
            optimizer.step()
            with pytest.raises(MisuseError, match=r"zero_grad\(\)"):
                optimizer.step()
        elif misuse == "local steps":
            with model.local_steps(), pytest.raises(MisuseError, match="local steps"):
                optimizer.step()
        elif misuse == "join":
            with pytest.raises(MisuseError, match=r"join\(\)"):
                model.join_hook()
        elif misuse == "hook":
            with pytest.raises(MisuseError, match="before you make the optimizer"):
                model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
        else:
            model.synchronizer.detach()
            with pytest.raises(MisuseError, match="Make a new optimizer"):
                optimizer.step()

    ThreadRanks(2).run(work)


TOUCHES: dict[str, Callable[[DistributedDataParallel], Any]] = {
    "torch's clipping": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.001),
    "gradsync's clipping": lambda model: model.clip_grad_norm_(0.001),
    "values": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.001),
    "scaling": lambda model: model.module[0].weight.grad.mul_(0.0),
    "norm": lambda model: torch.linalg.vector_norm(model.module[0].weight.grad),
}


@pytest.mark.parametrize("how", TOUCHES)
def test_gradients_are_not_touched_after_the_step(how: str) -> None:
    """New parameters lie there."""

    def work() -> list[torch.Tensor]:
        model = DistributedDataParallel(net())
        optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        model(batch(0, 0)).sum().backward()
        optimizer.step()
        with pytest.raises(MisuseError, match="before the step"):
            TOUCHES[how](model)
        optimizer.zero_grad()
        return parameters_of(model)

    def plain() -> list[torch.Tensor]:
        model = DistributedDataParallel(net())
        model(batch(0, 0)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return parameters_of(model)

    assert_same(ThreadRanks(2).run(work), ThreadRanks(2).run(plain)[0])


def change_before_the_step(kind: str, how: str) -> tuple[list[torch.Tensor], float]:
    rank = choose_communicator().rank
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    optimizer = make(kind, torch.optim.SGD, model, lr=0.2, momentum=0.9)
    for step in range(4):
        model(batch(rank, step)).square().mean().backward()
        weight = model.module[0].weight
        if step % 2 and how == "all zeroed":
            optimizer.zero_grad(set_to_none=False)
        elif step % 2 and how == "one zeroed":
            weight.grad.zero_()
        elif step % 2:
            weight.grad = torch.full_like(weight, 0.1)
        norm = float(model.clip_grad_norm_(0.1))
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model), norm


@pytest.mark.parametrize("how", ["all zeroed", "one zeroed", "one replaced"])
def test_gradients_that_were_changed_before_the_step_are_clipped(how: str) -> None:
    ranks = ThreadRanks(3)
    theirs = ranks.run(change_before_the_step, "plain", how)[0]
    ours = ranks.run(change_before_the_step, "sharded", how)
    assert_same([parameters for parameters, _ in ours], theirs[0])
    assert [norm for _, norm in ours] == [pytest.approx(theirs[1])] * 3


def go_back(kind: str, frozen: bool) -> list[torch.Tensor]:
    """The state of the beginning, which is none, is loaded after some steps."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    optimizer = make(kind, torch.optim.AdamW, model, list(model.parameters()), lr=0.05)
    if kind == "sharded":
        optimizer.consolidate()
    state = copy.deepcopy(optimizer.state_dict())
    for step in range(8):
        model.module[4].requires_grad_(not (frozen and 2 <= step < 5))
        if step == 4:
            optimizer.load_state_dict(copy.deepcopy(state))
        train_step(model, optimizer, batch(rank, step))
    return parameters_of(model)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen meanwhile"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_that_is_loaded_takes_the_place_of_all(world_size: int, frozen: bool) -> None:
    ranks = ThreadRanks(world_size)
    assert_as_plain(ranks, go_back, frozen)


def load_another_shape() -> None:
    model = DistributedDataParallel(net())
    optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters()), model)
    model(batch(0, 0)).sum().backward()
    optimizer.step()
    optimizer.consolidate()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ConfigurationError, match="belongs to another model"):
        optimizer.load_state_dict(state)
    with pytest.raises(MisuseError, match="cannot be copied"):
        copy.deepcopy(optimizer)


def test_a_state_of_another_shape_is_refused_on_all_ranks() -> None:
    ThreadRanks(2).run(load_another_shape)


def take_more_parameters(kind: str) -> list[torch.Tensor]:
    rank = choose_communicator().rank
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    parameters = list(model.parameters())
    optimizer = make(kind, torch.optim.AdamW, model, parameters[:3], lr=0.05)
    for step in range(6):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        model.zero_grad()
        if step == 2:
            # One rank has looked at a parameter, the others have not.
            _ = float(parameters[0].detach().sum()) if rank == 0 else 0.0
            optimizer.add_param_group({"params": parameters[3:], "lr": 0.01})
    return parameters_of(model)


class Sensitive(torch.optim.SGD):
    """Raises where it sees something that is no number."""

    element_wise = True

    def step(self, closure: Any = None) -> Any:
        if any(p.grad is not None and p.grad.isnan().any() for group in self.param_groups for p in group["params"]):
            raise ArithmeticError("no number")
        return super().step(closure)


def raise_in_a_share() -> str:
    communicator = choose_communicator()
    model = DistributedDataParallel(filled(nn.Linear(8, 8).double()), communicator=communicator)
    optimizer = ShardedOptimizer(Sensitive(model.parameters(), lr=0.1), model)
    x = torch.ones(1, 8, dtype=torch.float64)
    (model(x) * torch.tensor([float("nan"), *[1.0] * 7])).sum().backward()
    try:
        optimizer.step()
        optimizer.flush()
    except (ArithmeticError, PeerFailedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_optimizer_that_raises_on_one_rank_is_told_to_the_others() -> None:
    first, other = ThreadRanks(2).run(raise_in_a_share)
    assert first == "ArithmeticError: no number"
    assert "its optimizer raised ArithmeticError: no number" in other


def accumulate_on_means(kind: str) -> list[torch.Tensor]:
    """Without zero_grad(), but without a step either: as in a loop that skips one."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    optimizer = make(kind, torch.optim.SGD, model, lr=0.2)
    for step in range(8):
        model(batch(rank, step)).square().mean().backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return parameters_of(model)


@pytest.mark.parametrize("train", [train_frozen, train_words, accumulate_on_means])
@in_threads_and_processes
def test_a_training_ends_as_with_a_plain_optimizer(ranks: Ranks, train: Callable[..., Any]) -> None:
    assert_as_plain(ranks, train)


@pytest.mark.parametrize("train", [move_out_twice, step_on_zeros, take_more_parameters])
def test_a_training_in_threads_ends_as_with_a_plain_optimizer(train: Callable[..., Any]) -> None:
    assert_as_plain(ThreadRanks(3), train)


@pytest.mark.parametrize("name", ["step", "state_dict"])
def test_the_original_is_refused_since_its_state_is_in_the_sharded_one(name: str) -> None:
    def work() -> None:
        model = DistributedDataParallel(net())
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ShardedOptimizer(plain, model)
        with pytest.raises(MisuseError, match="this SGD was given to a sharded or overlapped optimizer"):
            getattr(plain, name)()

    ThreadRanks(2).run(work)
