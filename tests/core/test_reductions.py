"""Reductions with state: told of every layout, saved by parameter, and not disturbed while they cannot follow."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradsync import DistributedDataParallel, MisuseError, SyncPolicy, synchronize_gradients
from gradsync.communicator import Communicator, Handle, choose_communicator
from gradsync.core.bucket import Bucket, BucketLayout
from gradsync.core.engine.blocks import load_window, save_window
from gradsync.reduction import CommHook, Mean, Reduction
from gradsync.testing import run_ranks

WIDTH = 8
# Two layers a bucket.
CAP = 2 * WIDTH * WIDTH * 8 / 2**20


class Layers(nn.Module):
    """Four layers that are used in the order it is told, so that their gradients come in another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False).double() for _ in range(4))

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        for number in order:
            x = self.layers[number](x)
        return x


class Noting(Mean):
    """The mean, and a list of all layouts it was told of. Keeps the layout if it is made so."""

    def __init__(self, *, keeps: bool = False) -> None:
        self.layouts: list[BucketLayout] = []
        self.sent: list[int] = []
        self._keeps = keeps

    @property
    def keeps_layout(self) -> bool:
        return self._keeps

    def rebuilt(self, layout: BucketLayout) -> None:
        self.layouts.append(layout)

    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        self.sent.append(len(self.layouts))
        assert bucket.plan is self.layouts[-1].buckets[bucket.index]
        return super().start(bucket, communicator, divisor)

    def state_dict(self) -> dict[str, Any]:
        return {"sent": list(self.sent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sent = list(state["sent"])


FORWARD, BACKWARD = (0, 1, 2, 3), (3, 1, 0, 2)


def train(reduction: Reduction, orders: Sequence[Sequence[int]]) -> tuple[Any, list[tuple[int, ...]]]:
    model = DistributedDataParallel(Layers(), bucket_cap_mb=CAP, reduction=reduction)
    seen = []
    for order in orders:
        model.zero_grad()
        x = torch.full((2, WIDTH), float(choose_communicator().rank + 1), dtype=torch.float64)
        model(x, order).square().mean().backward()
        seen.append(model.synchronizer.layout.parameters)
    return model, seen


def changing(keeps: bool) -> tuple[int, list[tuple[int, ...]]]:
    reduction = Noting(keeps=keeps)
    _, seen = train(reduction, [FORWARD] * 2 + [BACKWARD] * 8)
    return len(reduction.layouts), seen


def test_a_reduction_is_told_of_every_layout() -> None:
    """At wrapping, and when another order has been agreed on."""
    for count, seen in run_ranks(changing, 2, False):
        assert seen[0] == tuple(reversed(FORWARD))
        assert seen[-1] == tuple(reversed(BACKWARD))
        assert count >= 2


def test_a_layout_is_held_while_there_is_state() -> None:
    for count, seen in run_ranks(changing, 2, True):
        assert set(seen) == {tuple(reversed(FORWARD))}
        assert count == 1


def learning_late() -> list[tuple[int, ...]]:
    """The order of the first window is not the one that is guessed: it is learned once all the same."""
    _, seen = train(Noting(keeps=True), [BACKWARD] * 3 + [FORWARD] * 6)
    return seen


def test_the_first_window_teaches_the_order_also_where_layouts_are_held() -> None:
    for seen in run_ranks(learning_late, 2):
        assert set(seen[1:]) == {tuple(reversed(BACKWARD))}


class Memory:
    """The state of a hook that keeps something by the index of a bucket, as torch's PowerSGD does."""

    def __init__(self) -> None:
        self.shapes: dict[int, list[torch.Size]] = {}


def remembering(state: Memory | None, bucket: Any) -> Any:
    buffer = bucket.buffer()
    if state is not None:
        state.shapes.setdefault(bucket.index(), []).append(tuple(g.data_ptr() for g in bucket.gradients()))
    communicator = choose_communicator()
    communicator.all_reduce(buffer.div_(communicator.world_size)).wait()
    future: Any = torch.futures.Future()
    future.set_result(buffer)
    return future


def hooked(stateful: bool) -> tuple[list[tuple[int, ...]], dict[int, int]]:
    memory = Memory()
    model = DistributedDataParallel(Layers(), bucket_cap_mb=CAP)
    model.register_comm_hook(memory if stateful else None, remembering)
    seen = []
    for order in [FORWARD] * 2 + [BACKWARD] * 8:
        model.zero_grad()
        model(torch.ones(2, WIDTH, dtype=torch.float64), order).square().mean().backward()
        seen.append(model.synchronizer.layout.parameters)
    return seen, {index: len(set(shapes)) for index, shapes in memory.shapes.items()}


def test_buckets_stay_under_a_hook_with_state() -> None:
    for seen, shapes in run_ranks(hooked, 2, True):
        assert set(seen) == {tuple(reversed(FORWARD))}
        assert shapes == {0: 1, 1: 1}


def test_buckets_change_under_a_hook_without_state() -> None:
    for seen, _ in run_ranks(hooked, 2, False):
        assert seen[-1] == tuple(reversed(BACKWARD))


def unfreezing() -> str:
    model = Layers()
    model.layers[1].weight.requires_grad_(False)
    wrapper = DistributedDataParallel(model, bucket_cap_mb=CAP, reduction=Noting(keeps=True))
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    for _ in range(2):
        wrapper.zero_grad()
        wrapper(x, FORWARD).square().mean().backward()
    model.layers[1].weight.requires_grad_(True)
    wrapper.zero_grad()
    with pytest.raises(MisuseError, match="begun or ceased to be trained") as caught:
        wrapper(x, FORWARD).square().mean().backward()
    # The remedy helps: another reduction may be laid out again.
    wrapper.zero_grad()
    wrapper.synchronizer.reduce_with(Mean())
    wrapper(x, FORWARD).square().mean().backward()
    assert model.layers[1].weight.grad is not None
    return str(caught.value)


def test_what_cannot_follow_is_refused_on_all_ranks() -> None:
    assert len(set(run_ranks(unfreezing, 2))) == 1


def saved_and_loaded() -> tuple[list[int], list[int]]:
    reduction = Noting()
    model, _ = train(reduction, [FORWARD] * 3)
    other, fresh = Noting(), DistributedDataParallel(Layers(), bucket_cap_mb=CAP, reduction=Noting())
    fresh.synchronizer.reduce_with(other)
    fresh.synchronizer.load_state_dict(model.synchronizer.state_dict())
    load_window(fresh.synchronizer.engine, save_window(model.synchronizer.engine))
    return reduction.sent, other.sent


def test_the_state_of_a_reduction_is_saved() -> None:
    for before, after in run_ranks(saved_and_loaded, 2):
        assert before
        assert before == after


def test_a_checkpoint_without_a_reductions_state_is_read() -> None:
    """As those that were written before reductions had any."""

    def read() -> None:
        model, _ = train(Mean(), [FORWARD])
        state = save_window(model.synchronizer.engine)
        assert state.pop("reduction") == {}
        load_window(model.synchronizer.engine, state)

    run_ranks(read, 1)


@pytest.mark.parametrize("state", [None, "group"])
def test_a_hook_whose_state_is_a_group_has_none(state: Any, tmp_path: Any) -> None:
    if state == "group":
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        state = dist.group.WORLD
    try:
        hook = CommHook(state, remembering)
        hook._started = True
        assert not hook.keeps_layout
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def both() -> None:
    policy = SyncPolicy(reduction=Noting())
    with pytest.raises(ValueError, match="pass policy or schedule, not both"):
        synchronize_gradients(nn.Linear(2, 2), policy=policy, schedule="naive")
    with pytest.raises(TypeError, match="reduktion"):
        DistributedDataParallel(nn.Linear(2, 2), reduktion=Mean())  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="as an argument or in the policy"):
        DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=3, policy=SyncPolicy(bucket_cap_mb=2))
    model = DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=3, policy=policy)
    assert model.synchronizer.reduction is policy.reduction
    assert model.synchronizer.caps.caps == (3 * 2**20,)


def test_settings_come_from_a_policy_or_from_arguments() -> None:
    run_ranks(both, 1)
