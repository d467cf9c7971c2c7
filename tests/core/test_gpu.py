"""The engine on a CUDA device. Skipped where there is none; run there with ``pytest -m gpu``.

What holds on all kinds of ranks is in test_contract.py and others, whose tests run over NCCL ranks, too.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from tests.ranks import RankError, RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_or_three = pytest.mark.parametrize(
    "nccl_ranks", [("slices", 2), ("slices", 3), ("mps", 2)], indirect=True, ids="nccl-{0[0]}-{0[1]}".format
)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(64, 8)).cuda().double()


def test_gradients_equal_those_without_a_wrapper(nccl: None) -> None:
    """Contract 1, on streams: whatever overlaps, the numbers are those of the bare model."""
    plain, wrapped = make_model(), gradsync.DistributedDataParallel(make_model(), device_ids=[0], bucket_cap_mb=0.05)
    assert len(wrapped.synchronizer.buckets) > 2
    for step in range(6):
        inputs = torch.randn(32, 64, dtype=torch.float64, device="cuda")
        for model in (plain, wrapped):
            model.zero_grad(set_to_none=step % 2 == 0)
            model(inputs).square().mean().backward()
        for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=0)


def test_host_never_waits_for_the_device_in_a_step(nccl: None) -> None:
    """Section 4 of the design: a step after the learning windows synchronizes streams, never the host."""
    wrapped = gradsync.DistributedDataParallel(make_model(), device_ids=[0], bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    inputs = torch.randn(32, 64, dtype=torch.float64, device="cuda")
    for step in range(6):
        torch.cuda.set_sync_debug_mode("error" if step >= 5 else "default")
        try:
            optimizer.zero_grad()
            wrapped(inputs).square().mean().backward()
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert wrapped.synchronizer.synchronizations == 6


def test_weighted_windows_equal_one_backward(nccl: None) -> None:
    """Contract 4: other weights in every window, so that the mean is corrected on the device."""
    plain, wrapped = make_model(), gradsync.DistributedDataParallel(make_model(), device_ids=[0], bucket_cap_mb=0.05)
    for window, weights in enumerate([[3, 5], [1, 1, 9], [2], [4096, 17], [7, 7]]):
        inputs = [torch.randn(8, 64, dtype=torch.float64, device="cuda") for _ in weights]
        for model in (plain, wrapped):
            model.zero_grad(set_to_none=window % 2 == 0)
        for batch, weight in zip(wrapped.accumulate(inputs), weights, strict=True):
            wrapped.backward(wrapped(batch).square().mean(), weight=weight)
        for batch, weight in zip(inputs, weights, strict=True):
            (plain(batch).square().mean() * weight / sum(weights)).backward()
        norm = wrapped.clip_grad_norm_(0.01)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.01), rtol=1e-12, atol=0)
        for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-16)


def test_host_never_waits_for_the_device_in_a_window(nccl: None) -> None:
    """Weights, their correction and clipping included."""
    wrapped = gradsync.DistributedDataParallel(make_model(), device_ids=[0], bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    inputs = torch.randn(32, 64, dtype=torch.float64, device="cuda")
    for window in range(7):
        torch.cuda.set_sync_debug_mode("error" if window >= 5 else "default")
        try:
            for _ in wrapped.accumulate(range(3)):
                wrapped.backward(wrapped(inputs).square().mean(), weight=window + 1)
            wrapped.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert wrapped.synchronizer.synchronizations == 7


def test_bfloat16_accumulates_in_float32(nccl: None) -> None:
    model = nn.Linear(16, 1, bias=False).cuda().bfloat16()
    wrapped = gradsync.DistributedDataParallel(model, accumulation_dtype=torch.float32)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    for _ in range(3):
        for _ in wrapped.accumulate(range(600)):
            wrapped(torch.ones(1, 16, dtype=torch.bfloat16, device="cuda")).sum().backward()
        gradient = next(wrapped.parameters()).grad
        assert gradient.dtype == torch.bfloat16
        assert gradient.eq(1.0).all()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_accelerator_trains_in_a_world_of_one(precision: str) -> None:
    """No process group; batches arrive on the device."""
    torch.manual_seed(0)
    accelerator = gradsync.Accelerator(gradient_accumulation_steps=2, mixed_precision=precision)
    assert accelerator.device.type == "cuda"
    inputs = torch.randn(96, 8)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(10):
        for batch, target in loader:
            assert batch.device.type == "cuda"
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(batch), target)
                accelerator.backward(loss, weight=len(batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    assert not dist.is_initialized()
    assert sum(losses[-12:]) < sum(losses[:12]) / 4


def test_sync_batch_norm_and_half_precision_train(nccl: None) -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SyncBatchNorm(8), nn.Flatten(), nn.Linear(8 * 36, 2)).cuda()
    wrapped = gradsync.DistributedDataParallel(module.to(memory_format=torch.channels_last), device_ids=[0])
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda")
    losses = []
    inputs, targets = torch.randn(16, 3, 8, 8), torch.randint(0, 2, (16,), device="cuda")
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(wrapped(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_timeline_on_the_device(nccl: None) -> None:
    timeline = gradsync.Timeline()
    wrapped = gradsync.DistributedDataParallel(make_model(), bucket_cap_mb=0.05, observer=timeline)
    for _ in range(4):
        wrapped.zero_grad()
        wrapped(torch.randn(32, 64, dtype=torch.float64, device="cuda")).mean().backward()
    step = timeline.steps[-1]
    assert step.overlaps
    assert all(times.start is not None and times.finish is not None for times in step.buckets)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("on purpose")


def fail_unseen() -> list[str]:
    """Rank 0's backward fails in windows 1 and 5. The host of rank 1 does not read control flags at once, but all of
    them."""
    rank = dist.get_rank()
    wrapped = gradsync.DistributedDataParallel(make_model(), device_ids=[0], bucket_cap_mb=0.05)
    told = []
    order = wrapped.synchronizer.engine.arrangement.order
    # A rank that fails runs a backward more or less than the others: windows are what all count.
    while (window := order.windows_before + 1) < 12:
        x = torch.full((4, 64), rank + 1.0, dtype=torch.float64, device="cuda")
        try:
            output = wrapped(x.requires_grad_())
            loss = (Fails.apply(output) if rank == 0 and window in (1, 5) else output).square().mean()
            loss.backward()
        except ZeroDivisionError:
            told.append("failed")
        except gradsync.PeerFailedError:
            told.append("told")
        wrapped.zero_grad()
    return told


@two_or_three
def test_every_control_flags_on_a_device_is_read(nccl_ranks: RankPool) -> None:
    assert nccl_ranks.run(fail_unseen) == [["failed"] * 2] + [["told"] * 2] * (nccl_ranks.world_size - 1)


def weigh() -> None:
    """The last rank has no backward, in the first window of all and where the others begin to count later."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for kinds in ("wpw", "pwp"):
        wrapped = gradsync.DistributedDataParallel(make_model(), device_ids=[0], bucket_cap_mb=0.05)
        plain = make_model()
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0)
        for kind in kinds:
            x = torch.ones(4, 64, dtype=torch.float64, device="cuda")
            loss = wrapped(x).square().mean()
            if rank < world_size - 1 and kind == "w":
                wrapped.backward(loss, weight=3)
            elif rank < world_size - 1:
                loss.backward()
            optimizer.step()
            plain.zero_grad()
            share = 1 if kind == "w" else (world_size - 1) / world_size
            (plain(x).square().mean() * share).backward()
            for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-15)
            optimizer.zero_grad()


@two_or_three
def test_a_rank_without_a_backward_follows_on_a_device(nccl_ranks: RankPool) -> None:
    nccl_ranks.run(weigh)


def wrap_with_a_buffer_on_the_host() -> None:
    model = make_model()
    model.register_buffer("steps", torch.zeros((), device="cpu"))
    gradsync.DistributedDataParallel(model)


@two_or_three
def test_a_buffer_on_the_host_is_named_with_the_remedy(nccl_ranks: RankPool) -> None:
    for error in nccl_ranks.run(wrap_with_a_buffer_on_the_host, expect_errors=True):
        assert isinstance(error, RankError)
        assert error.kind == "ConfigurationError", error.traceback
        assert error.message.startswith("buffer 'steps' is on the CPU")
        assert "module.to(device)" in error.message
