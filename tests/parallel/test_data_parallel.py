"""The wrapper as a drop-in for torch's: the same arguments, the same numbers, the same habits."""

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from gradsync import ConfigurationError, DistributedDataParallel, MisuseError, Timeline
from gradsync.communicator import choose_communicator
from gradsync.errors import NoProcessGroupError
from tests.parallel.training import (
    COPIERS,
    alone,
    assert_same,
    assert_same_bits,
    batch,
    filled,
    gradients,
    loss_of,
    rank_here,
    values,
)
from tests.ranks import RankError, RankPool, Ranks

T = TypeVar("T")
TorchDDP = nn.parallel.DistributedDataParallel

# A bucket for every parameter, and one bucket for all of them.
TINY, HUGE = 1e-6, 100.0


# -- what the tests train ---------------------------------------------------------------------------------------------


def net(*, seed: int = 0, norm: bool = False, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    between = [nn.BatchNorm1d(8)] if norm else []
    return filled(nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 3)), seed).to(dtype)


class Branches(nn.Module):
    """Uses one branch a call; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 3)
        self.branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        output: torch.Tensor = self.branches[branch](self.trunk(inputs))
        return output


def train(model: nn.Module, steps: Sequence[int], rank: int | None = None) -> list[torch.Tensor]:
    """Steps of SGD; the parameters afterwards. ``rank``: whose data."""
    rank = rank_here() if rank is None else rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return values(model)


def train_alone(model: nn.Module, steps: Sequence[int], ranks: Sequence[int]) -> list[torch.Tensor]:
    """The reference: one process on the batches of all ranks, put together."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        optimizer.zero_grad()
        inputs, targets = zip(*(batch(rank, step) for rank in ranks), strict=True)
        mse_loss(model(torch.cat(inputs)), torch.cat(targets)).backward()
        optimizer.step()
    return values(model)


def buffers(model: nn.Module) -> list[torch.Tensor]:
    return [buffer.detach().clone() for buffer in model.buffers()]


def wrap_torch(module: nn.Module, **kwargs: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates broadcast_buffers
        return TorchDDP(module, **kwargs)


def wrap_ours(module: nn.Module, **kwargs: Any) -> DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # as torch does
        return DistributedDataParallel(module, **kwargs)


def under_both(pool: RankPool, work: Callable[..., T], *args: Any) -> tuple[list[T], list[T]]:
    """What ranks get from ``work(*args, wrap)`` with gradsync's wrapper, and with torch's."""
    return pool.run(work, *args, wrap_ours), pool.run(work, *args, wrap_torch)


# -- arguments --------------------------------------------------------------------------------------------------------


def test_the_signature_begins_with_torchs() -> None:
    theirs = list(inspect.signature(TorchDDP).parameters.values())
    ours = list(inspect.signature(DistributedDataParallel).parameters.values())

    def described(parameters: list[inspect.Parameter]) -> list[tuple[Any, ...]]:
        return [(parameter.name, parameter.default, parameter.kind) for parameter in parameters]

    assert described(ours)[: len(theirs)] == described(theirs)
    further = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    assert all(parameter.kind in further for parameter in ours[len(theirs) :])


def train_with(kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return train(wrap_ours(net(), **kwargs), range(3))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"device_ids": None, "output_device": None},
        {"device_ids": []},
        {"dim": 1},
        {"bucket_cap_mb": TINY},
        {"bucket_cap_mb": 25},
        {"bucket_cap_mb": "auto"},
        {"bucket_cap_mb_list": [TINY, 0.0002, 1]},
        {"find_unused_parameters": True},
        {"check_reduction": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"skip_all_reduce_unused_params": True},
        {"batched_grad_copy": True},
        {"broadcast_buffers": True},
        {"forward_sync_buffers": False},
        {"schedule": "bucketed"},
        {"schedule": "naive"},
    ],
    ids=lambda kwargs: "-".join(f"{name}={value}" for name, value in kwargs.items()),
)
def test_arguments_that_change_no_numbers_are_accepted(pair: RankPool, kwargs: dict[str, Any]) -> None:
    results = pair.run(train_with, kwargs)
    assert_same(results[0], train_alone(net(), range(3), ranks=[0, 1]))
    assert_same_bits(results)


def test_a_module_with_sync_batch_norm_on_the_cpu_is_refused_with_the_remedy() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.SyncBatchNorm(8))
    with pytest.raises(ConfigurationError, match=r"SyncBatchNorm.*GPU.*BatchNorm"):
        DistributedDataParallel(model, communicator=alone())
    with pytest.raises(ValueError, match="SyncBatchNorm"):  # the class that torch raises
        DistributedDataParallel(model, communicator=alone())


def test_giving_both_names_of_the_buffer_setting_warns_and_takes_the_newer() -> None:
    with pytest.warns(FutureWarning, match="broadcast_buffers"):
        wrapper = DistributedDataParallel(
            net(norm=True), communicator=alone(), broadcast_buffers=True, forward_sync_buffers=False
        )
    assert not wrapper.will_sync_module_buffers()


# -- a module like any other ------------------------------------------------------------------------------------------


def exchange_state_dicts() -> None:
    ours = DistributedDataParallel(net(seed=1, norm=True))
    theirs = wrap_torch(net(seed=2, norm=True))
    train(ours, range(2))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(name.startswith("module.") for name in ours.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert_same_bits([ours.state_dict(), theirs.state_dict()])
    train(theirs, range(2, 4))
    ours.load_state_dict(theirs.state_dict())
    assert_same_bits([ours.state_dict(), theirs.state_dict()])
    assert_same(train(ours, range(4, 6)), train(theirs, range(4, 6)))


def test_state_dicts_go_from_torchs_wrapper_and_back(pair: RankPool) -> None:
    pair.run(exchange_state_dicts)


def test_it_shows_the_module_and_its_parameters() -> None:
    module = net(norm=True)
    wrapper = DistributedDataParallel(module, communicator=alone())
    assert wrapper.module is module
    assert list(map(id, wrapper.parameters())) == list(map(id, module.parameters()))
    assert [name for name, _ in wrapper.named_parameters()] == [
        f"module.{name}" for name, _ in module.named_parameters()
    ]
    assert list(map(id, wrapper.buffers())) == list(map(id, module.buffers()))


def test_train_and_eval_reach_the_module_and_return_the_wrapper() -> None:
    wrapper = DistributedDataParallel(net(norm=True), communicator=alone())
    assert wrapper.eval() is wrapper
    assert not any(layer.training for layer in wrapper.modules())
    assert wrapper.train() is wrapper
    assert all(layer.training for layer in wrapper.modules())


def test_a_missing_attribute_is_named() -> None:
    wrapper = DistributedDataParallel(net(), communicator=alone())
    with pytest.raises(AttributeError, match="number_of_heads"):
        _ = wrapper.number_of_heads
    assert not hasattr(wrapper, "in_features")  # as in torch, the module's own are behind .module


def test_keyword_arguments_and_structured_outputs_pass_through_unchanged() -> None:
    class Structured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, *, tag: str) -> dict[str, Any]:
            return {"tag": tag, "nested": [(self.layer(x),)], "x": x}

    module, x = Structured(), torch.ones(1, 2)
    output = DistributedDataParallel(module, communicator=alone())(x, tag="a")
    assert output["tag"] == "a"
    assert output["x"] is x
    assert_same_bits([module.layer(x), output["nested"][0][0]])


def test_whether_backward_synchronizes_can_be_read_and_set() -> None:
    wrapper = DistributedDataParallel(net(), communicator=alone())
    assert wrapper.require_backward_grad_sync
    with wrapper.no_sync():
        assert not wrapper.require_backward_grad_sync
    assert wrapper.require_backward_grad_sync
    wrapper.require_backward_grad_sync = False
    with wrapper.no_sync():
        pass
    assert not wrapper.require_backward_grad_sync


def accumulate_by_attribute() -> tuple[list[Any], list[Any], list[Any]]:
    """Accelerate and Lightning set the attribute instead of entering no_sync."""
    wrapper = DistributedDataParallel(net())
    wrapper.require_backward_grad_sync = False
    loss_of(wrapper, rank_here(), 0).backward()
    alone = gradients(wrapper)
    wrapper.require_backward_grad_sync = True
    loss_of(wrapper, rank_here(), 1).backward()
    return alone, gradients(wrapper), gradients_of_ranks(dist.get_world_size(), steps=[0, 1])


def gradients_of_ranks(world_size: int, steps: Sequence[int]) -> list[Any]:
    model = net()
    for rank in range(world_size):
        for step in steps:
            (loss_of(model, rank, step) / world_size).backward()
    return gradients(model)


def test_setting_require_backward_grad_sync_works_like_no_sync(pair: RankPool) -> None:
    results = pair.run(accumulate_by_attribute)
    for rank, (local, mean, expected) in enumerate(results):
        model = net()
        loss_of(model, rank, 0).backward()
        assert_same(local, gradients(model))
        assert_same(mean, expected)


def test_set_static_graph_is_accepted_and_seen() -> None:
    wrapper = DistributedDataParallel(net(), communicator=alone())
    wrapper._set_static_graph()
    assert wrapper.static_graph


def logging_data() -> tuple[dict[str, Any], dict[str, Any]]:
    ours = DistributedDataParallel(net(), bucket_cap_mb=HUGE)
    theirs = wrap_torch(net())
    train(ours, range(3))
    train(theirs, range(3))
    return ours._get_ddp_logging_data(), theirs._get_ddp_logging_data()


def test_logging_data_has_torchs_names_and_values(pair: RankPool) -> None:
    for rank, (ours, theirs) in enumerate(pair.run(logging_data)):
        alike = ["world_size", "rank", "backend_name", "module_name", "num_parameter_tensors"]
        alike += ["total_parameter_size_bytes", "broadcast_buffers", "find_unused_parameters", "device_ids"]
        assert {name: ours[name] for name in alike} == {name: theirs[name] for name in alike}
        assert ours["rank"] == rank
        assert ours["iteration"] == 3
        assert ours["num_buckets"] == 1
        assert {"bucket_cap_bytes", "bucket_sizes", "dtypes", "gradient_as_bucket_view"} <= ours.keys()
        assert "comm_hook" not in ours.keys() | theirs.keys()  # a plain mean is none


# -- copies -----------------------------------------------------------------------------------------------------------


def train_a_copy(copier: Callable[[Any], Any], kwargs: dict[str, Any]) -> list[list[torch.Tensor]]:
    original = DistributedDataParallel(net(norm=True), **kwargs)
    train(original, range(2))
    copied = copier(original)
    assert type(copied) is type(original)
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in original.parameters()}
    results = [train(copied, range(2, 5)), train(original, range(2, 5))]
    uninterrupted = wrap_torch(net(norm=True))
    train(uninterrupted, range(2))
    return [*results, train(uninterrupted, range(2, 5))]


@pytest.mark.parametrize("copier", COPIERS)
def test_a_copy_and_its_original_train_on_exactly(pair: RankPool, copier: Callable[[Any], Any]) -> None:
    results = pair.run(train_a_copy, copier, {"bucket_cap_mb": 0.0003, "schedule": "bucketed"})
    for copied, original, expected in results:
        assert_same(copied, expected)
        assert_same(original, expected)
    assert_same_bits(results)


@pytest.mark.parametrize("copier", COPIERS)
def test_a_watched_wrapper_can_be_copied_too(pair: RankPool, copier: Callable[[Any], Any]) -> None:
    for copied, _, expected in pair.run(train_a_copy, copier, {"observer": Timeline()}):
        assert_same(copied, expected)


def hook_after_a_copy(copier: Callable[[Any], Any]) -> list[Any]:
    wrapper = DistributedDataParallel(net())
    wrapper.register_comm_hook(None, debugging_hooks.noop_hook)
    copied = copier(wrapper)
    loss_of(copied, rank_here()).backward()
    return gradients(copied)


@pytest.mark.parametrize("copier", COPIERS)
def test_a_copy_keeps_the_communication_hook(pair: RankPool, copier: Callable[[Any], Any]) -> None:
    for rank, kept in enumerate(pair.run(hook_after_a_copy, copier)):
        model = net()
        loss_of(model, rank).backward()
        assert_same(kept, gradients(model))  # noop_hook leaves every rank its own


def copy_over_a_subgroup() -> str:
    with subgroups(2) as group:
        wrapper = DistributedDataParallel(net(), process_group=group)
        for copier in COPIERS:
            with pytest.raises(MisuseError, match=r"default process group.*\.module"):
                copier(wrapper)
        return type(copy.deepcopy(wrapper.module)).__name__


def test_a_wrapper_over_a_subgroup_refuses_to_be_copied_and_says_what_can_be(four: RankPool) -> None:
    assert four.run(copy_over_a_subgroup) == ["Sequential"] * 4


# -- the same start on all ranks --------------------------------------------------------------------------------------


class ManyKinds(nn.Module):
    """Parameters and buffers of all kinds, filled with the number given."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 2), float(value)))
        self.transposed = nn.Parameter(torch.full((3, 2), float(value)).t())
        self.narrow = nn.Parameter(torch.full((5,), value, dtype=torch.bfloat16))
        self.phase = nn.Parameter(torch.full((2,), value * 1j, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0))
        self.frozen = nn.Parameter(torch.tensor(float(value)), requires_grad=False)
        self.register_buffer("count", torch.tensor(value))
        self.register_buffer("mask", torch.tensor([value > 0, value < 0]))
        self.register_buffer("image", torch.full((1, 2, 3, 3), float(value)).to(memory_format=torch.channels_last))
        self.register_buffer("waves", torch.full((2,), value * 1j, dtype=torch.complex128))
        self.register_buffer("forgotten", torch.tensor(float(value)), persistent=False)
        self.register_buffer("nothing", None)


def start(kwargs: dict[str, Any]) -> list[torch.Tensor]:
    wrapper = DistributedDataParallel(ManyKinds(rank_here() + 1), **kwargs)
    return [*values(wrapper), *buffers(wrapper)]


def everything_of(model: nn.Module) -> list[torch.Tensor]:
    return [*values(model), *buffers(model)]


def test_ranks_start_from_the_values_of_rank_0(ranks: Ranks) -> None:
    assert_same_bits([everything_of(ManyKinds(1)), *ranks.run(start, {})])


def test_without_init_sync_every_rank_keeps_its_own_values(ranks: Ranks) -> None:
    for rank, kept in enumerate(ranks.run(start, {"init_sync": False})):
        assert_same_bits([everything_of(ManyKinds(rank + 1)), kept])


# -- buffers ----------------------------------------------------------------------------------------------------------


def own_statistics(model: nn.Sequential, rank: int) -> nn.Sequential:
    """Ranks that differ in their buffers from the start."""
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    norm.running_mean.fill_(rank + 1.0)
    return model


def follow_buffers(wrapped: nn.Module, script: Sequence[str]) -> list[Any]:
    """What buffers hold, and whether they will be broadcast, after each event of the script."""
    wrapper: Any = wrapped
    rank, story = rank_here(), [[wrapper.will_sync_module_buffers(), buffers(wrapper)]]
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for step, event in enumerate(script):
        with contextlib.ExitStack() as stack:
            if event == "quiet":
                stack.enter_context(wrapper.no_sync())
            if event in ("watch", "eval"):
                stack.enter_context(torch.no_grad())
            wrapper.train(event != "eval")
            loss = loss_of(wrapper, rank, step)
            if loss.requires_grad:
                loss.backward()
        if event == "train":
            optimizer.step()
            optimizer.zero_grad()
        story.append([wrapper.will_sync_module_buffers(), buffers(wrapper), loss.detach()])
    return story


def follow_both(script: Sequence[str], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        ours = DistributedDataParallel(own_statistics(net(norm=True), rank_here()), **kwargs)
    theirs = wrap_torch(own_statistics(net(norm=True), rank_here()), **kwargs)
    return follow_buffers(ours, script), follow_buffers(theirs, script)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"broadcast_buffers": True},
        {"broadcast_buffers": False},
        {"forward_sync_buffers": True},
        {"forward_sync_buffers": False},
        {"broadcast_buffers": False, "forward_sync_buffers": True},
        {"broadcast_buffers": True, "forward_sync_buffers": False},
        {"init_sync": False},
    ],
    ids=lambda kwargs: "-".join(f"{name}={value}" for name, value in kwargs.items()) or "default",
)
def test_buffers_are_those_of_torchs_wrapper_step_by_step(pair: RankPool, kwargs: dict[str, Any]) -> None:
    for ours, theirs in pair.run(follow_both, ["train", "train", "quiet", "quiet", "train"], kwargs):
        assert_same(ours, theirs)


def test_buffers_are_those_of_torchs_wrapper_around_evaluations(pair: RankPool) -> None:
    script = ["train", "eval", "eval", "train", "watch", "watch", "train", "eval"]
    for ours, theirs in pair.run(follow_both, script, {}):
        assert_same([step[1:] for step in ours], [step[1:] for step in theirs])


def evaluate_unevenly(wrap: Any) -> list[torch.Tensor]:
    wrapper = wrap(net(norm=True))
    train(wrapper, range(2))
    wrapper.eval()
    with torch.no_grad():
        for step in range(1 + 2 * rank_here()):
            loss_of(wrapper, rank_here(), step)
    wrapper.train()
    return train(wrapper, range(2, 4))


def test_ranks_may_evaluate_different_numbers_of_batches_as_under_torch(pair: RankPool) -> None:
    assert_same(*under_both(pair, evaluate_unevenly))


class Replacing(nn.Module):
    """Puts other tensors in the place of its buffers; one of them does not exist at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("latest", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs) + self.average
        if self.latest is not None:
            output = output + self.latest
        self.average = self.average * 0.9 + output.detach().mean(0) * 0.1
        self.latest = output.detach()[0]
        return output


def replace_buffers(lazily: bool) -> tuple[list[Any], list[Any]]:
    results = []
    for wrap in (DistributedDataParallel, wrap_torch):
        module = filled(Replacing()).double()
        if not lazily:
            module.latest = torch.zeros(3, dtype=torch.float64)
        wrapper = wrap(module)
        train(wrapper, range(3))
        results.append([values(wrapper), buffers(wrapper)])
    return results[0], results[1]


@pytest.mark.parametrize("lazily", [False, True])
def test_buffers_that_the_module_replaces_are_broadcast_as_they_are_now(pair: RankPool, lazily: bool) -> None:
    for ours, theirs in pair.run(replace_buffers, lazily):
        assert_same(ours, theirs)


def buffer_broadcast_keeps_the_graph() -> list[Any]:
    """Two forwards, then the backward of both: the second broadcast must not spoil what the first one saved."""
    wrapper = DistributedDataParallel(filled(nn.Sequential(nn.Linear(6, 8), Scale(), nn.Linear(8, 3))).double())
    first, second = loss_of(wrapper, rank_here(), 0), loss_of(wrapper, rank_here(), 1)
    (first + second).backward()
    return gradients(wrapper)


class Scale(nn.Module):
    """Multiplies by a buffer, which autograd therefore saves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((8,), 2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.factor


def test_a_broadcast_between_two_forwards_leaves_the_first_ones_graph_usable(pair: RankPool) -> None:
    results = pair.run(buffer_broadcast_keeps_the_graph)
    model = filled(nn.Sequential(nn.Linear(6, 8), Scale(), nn.Linear(8, 3))).double()
    sum(loss_of(model, rank, step) / 2 for rank in range(2) for step in range(2)).backward()
    for result in results:
        assert_same(result, gradients(model))


# -- groups and meshes ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def subgroups(size: int) -> Iterator[Any]:
    """The world cut into groups of neighbours; this rank's group."""
    world_size = dist.get_world_size()
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
    try:
        yield groups[dist.get_rank() // size]
    finally:
        dist.destroy_process_group(groups[dist.get_rank() // size])


def train_in_subgroups() -> list[torch.Tensor]:
    with subgroups(2) as group:
        wrapper = DistributedDataParallel(net(seed=dist.get_rank()), process_group=group)
        assert wrapper.communicator.world_size == 2
        return train(wrapper, range(4), rank=dist.get_rank())


def test_the_mean_is_over_the_process_group_given_and_no_further(four: RankPool) -> None:
    results = four.run(train_in_subgroups)
    assert_same(results[0], train_alone(net(seed=0), range(4), ranks=[0, 1]))
    assert_same(results[2], train_alone(net(seed=2), range(4), ranks=[2, 3]))
    assert_same_bits(results[:2])
    assert_same_bits(results[2:])


def wrap_outside_the_group() -> str:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        dist.destroy_process_group(group)
        return ""
    with pytest.raises(NoProcessGroupError) as caught:
        DistributedDataParallel(net(), process_group=group)
    return str(caught.value)


def test_a_rank_outside_the_process_group_is_told_so(pair: RankPool) -> None:
    assert "rank 1" in pair.run(wrap_outside_the_group)[1]


def device_here() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def train_over_a_mesh() -> list[torch.Tensor]:
    mesh = init_device_mesh(device_here(), (2,))
    wrapper = DistributedDataParallel(net(seed=rank_here()), device_mesh=mesh)
    assert wrapper.device_mesh is mesh
    assert not hasattr(DistributedDataParallel(net()), "device_mesh")  # as in torch
    return train(wrapper, range(3))


def test_a_device_mesh_of_one_dimension_is_a_group(pair: RankPool) -> None:
    results = pair.run(train_over_a_mesh)
    assert_same(results[0], train_alone(net(), range(3), ranks=[0, 1]))
    assert_same_bits(results)


def train_over_a_slice() -> tuple[str, list[torch.Tensor]]:
    mesh = init_device_mesh(device_here(), (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ConfigurationError) as refused:
        DistributedDataParallel(net(), device_mesh=mesh)
    wrapper = DistributedDataParallel(net(seed=dist.get_rank()), device_mesh=mesh["dp"])
    return str(refused.value), train(wrapper, range(3), rank=dist.get_rank())


def test_a_device_mesh_of_two_dimensions_is_refused_but_one_of_them_is_a_group(four: RankPool) -> None:
    results = four.run(train_over_a_slice)
    assert all("one dimension" in refusal for refusal, _ in results)
    for first in (0, 1):  # the mesh has 0 1 in its first row and 2 3 in its second
        expected = train_alone(net(seed=first), range(3), ranks=[first, first + 2])
        assert_same([results[first][1], results[first + 2][1]], [expected, expected])


# -- parameters that are left alone or come late ----------------------------------------------------------------------


def ignore_some(wrap: Any) -> list[Any]:
    model = own_statistics(net(seed=rank_here(), norm=True), rank_here())
    names = ["0.bias", "3.weight", "1.running_mean"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapper = wrap(model)
    train(wrapper, range(2))
    loss_of(wrapper, rank_here(), 2).backward()
    return [values(wrapper), gradients(wrapper), buffers(wrapper)]


def test_ignored_parameters_and_buffers_are_each_ranks_own_as_under_torch(pair: RankPool) -> None:
    ours, theirs = under_both(pair, ignore_some)
    assert_same(ours, theirs)
    assert not torch.equal(ours[0][0][1], ours[1][0][1])  # 0.bias


class Recorder:
    """Notes the names of what is started."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []
        self.windows: list[list[list[str]]] = []

    def backward_began(self, *, synchronizes: bool) -> None: ...
    def bucket_ready(self, bucket: Any) -> None: ...
    def backward_ended(self) -> None: ...
    def bucket_finished(self, bucket: Any) -> None: ...

    def bucket_started(self, bucket: Any, handle: Any) -> None:
        self.started.append([spec.name for spec in bucket.specs])

    def synchronization_finished(self) -> None:
        self.windows.append(self.started)
        self.started = []


def delay_some(cap: float) -> tuple[list[torch.Tensor], list[list[list[str]]]]:
    model, recorder = net(), Recorder()
    delayed = [(name, p) for name, p in model.named_parameters() if name in ("2.weight", "2.bias")]
    wrapper = DistributedDataParallel(
        model,
        delay_all_reduce_named_params=delayed,
        param_to_hook_all_reduce=model[0].weight,
        bucket_cap_mb=cap,
        observer=recorder,
    )
    return train(wrapper, range(4)), recorder.windows


@pytest.mark.parametrize("cap", [TINY, HUGE])
def test_delayed_parameters_start_last_and_are_exact(pair: RankPool, cap: float) -> None:
    expected = train_alone(net(), range(4), ranks=[0, 1])
    for trained, windows in pair.run(delay_some, cap):
        assert_same(trained, expected)
        assert len(windows) == 4
        for window in windows:
            names = [name for bucket in window for name in bucket]
            assert set(names[:2]) == {"0.weight", "0.bias"}
            assert set(names[2:]) == {"2.weight", "2.bias"}
            assert not any(
                {"0.weight", "0.bias"} & set(bucket) and {"2.weight", "2.bias"} & set(bucket) for bucket in window
            )


# -- torch's communication hooks --------------------------------------------------------------------------------------


def power_state() -> Any:
    return powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )


HOOKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook),
    "bf16": (lambda: None, default_hooks.bf16_compress_hook),
    "noop": (lambda: None, debugging_hooks.noop_hook),
    "power": (power_state, powerSGD_hook.powerSGD_hook),
    "fp16-allreduce": (lambda: None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16-allreduce": (lambda: None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
    "fp16-power": (power_state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
}


def train_with_hook(name: str, cap: float, wrap: Any) -> list[torch.Tensor]:
    wrapper = wrap(net(dtype=torch.float32), bucket_cap_mb=cap)
    state, hook = HOOKS[name]
    wrapper.register_comm_hook(state(), hook)
    return train(wrapper, range(6))


# In several buckets PowerSGD hangs under torch: Gloo's threads start what it chains in any order. See
# test_stateful_hooks.py for ours.
@pytest.mark.parametrize(
    ("name", "cap"),
    [(name, cap) for name in HOOKS if "bf16" not in name for cap in (TINY, HUGE) if cap == HUGE or "power" not in name],
)
def test_torchs_hooks_give_the_numbers_they_give_under_torch(pair: RankPool, name: str, cap: float) -> None:
    ours, theirs = under_both(pair, train_with_hook, name, cap)
    # Compression magnifies the last bit of its input by the condition of the matrices.
    assert_same(ours, theirs, rtol=1e-3 if "fp16-power" in name else 1e-5)
    if name != "noop":
        assert_same_bits(ours)


def hooked_gradients(name: str) -> list[Any]:
    wrapper = DistributedDataParallel(net(dtype=torch.float32))
    state, hook = HOOKS[name]
    wrapper.register_comm_hook(state(), hook)
    loss_of(wrapper, rank_here()).backward()
    return gradients(wrapper)


@pytest.mark.parametrize("name", ["bf16", "bf16-allreduce"])
def test_the_bfloat16_hooks_run_where_torch_refuses_them(pair: RankPool, name: str) -> None:
    expected = cast_by_hand(torch.bfloat16)
    for result in pair.run(hooked_gradients, name):
        assert_same_bits([expected, result])


def cast_by_hand(dtype: torch.dtype) -> list[torch.Tensor]:
    """What two ranks get if their gradients are cast, halved and added."""
    models = [net(dtype=torch.float32) for _ in range(2)]
    for rank, model in enumerate(models):
        loss_of(model, rank).backward()
    pairs = zip(*(gradients(model) for model in models), strict=True)
    return [sum(g.to(dtype) / 2 for g in pair if g is not None).float() for pair in pairs]  # type: ignore[union-attr]


def unused_under_hook(hook_name: str, wrap: Any) -> list[Any]:
    model, seen = filled(Branches()), []
    # torch's needs to be told.
    wrapper = wrap(model, **({"find_unused_parameters": True} if wrap is wrap_torch else {}))
    state, hook = HOOKS[hook_name]
    wrapper.register_comm_hook(state(), hook)
    for step in range(4):
        wrapper.zero_grad()
        inputs, targets = batch(rank_here(), step, torch.float32)
        mse_loss(wrapper(inputs, (rank_here() + step // 2) % 2), targets).backward()
        seen.append(gradients(wrapper))
    return seen


@pytest.mark.parametrize("hook_name", ["allreduce", "fp16"])
def test_unused_parameters_under_a_hook_are_as_under_torch(pair: RankPool, hook_name: str) -> None:
    ours, theirs = under_both(pair, unused_under_hook, hook_name)
    assert_same(ours, theirs, rtol=1e-5)
    assert all(step[-1] is None for step in ours[0])  # the branch nobody uses


class BucketNotes:
    """A hook that looks at everything a bucket shows."""

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.last: list[bool] = []
        self.names: list[list[int]] = []

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self.indices.append(bucket.index())
        self.last.append(bucket.is_last())
        shown = list(zip(bucket.gradients(), bucket.parameters(), strict=True))
        assert all(gradient.shape == parameter.shape for gradient, parameter in shown)
        buffer = bucket.buffer()
        marked = buffer.clone()
        bucket.gradients()[0].add_(1)
        assert not torch.equal(buffer, marked), "gradients() must be views of buffer()"
        bucket.gradients()[0].sub_(1)
        bucket.set_buffer(buffer.double())
        assert bucket.buffer().dtype == torch.float64
        assert [gradient.dtype for gradient in bucket.gradients()] == [torch.float64] * len(shown)
        assert [gradient.shape for gradient in bucket.gradients()] == [parameter.shape for _, parameter in shown]
        bucket.set_buffer(buffer)
        return default_hooks.allreduce_hook(state, bucket)


def show_buckets(wrap: Any) -> tuple[list[int], list[bool], list[torch.Tensor]]:
    wrapper, notes = wrap(net(dtype=torch.float32), bucket_cap_mb=TINY), BucketNotes()
    wrapper.register_comm_hook(None, lambda state, bucket: notes(state, bucket))
    return notes.indices, notes.last, train(wrapper, range(3))


def test_a_hook_sees_buckets_as_torch_shows_them(pair: RankPool) -> None:
    ours, theirs = under_both(pair, show_buckets)
    for indices, last, _ in [*ours, *theirs]:
        assert indices[-8:] == [0, 1, 2, 3] * 2  # torch's first window has one bucket only
        assert last[-8:] == [False, False, False, True] * 2
    assert_same([result[2] for result in ours], [result[2] for result in theirs], rtol=1e-5)


def chain_collectives(wrap: Any) -> list[torch.Tensor]:
    """A hook whose second collective starts when the first has ended; rank 1 waits for both before it returns."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        def add_again(future: Any) -> torch.Tensor:
            (tensor,) = future.value()
            dist.all_reduce(tensor.div_(2))
            return tensor.div_(2)

        first = dist.all_reduce(bucket.buffer(), async_op=True)
        assert first is not None
        future: Any = first.get_future().then(add_again)
        if dist.get_rank() == 1:
            future.wait()
        return future

    wrapper = wrap(net(), bucket_cap_mb=HUGE)
    wrapper.register_comm_hook(None, hook)
    return train(wrapper, range(5))


def test_the_collectives_that_a_hook_chains_are_not_mixed_up_with_the_engines_own(pair: RankPool) -> None:
    assert_same(*under_both(pair, chain_collectives))


class WritesFrom:
    """A hook that from some window on divides in place, while backward goes on."""

    def __init__(self, window: int) -> None:
        self.window, self.windows = window, 0
        self.first: Any = None

    def hook(self, state: Any, bucket: Any) -> Any:
        def divide(future: Any) -> torch.Tensor:
            (tensor,) = future.value()
            return tensor.div_(2) if self.windows >= self.window else tensor / 2

        self.windows += bucket.index() == 0
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        future = work.get_future().then(divide)
        if bucket.index() == 0:
            self.first = future
        elif bucket.is_last():
            self.first.wait()  # by now the first bucket has certainly been written to
        return future


def write_from(window: int) -> list[torch.Tensor]:
    wrapper = DistributedDataParallel(net(), bucket_cap_mb=TINY)
    wrapper.register_comm_hook(None, WritesFrom(window).hook)
    return train(wrapper, range(8))


@pytest.mark.parametrize("window", [1, 5])
def test_a_hook_may_write_into_its_bucket_at_any_window(pair: RankPool, window: int) -> None:
    expected = train_alone(net(), range(8), ranks=[0, 1])
    for result in pair.run(write_from, window):
        assert_same(result, expected)


def power_from(start: int, register_at: int, wrap: Any) -> list[torch.Tensor]:
    wrapper = wrap(net(dtype=torch.float32), bucket_cap_mb=HUGE)
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=start, min_compression_rate=1
    )
    train(wrapper, range(register_at))
    wrapper.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(wrapper, range(register_at, 8))


@pytest.mark.parametrize(("start", "register_at"), [(4, 0), (5, 0), (2, 2), (2, 3)])
def test_power_sgd_may_begin_at_any_window(pair: RankPool, start: int, register_at: int) -> None:
    assert_same(*under_both(pair, power_from, start, register_at), rtol=1e-4)


def test_a_second_hook_is_refused() -> None:
    wrapper = DistributedDataParallel(net(), communicator=alone())
    wrapper.register_comm_hook(None, debugging_hooks.noop_hook)
    with pytest.raises(MisuseError, match="once"):
        wrapper.register_comm_hook(None, debugging_hooks.noop_hook)


# -- beside other parts of torch --------------------------------------------------------------------------------------


def train_with_optimizer(sharded: bool) -> list[torch.Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapper = DistributedDataParallel(net())
    optimizer = (
        ZeroRedundancyOptimizer(wrapper.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
        if sharded
        else torch.optim.Adam(wrapper.parameters(), lr=0.01)
    )
    for step in range(4):
        optimizer.zero_grad()
        loss_of(wrapper, rank_here(), step).backward()
        optimizer.step()
    return values(wrapper)


def test_a_sharded_optimizer_gives_the_numbers_of_the_plain_one(pair: RankPool) -> None:
    sharded = pair.run(train_with_optimizer, sharded=True)
    assert_same_bits(sharded)
    assert_same(sharded, pair.run(train_with_optimizer, sharded=False))


def train_compiled(where: str) -> list[torch.Tensor]:
    module: nn.Module = net()
    if where == "inside":
        module = torch.compile(module, backend="aot_eager")  # type: ignore[assignment]
    wrapper: Any = DistributedDataParallel(module, bucket_cap_mb=0.0003)
    if where == "around":
        wrapper = torch.compile(wrapper, backend="aot_eager")
    return train(wrapper, range(4))


@pytest.mark.program
@pytest.mark.parametrize("where", ["around", "inside"])
def test_a_compiled_model_trains_to_the_same_numbers(pair: RankPool, where: str) -> None:
    results = pair.run(train_compiled, where)
    assert_same(results[0], train_alone(net(), range(4), ranks=[0, 1]))
    assert_same_bits(results)


# -- uneven inputs ----------------------------------------------------------------------------------------------------


def join_training(
    counts: Sequence[int], kwargs: dict[str, Any], join: dict[str, Any], wrap: Any, sharded: bool = False
) -> list[Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapper, rank = wrap(own_statistics(net(norm=True), rank_here()), **kwargs), rank_here()
    optimizer: Any
    if sharded:
        optimizer = ZeroRedundancyOptimizer(wrapper.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        context = Join([wrapper, optimizer], **join)
    else:
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=0.9)
        context = wrapper.join(**join)
    losses = []
    with warnings.catch_warnings(), context:  # Join changes the filters
        for step in range(counts[rank]):
            optimizer.zero_grad()
            loss = loss_of(wrapper, rank, step)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return [values(wrapper), buffers(wrapper), losses]


UNEVEN = {2: [[3, 1], [0, 2], [2, 0], [2, 2]], 3: [[3, 0, 1]], 4: [[1, 3, 0, 2], [5, 5, 5, 4]]}


@pytest.mark.parametrize("by_world_size", [True, False], ids=["by-world-size", "by-active-ranks"])
def test_uneven_inputs_give_torchs_numbers_and_one_model(process_ranks: RankPool, by_world_size: bool) -> None:
    join = {"divide_by_initial_world_size": by_world_size}
    for counts in UNEVEN[process_ranks.world_size]:
        ours, theirs = under_both(process_ranks, join_training, counts, {}, join)
        assert_same(ours, theirs)
        assert_same_bits([result[0] for result in ours])


@pytest.mark.parametrize("kwargs", [{"bucket_cap_mb": TINY}, {"forward_sync_buffers": False}], ids=str)
def test_uneven_inputs_give_torchs_numbers_with_other_settings(pair: RankPool, kwargs: dict[str, Any]) -> None:
    assert_same(*under_both(pair, join_training, [3, 1], kwargs, {}))


@pytest.mark.parametrize("counts", [[3, 1], [1, 3], [0, 2]], ids=str)
def test_uneven_inputs_with_a_sharded_optimizer_give_the_plain_ones_numbers(pair: RankPool, counts: list[int]) -> None:
    # Under torch's wrapper the shard of a rank that has run out is stepped with that rank's last gradients.
    sharded = pair.run(join_training, counts, {}, {}, wrap_ours, sharded=True)
    plain = pair.run(join_training, counts, {}, {}, wrap_ours)
    assert_same(sharded, plain)
    assert_same_bits([result[0] for result in sharded])


def join_accumulating(wrap: Any) -> list[Any]:
    wrapper, rank = wrap(net(norm=True)), rank_here()
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    with warnings.catch_warnings(), wrapper.join(divide_by_initial_world_size=False):
        for window in range(3 - 2 * rank):
            with wrapper.no_sync():
                loss_of(wrapper, rank, 2 * window).backward()
            loss_of(wrapper, rank, 2 * window + 1).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [values(wrapper), buffers(wrapper)]


def test_uneven_inputs_with_accumulation_give_torchs_numbers(pair: RankPool) -> None:
    assert_same(*under_both(pair, join_accumulating))


def join_then_train() -> list[torch.Tensor]:
    wrapper = DistributedDataParallel(net())
    with warnings.catch_warnings(), wrapper.join(divide_by_initial_world_size=False):
        if rank_here() == 0:
            train(wrapper, [0])
    return train(wrapper, range(1, 3))


def test_after_a_join_the_mean_is_over_all_ranks_again(pair: RankPool) -> None:
    model = net()
    train_alone(model, [0], ranks=[0])
    expected = train_alone(model, range(1, 3), ranks=[0, 1])
    for result in pair.run(join_then_train):
        assert_same(result, expected)


@pytest.mark.parametrize("counts", [[3, 1], [0, 2]], ids=str)
def test_early_termination_raises_on_all_ranks_if_asked_to(pair: RankPool, counts: list[int]) -> None:
    join = {"throw_on_early_termination": True}
    results = pair.run(join_training, counts, {}, join, wrap_ours, expect_errors=True)
    assert [isinstance(result, RankError) and result.kind for result in results] == ["RuntimeError"] * 2
    assert "exhausted" in str(results[0])
    assert "exhausted" in str(results[1])


def test_a_join_that_is_not_enabled_does_nothing(pair: RankPool) -> None:
    assert_same(*under_both(pair, join_training, [2, 2], {}, {"enable": False}))


def test_join_over_threads_says_what_is_missing() -> None:
    wrapper = DistributedDataParallel(net(), communicator=alone())
    with pytest.raises(MisuseError, match="process group"):
        wrapper.join()
    # The refusal leaves the wrapper as it was.
    train(wrapper, range(2), rank=0)


# -- schedules --------------------------------------------------------------------------------------------------------


def counted(calls: list[str]) -> Any:
    """This rank's communicator; collectives that it starts are noted."""
    communicator = choose_communicator()
    for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter"):
        original = getattr(communicator, name)

        def note(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            calls.append(_name)
            return _original(*args, **kwargs)

        setattr(communicator, name, note)
    return communicator


def count_collectives(schedule: str, cap: float, micro_batches: int) -> tuple[list[list[str]], list[torch.Tensor]]:
    calls: list[str] = []
    wrapper = DistributedDataParallel(
        net(),
        communicator=counted(calls),
        schedule=schedule,
        bucket_cap_mb=cap,  # type: ignore[arg-type]
    )
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    windows = []
    for window in range(8):
        calls.clear()
        with wrapper.no_sync():
            for step in range(micro_batches - 1):
                loss_of(wrapper, rank_here(), 10 * window + step).backward()
        loss_of(wrapper, rank_here(), 10 * window + 9).backward()
        optimizer.step()
        optimizer.zero_grad()
        windows.append(list(calls))
    return windows, values(wrapper)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("schedule", "cap", "expected"),
    [
        ("naive", HUGE, 4),
        ("bucketed", HUGE, 1),
        ("overlapped", HUGE, 1),
        ("bucketed", TINY, 4),
        ("overlapped", TINY, 4),
        ("overlapped", 448 / 2**20, 2),  # 24 + 192 + 64 bytes, and 384
    ],
)
def test_a_window_costs_one_collective_a_bucket(
    ranks: Ranks, schedule: str, cap: float, expected: int, micro_batches: int
) -> None:
    results = ranks.run(count_collectives, schedule, cap, micro_batches)
    for windows, trained in results:
        # The first window begins with the question whether anybody counts, windows 2, 3 and 5 with a meeting about the
        # order of the gradients.
        assert windows[0] == ["all_reduce"] * (1 + expected)
        assert [windows[number - 1] for number in (4, 6, 7, 8)] == [["all_reduce"] * expected] * 4
        assert sum(map(len, windows)) <= 8 * expected + 1 + 3 * 2
        assert_same_bits([results[0][1], trained])
