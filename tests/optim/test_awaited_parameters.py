"""Nobody sees a parameter that is not whole: whatever reads one after a sharded step gets the new one.

In every test rank 1 comes to its step late, so that on rank 0 new parameters are not there when they are read.
"""

import copy
import io
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from gradsync import (
    DistributedDataParallel,
    OverlappedOptimizer,
    PeerFailedError,
    ShardedOptimizer,
    synchronize_gradients,
)
from gradsync.communicator import choose_communicator
from gradsync.optim.sharded.gather import AwaitedParameter
from tests.fuse import Explosion, Fuse
from tests.optim.training import (
    assert_as_plain,
    assert_same,
    batch,
    filled,
    make,
    net,
    parameters_of,
    take_steps,
    train_step,
)
from tests.ranks import Ranks, ThreadRanks

pytestmark = pytest.mark.timeout(60)

LATE_SECONDS = 0.03

Read = Callable[[DistributedDataParallel, list[nn.Parameter]], Any]


def saved(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return [parameter.detach() for parameter in torch.load(buffer, weights_only=False).parameters()]


def averaged(model: nn.Module) -> list[torch.Tensor]:
    ema = torch.optim.swa_utils.AveragedModel(filled(net()))
    ema.update_parameters(model)
    return [parameter.detach().clone() for parameter in ema.module.parameters()]


def memory_of(parameter: nn.Parameter) -> torch.Tensor:
    """Its bytes; others of its bucket may lie in the same storage."""
    read = torch.tensor(parameter.untyped_storage().tolist(), dtype=torch.uint8)
    first = parameter.storage_offset() * parameter.element_size()
    return read[first : first + parameter.numel() * parameter.element_size()].view(parameter.dtype)


def evaluated(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return torch.as_tensor(model.eval()(torch.ones(1, 7, dtype=torch.float64)).tolist())


READS: dict[str, Read] = {
    "forward": lambda model, _: model(torch.ones(1, 7, dtype=torch.float64)).detach(),
    "forward of the module": lambda model, _: model.module(torch.ones(1, 7, dtype=torch.float64)).detach(),
    "forward of a layer": lambda model, _: model.module[4](torch.ones(1, 11, dtype=torch.float64)).detach(),
    "forward in inference mode": lambda model, _: evaluated(model),
    "parameters": lambda model, _: [p.detach().clone() for p in model.parameters()],
    "parameters that were listed before": lambda _, listed: [p * 1.0 for p in listed],
    "data": lambda _, listed: [p.data.clone() for p in listed],
    "numpy": lambda _, listed: [torch.from_numpy(p.detach().numpy().copy()) for p in listed],
    "norms": lambda _, listed: torch.stack(torch._foreach_norm(listed)).detach(),
    "state_dict": lambda model, _: [value.clone() for value in model.state_dict().values()],
    "state_dict of the module": lambda model, _: [value.clone() for value in model.module.state_dict().values()],
    "torch.save": lambda model, _: saved(model.module),
    "deepcopy": lambda model, _: [p.detach() for p in copy.deepcopy(model.module).parameters()],
    "vector": lambda model, _: nn.utils.parameters_to_vector(model.parameters()).detach(),
    "average of models": lambda model, _: averaged(model.module),
    "functional call": lambda model, _: functional_call(
        model.module, dict(model.module.named_parameters()), (torch.ones(1, 7, dtype=torch.float64),)
    ).detach(),
    "copy into another": lambda model, _: parameters_of(copied(model.module)),
    "storage": lambda _, listed: [memory_of(p) for p in listed],
}


def copied(module: nn.Module) -> nn.Module:
    other = net()
    other.load_state_dict(module.state_dict())
    return other


def train_and_read(kind: str, how: str) -> Any:
    rank = choose_communicator().rank
    model = DistributedDataParallel(net(), bucket_cap_mb=2e-3)
    listed = list(model.parameters())
    optimizer = make(kind, torch.optim.SGD, model, lr=0.3)
    for step in range(3):
        model(batch(rank, step)).square().mean().backward()
        if rank == 1 and kind == "sharded":
            time.sleep(LATE_SECONDS)
        optimizer.step()
        is_awaited = type(listed[0]) is AwaitedParameter
        read = READS[how](model, listed)
        assert is_awaited == (kind == "sharded")
        optimizer.zero_grad()
    return read


@pytest.mark.parametrize("how", READS)
def test_whoever_reads_a_parameter_gets_the_new_one(how: str) -> None:
    ranks = ThreadRanks(2)
    theirs = ranks.run(train_and_read, "plain", how)[0]
    for ours in ranks.run(train_and_read, "sharded", how):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


class Foreign(torch.autograd.Function):
    """As an extension in C++ that gets tensors: it does not ask their class."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        with torch._C.DisableTorchFunctionSubclass():
            return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] * weight, grads[0] * x


class ForeignLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Foreign.apply(x, self.weight)


def train_foreign(kind: str) -> list[torch.Tensor]:
    """Code that does not ask for a parameter's class gets the new one in a forward."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(nn.Sequential(ForeignLayer(), ForeignLayer()), bucket_cap_mb=1e-5)
    optimizer = make(kind, torch.optim.SGD, model, lr=0.1)
    for step in range(4):
        model(batch(rank, step, width=5)).square().mean().backward()
        if rank == 1:
            time.sleep(LATE_SECONDS)
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model)


def look_without_waiting() -> list[bool]:
    """What says nothing of values waits for nobody."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(net())
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3), model)
    model(batch(rank, 0)).sum().backward()
    optimizer.step()
    parameter = next(model.parameters())
    assert parameter.shape == (9, 7)
    assert parameter.numel() == 63
    assert parameter.dtype == torch.float64
    assert parameter.requires_grad
    assert parameter.is_leaf
    optimizer.zero_grad()
    assert parameter.grad is None
    assert isinstance(parameter, nn.Parameter)
    assert parameter._post_accumulate_grad_hooks
    awaited = [type(each) is AwaitedParameter for each in model.parameters()]
    optimizer.flush()
    return [*awaited, *(type(each) is nn.Parameter for each in model.parameters())]


def test_what_says_nothing_of_values_does_not_wait() -> None:
    for seen in ThreadRanks(2).run(look_without_waiting):
        assert seen == [True] * 12


def change_between(kind: str) -> list[torch.Tensor]:
    """A user limits the weights after every step, in place: through the parameter, or behind its back."""
    rank, model = choose_communicator().rank, DistributedDataParallel(net(), bucket_cap_mb=2e-3)
    optimizer = make(kind, torch.optim.AdamW, model, lr=0.05)
    for step in range(8):
        train_step(model, optimizer, batch(rank, step))
        with torch.no_grad():
            for parameter in model.parameters():
                (parameter if step % 2 else parameter.data).clamp_(-0.4, 0.4)
    return parameters_of(model)


class Shuffled(nn.Module):
    """Layers in an order of their own in every forward, some left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for number in order:
            x = x + self.layers[number](x).tanh()
        return x.square().mean()


def train_shuffled(kind: str, steps: int, differ: bool) -> list[torch.Tensor]:
    communicator = choose_communicator()
    model = DistributedDataParallel(filled(Shuffled().double()), bucket_cap_mb=1e-3)
    optimizer = make(kind, torch.optim.AdamW, model, lr=1e-2)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * 8 + (communicator.rank if differ else 0))
        order = torch.randperm(5, generator=generator)[: 1 + step % 5].tolist()
        model(batch(communicator.rank, step, width=6), order).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model)


@pytest.mark.parametrize(
    "differ", [pytest.param(False, marks=pytest.mark.breadth), True], ids=["alike", "on every rank otherwise"]
)
@pytest.mark.parametrize("ranks", [("processes", 2)], indirect=True, ids="{0[0]}-{0[1]}".format)
def test_layers_may_run_in_any_order(ranks: Ranks, differ: bool) -> None:
    theirs = ranks.run(train_shuffled, "plain", 100, differ)[0]
    assert_same(ranks.run(train_shuffled, "sharded", 100, differ), theirs)


def attached(kind: str) -> list[torch.Tensor]:
    """Without a wrapper."""
    module = net()
    handle = synchronize_gradients(module)
    optimizer = make(kind, torch.optim.SGD, handle, list(module.parameters()), lr=0.3)
    take_steps(module, optimizer, range(4))
    return parameters_of(module)


@pytest.mark.parametrize("train", [train_foreign, change_between, attached])
def test_a_training_ends_as_with_a_plain_optimizer(train: Callable[..., Any]) -> None:
    assert_as_plain(ThreadRanks(3), train)


# -- failures ---------------------------------------------------------------------------------------------------------


def fail_and_go_on(kind: str, late: bool) -> tuple[list[torch.Tensor], int]:
    """The backward of rank 0 fails in two steps, at its beginning or at its end, and all ranks skip these steps."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(net(), bucket_cap_mb=2e-3)
    optimizer = make(kind, torch.optim.AdamW, model, lr=1e-2)
    failed = 0
    for step in range(10):
        fails = rank == 0 and step in (0, 6)
        try:
            hidden = model(Fuse.apply(batch(rank, step).requires_grad_(), fails and late))
            Fuse.apply(hidden, fails and not late).square().mean().backward()
            optimizer.step()
        except (Explosion, PeerFailedError):
            failed += 1
        optimizer.zero_grad()
    return parameters_of(model), failed


@pytest.mark.parametrize("ranks", [("threads", 3), ("processes", 2)], indirect=True, ids="{0[0]}-{0[1]}".format)
@pytest.mark.parametrize("late", [False, True], ids=["at its beginning", "at its end"])
def test_a_failed_backward_is_skipped_by_all(ranks: Ranks, late: bool) -> None:
    theirs, ours = ranks.run(fail_and_go_on, "plain", late), ranks.run(fail_and_go_on, "sharded", late)
    assert [failed for _, failed in ours] == [2] * ranks.world_size
    assert_same([parameters for parameters, _ in ours], theirs[0][0])


def lose_the_communicator(stepped: threading.Event) -> list[str]:
    """Rank 1 gives up before its second step: rank 0 can read neither old parameters nor new ones from then on."""
    communicator = choose_communicator()
    model = DistributedDataParallel(net(), communicator=communicator)
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3), model)
    said = []
    for step in range(2):
        model(batch(0, step)).sum().backward()
        if communicator.rank == 1 and step == 1:
            # Before its step rank 0 would be told at once.
            assert stepped.wait(60)
            communicator.abort("the disk is full")
            return []
        optimizer.step()
        if step == 1:
            stepped.set()
        optimizer.zero_grad()
    for read in (lambda: model.state_dict(), lambda: model(batch(0, 0)), optimizer.flush, optimizer.step):
        with pytest.raises(PeerFailedError) as raised:
            read()
        said.append(str(raised.value))
    return said


def test_nobody_goes_on_with_half_of_the_parameters() -> None:
    said, _ = ThreadRanks(2).run(lose_the_communicator, threading.Event())
    assert len(said) == 4
    assert all("the disk is full" in text for text in said)


# -- narrow parameters ------------------------------------------------------------------------------------------------


def train_narrow(steps: int) -> tuple[list[torch.Tensor], Any]:
    """Updates that bfloat16 cannot hold, one by one: 2⁻¹² of a weight each."""
    rank = choose_communicator().rank
    model = DistributedDataParallel(nn.Linear(8, 8, bias=False).bfloat16(), accumulation_dtype=torch.float32)
    nn.init.ones_(model.module.weight)
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=2.0**-12), model)
    for _ in range(steps):
        model(torch.ones(1, 8).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate()
    return parameters_of(model), optimizer.state_dict()["state"] if rank >= 0 else None


@pytest.mark.parametrize("world_size", [1, 3])
def test_shares_of_narrow_parameters_are_wide(world_size: int) -> None:
    """Also alone, where there is nobody to share with."""
    for parameters, state in ThreadRanks(world_size).run(train_narrow, 64):
        assert parameters[0].dtype == torch.bfloat16
        # 64 steps of 2⁻¹² make 2⁻⁶; in bfloat16 alone not one of them would have moved the weight.
        assert torch.equal(parameters[0], torch.full((8, 8), 1 - 2.0**-6, dtype=torch.bfloat16))
        assert torch.equal(state[0]["master"], torch.full((8, 8), 1 - 2.0**-6))


def train_mixed(steps: int, reload: bool) -> list[torch.Tensor]:
    """A narrow parameter and a wide one, in one bucket: updates of 2⁻¹² each."""
    module = nn.ParameterList([torch.ones(8, dtype=torch.bfloat16), torch.ones(8)])
    model = DistributedDataParallel(Sum(module), accumulation_dtype=torch.float32)
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=2.0**-12), model)
    for step in range(steps):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        if reload and step == steps // 2:
            optimizer.consolidate()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            # Buckets are made anew before the next step.
            model.synchronizer.load_state_dict(model.synchronizer.state_dict())
    return parameters_of(model)


class Sum(nn.Module):
    def __init__(self, numbers: nn.ParameterList) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self) -> torch.Tensor:
        return torch.stack([each.float().sum() for each in self.numbers]).sum()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("reload", [False, True], ids=["in one go", "loaded on the way"])
def test_narrow_parameters_beside_wide_ones_have_masters(reload: bool, world_size: int) -> None:
    for narrow, wide in ThreadRanks(world_size).run(train_mixed, 64, reload):
        assert torch.equal(narrow, torch.full((8,), 1 - 2.0**-6, dtype=torch.bfloat16))
        assert torch.equal(wide, torch.full((8,), 1 - 2.0**-6))


def copy_awaited() -> list[str]:
    model = DistributedDataParallel(net())
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3), model)
    model(batch(0, 0)).sum().backward()
    optimizer.step()
    copied_module = copy.deepcopy(model.module)
    optimizer.flush()
    return [type(parameter).__name__ for parameter in (*copied_module.parameters(), *model.parameters())]


def test_copies_are_ordinary_parameters() -> None:
    assert ThreadRanks(2).run(copy_awaited) == [["Parameter"] * 12] * 2


def go_back_through_kept_graphs(kind: str) -> list[str]:
    """What happens in graphs from before a step: of layers that it has changed, and of one that it has not."""
    rank, model, seen = choose_communicator().rank, DistributedDataParallel(net()), []
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ShardedOptimizer(plain, model) if kind == "sharded" else OverlappedOptimizer(plain, model)
    for step in range(3):
        inputs = batch(rank, step).requires_grad_()
        untouched, changed = model.module[0](inputs), model.module(inputs)
        # The first layer is unused, and so are its parameters on all ranks.
        model.module[2:](torch.ones(1, 9, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for output in (untouched, changed):
            try:
                torch.autograd.grad(output.sum(), inputs, retain_graph=True)
                seen.append("fine")
            except RuntimeError as error:
                seen.append("refused" if "inplace" in str(error) else str(error))
    return seen


@pytest.mark.parametrize("kind", ["sharded", "overlapped"])
def test_a_graph_that_kept_a_parameter_which_a_step_has_changed_is_refused(kind: str) -> None:
    for seen in ThreadRanks(2).run(go_back_through_kept_graphs, kind):
        assert seen == ["fine", "refused"] * 3
