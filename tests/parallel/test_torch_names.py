"""What other libraries reach for in the wrapper: hooks on buffers, ignored names, optimizers in backward, groups."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from gradsync import ConfigurationError, DistributedDataParallel, MisuseError
from gradsync.communicator import InProcessWorld
from gradsync.errors import NotCallableError
from tests.ranks import RankPool

TorchDDP = nn.parallel.DistributedDataParallel

# What of torch's wrapper is not here: parts of its own machinery, which nothing outside of it can use.
ABSENT = """
_accum_grad_hooks _assign_modules_buffers _bucket_config _build_debug_param_to_name_mapping _build_params_for_reducer
_check_and_sync_module_buffers _check_comm_hook _check_default_group _check_global_requires_backward_grad_sync
_clear_grad_buffer _comm_hooks _ddp_init_helper _ddp_sink_clone _delay_all_reduce_all_params _delay_all_reduce_params
_delay_grad_buffer _delay_grad_views _delayed_all_reduce_hook _distributed_broadcast_coalesced _find_common_rank
_fire_reducer_autograd_hook _get_parameters _has_rebuilt_buckets _log_and_throw _match_all_reduce_for_bwd_pass
_match_unused_params_allreduce _module_wait_for_copy_hook _passing_sync_batchnorm_handle _register_accum_grad_hook
_register_delay_all_reduce_hook _root_copy_hook _run_ddp_forward _set_sparse_metadata _setup_in_backward_optimizers
_sync_final_model _use_python_reducer logger reducer
"""


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def inputs(step: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def alone(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, communicator=InProcessWorld(1).communicator(0), **options)


def hang_optimizers(model: nn.Module, **settings: float) -> None:
    """In the ranks: at its import torch warns of itself."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), settings)


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def absent_names() -> list[str]:
    names = set(dir(TorchDDP(net()))) - set(dir(DistributedDataParallel(net())))
    return sorted(names)


def test_nothing_else_of_torchs_wrapper_is_missing(pair: RankPool) -> None:
    assert pair.run(absent_names) == [sorted(ABSENT.split())] * 2


def test_sizes_of_buckets_are_shown_as_torch_shows_them() -> None:
    listed = alone(net(), bucket_cap_mb_list=[1, 2])
    assert (listed.bucket_bytes_cap_list, listed.bucket_bytes_cap) == ([1 << 20, 2 << 20], 2 << 20)
    assert alone(net(), bucket_cap_mb_list=[3]).bucket_bytes_cap_list == [3 << 20]
    assert alone(net(), bucket_cap_mb_list=[]).bucket_bytes_cap_default
    one = alone(net(), bucket_cap_mb=25)
    assert (one.bucket_bytes_cap_list, one.bucket_bytes_cap, one.bucket_bytes_cap_default) == ([], 25 << 20, False)
    assert alone(net()).bucket_bytes_cap_default


def warned(**options: Any) -> list[tuple[str, str]]:
    told = []
    for wrap in (alone, TorchDDP):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrap(net(), **options)
        told.append([(each.category.__name__, each.filename) for each in caught])
    assert told[0] == told[1]
    return told[0]


def how_often_it_warns() -> list[int]:
    flags = [None, False, True]
    given = [{"broadcast_buffers": old, "forward_sync_buffers": new} for old in flags for new in flags]
    return [len(warned(**options)) for options in [*given, {"check_reduction": True}]]


def test_it_warns_of_old_arguments_whenever_torch_does(pair: RankPool) -> None:
    assert pair.run(how_often_it_warns) == [[0, 0, 0, *[1] * 6, 1]] * 2


# -- hooks on buffers -------------------------------------------------------------------------------------------------


def sum_now(state: Any, buffers: dict[str, torch.Tensor]) -> None:
    state.append(sorted(buffers))
    for buffer in buffers.values():
        dist.all_reduce(buffer)


def sum_later(state: Any, buffers: dict[str, torch.Tensor]) -> Any:
    state.append(sorted(buffers))
    works = [dist.all_reduce(buffer, async_op=True) for buffer in buffers.values()]
    return [work.get_future() for work in works if work is not None]


def with_buffer_hook(wrap: Any, hook: Any, location: Any) -> list[Any]:
    wrapper, seen = wrap(net()), list[Any]()
    wrapper._register_buffer_comm_hook(seen, hook, location)
    story = []
    for step in range(3):
        wrapper(inputs(step)).sum().backward()
        story.append([buffer.clone() for buffer in wrapper.buffers()])
    if hook is sum_now:  # torch waits for futures in backwards that synchronize, so the next forward races with them
        with wrapper.no_sync():
            wrapper(inputs(3)).sum().backward()
        wrapper(inputs(4)).sum().backward()
    assert seen == [["1.num_batches_tracked", "1.running_mean", "1.running_var"]] * len(seen)
    return [len(seen), story, [buffer.clone() for buffer in wrapper.buffers()]]


def compare_buffer_hooks() -> None:
    for hook in (sum_now, sum_later):
        for location in _BufferCommHookLocation:
            if hook is sum_later and location is _BufferCommHookLocation.PRE_FORWARD:
                continue  # the forward would race with the reduction
            same(*(with_buffer_hook(wrap, hook, location) for wrap in (DistributedDataParallel, TorchDDP)))


def test_a_hook_on_buffers_does_what_it_does_under_torch(pair: RankPool) -> None:
    pair.run(compare_buffer_hooks)


def join_with_buffer_hook(location: Any) -> list[torch.Tensor]:
    wrapper = DistributedDataParallel(net())
    wrapper._register_buffer_comm_hook([], sum_now, location)
    with wrapper.join():
        for step in range(2 + dist.get_rank()):
            wrapper(inputs(step)).sum().backward()
    return [buffer.clone() for buffer in wrapper.buffers()]


@pytest.mark.parametrize("location", list(_BufferCommHookLocation))
def test_ranks_without_data_take_part_in_a_hook_on_buffers(pair: RankPool, location: Any) -> None:
    first, second = pair.run(join_with_buffer_hook, location)
    same(first, second)


def test_a_hook_that_cannot_be_called_is_refused_with_torchs_class() -> None:
    for register in (alone(net()).register_comm_hook, alone(net())._register_buffer_comm_hook):
        with pytest.raises(NotCallableError, match="callable") as caught:
            register(None, {})  # type: ignore[arg-type]
        assert isinstance(caught.value, TypeError)


# -- ignored names ----------------------------------------------------------------------------------------------------


def replace_ignored() -> list[Any]:
    results = []
    for wrap in (DistributedDataParallel, TorchDDP):
        model = net()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight", "2.bias", "0.bias"])
        wrapper = wrap(model)
        torch.manual_seed(dist.get_rank())
        model[2] = nn.Linear(4, 2)
        model[0].bias = nn.Parameter(torch.full((4,), float(dist.get_rank())))
        wrapper(inputs()).square().sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    return results


def test_what_is_put_in_the_place_of_an_ignored_name_is_ignored(pair: RankPool) -> None:
    (ours, theirs), (others, _) = pair.run(replace_ignored)
    same(ours, theirs)
    assert torch.equal(ours[0], others[0])
    assert not torch.equal(ours[-1], others[-1])


def test_what_is_put_elsewhere_is_refused_as_before() -> None:
    model = net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
    wrapper = alone(model)
    model[2] = nn.Linear(4, 2)
    with pytest.raises(MisuseError, match=r"2\.weight.*after it was wrapped"):
        wrapper(torch.ones(2, 3))


def exchange_buffers() -> list[torch.Tensor]:
    model = net()
    wrapper = DistributedDataParallel(model)
    model[1] = nn.BatchNorm1d(4, affine=False)
    model[1].running_mean.fill_(dist.get_rank())
    wrapper.eval()(inputs())
    return [buffer.clone() for buffer in wrapper.buffers()]


def test_buffers_of_a_module_put_in_later_are_broadcast_too(pair: RankPool) -> None:
    first, second = pair.run(exchange_buffers)
    same(first, second)


# -- optimizers in backward -------------------------------------------------------------------------------------------


def step_in_backward(wrap: Any, before: bool) -> list[Any]:
    model = net()
    wrapper = None if before else wrap(model)
    hang_optimizers(model, lr=0.1, momentum=0.9)
    wrapper = wrapper or wrap(model)
    for step in range(3):
        wrapper(inputs(step)).square().sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    return [parameter.detach().clone() for parameter in model.parameters()]


def step_by_hand() -> list[Any]:
    wrapper = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        wrapper(inputs(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in wrapper.parameters()]


def compare_steps() -> list[Any]:
    expected = step_by_hand()
    same([step_in_backward(DistributedDataParallel, before) for before in (True, False)], [expected] * 2)
    return expected


def test_optimizers_hung_on_parameters_step_on_the_means(pair: RankPool) -> None:
    same(*pair.run(compare_steps))


def fused_steps() -> list[Any]:
    results = []
    for wrap in (DistributedDataParallel, TorchDDP):
        wrapper = wrap(net())
        wrapper._register_fused_optim(torch.optim.SGD, 0.1, momentum=0.9)
        for step in range(3):
            wrapper(inputs(step)).square().sum().backward()
            wrapper.zero_grad()
        results.append([parameter.detach().clone() for parameter in wrapper.parameters()])
    return results


def test_a_fused_optimizer_steps_as_under_torch(pair: RankPool) -> None:
    for ours, theirs in pair.run(fused_steps):
        torch.testing.assert_close(ours, theirs)


# -- hooks without Python, groups, meshes -----------------------------------------------------------------------------


def builtin_hooks() -> list[Any]:
    kinds = [dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS]  # type: ignore[attr-defined]
    results = []
    for kind in kinds:
        for wrap in (DistributedDataParallel, TorchDDP):
            wrapper: Any = wrap(net())
            wrapper._register_builtin_comm_hook(kind)
            assert wrapper._get_ddp_logging_data()["comm_hook"] == str(kind)
            wrapper(inputs()).square().sum().backward()
            results.append([parameter.grad for parameter in wrapper.parameters()])
    with pytest.raises(MisuseError, match="once"):
        DistributedDataParallel.register_comm_hook(_hooked(kinds[0]), None, print)
    with pytest.raises(ConfigurationError, match="BuiltinCommHookType"):
        DistributedDataParallel(net())._register_builtin_comm_hook("sum")
    return results


def _hooked(kind: Any) -> DistributedDataParallel:
    wrapper = DistributedDataParallel(net())
    wrapper._register_builtin_comm_hook(kind)
    return wrapper


def test_torchs_hooks_without_python_are_reductions(pair: RankPool) -> None:
    for plain, plain_torch, half, half_torch in pair.run(builtin_hooks):
        torch.testing.assert_close(plain, plain_torch)
        exact, ours, theirs = (torch.cat([each.flatten() for each in grads]) for grads in (plain, half, half_torch))
        # Each is rounded to float16 on its way; ours less often, so that it is nearer to the mean than to torch's.
        assert (ours - exact).abs().max() <= exact.abs().max() * 2**-10
        assert 0 < (ours - exact).norm() <= (theirs - exact).norm()


def change_groups() -> list[Any]:
    wrapper = DistributedDataParallel(net(), bucket_cap_mb=1e-4)
    means = []
    smaller = dist.new_group([0])
    for group in (dist.group.WORLD, smaller, dist.group.WORLD):
        wrapper._update_process_group(group)
        if group is not dist.group.WORLD and dist.get_rank() > 0:
            assert wrapper.process_group is dist.group.WORLD  # not in the group, nothing changes
            continue
        assert wrapper.process_group is group
        wrapper.zero_grad()
        wrapper(inputs()).square().sum().backward()
        wrapper._check_reducer_finalized()
        means.append([parameter.grad.clone() for parameter in wrapper.parameters() if parameter.grad is not None])
    if dist.get_rank() == 0:
        dist.destroy_process_group(smaller)
    return means


def test_another_group_takes_over(pair: RankPool) -> None:
    first, second = pair.run(change_groups)
    same(first[0], second[0])
    same(first[2], second[1])
    assert not torch.equal(first[1][-1], first[0][-1]), "the mean over one rank is its own gradient"


def engine_taken_off() -> list[Any]:
    wrapper = DistributedDataParallel(net())
    wrapper._remove_autograd_hooks()
    wrapper.module(inputs()).square().sum().backward()
    mine = [parameter.grad for parameter in wrapper.parameters()]
    again = DistributedDataParallel(wrapper.module)
    again.zero_grad()
    again(inputs()).square().sum().backward()
    return [mine, [parameter.grad for parameter in again.parameters()]]


def test_the_engine_can_be_taken_off_and_the_model_wrapped_again(pair: RankPool) -> None:
    (mine, mean), (other, other_mean) = pair.run(engine_taken_off)
    assert not torch.equal(mine[0], other[0])
    same(mean, other_mean)


# -- copies -----------------------------------------------------------------------------------------------------------


def copy_with_buffer_hook() -> list[Any]:
    wrapper = DistributedDataParallel(net())
    wrapper._register_buffer_comm_hook([], sum_now)
    wrapper(inputs()).sum().backward()
    with wrapper.no_sync():
        assert not copy.deepcopy(wrapper).require_backward_grad_sync  # as in torch
    copied = copy.deepcopy(wrapper)
    assert copied.buffer_hook is not None
    for each in (wrapper, copied):
        each(inputs(1)).sum().backward()
    return [[buffer.clone() for buffer in each.buffers()] for each in (wrapper, copied)]


def test_a_copy_keeps_the_hook_on_buffers(pair: RankPool) -> None:
    for original, copied in pair.run(copy_with_buffer_hook):
        same(original, copied)
