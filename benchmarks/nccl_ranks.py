"""Several NCCL ranks on one GPU: gradsync beside torch's DDP at its best, in blocks of steps by turns.

    PYTHONPATH=src python benchmarks/nccl_ranks.py --model gpt --ranks 2
    PYTHONPATH=src python benchmarks/nccl_ranks.py --model mlp --ranks 4
    PYTHONPATH=src python benchmarks/nccl_ranks.py --model layers --ranks 2 --slices

The ranks share the GPU under MPS, or with ``--slices`` by time slices; NCCL connects them by sockets over loopback. See
docs/lab.md. First torch's DDP is tried as it comes, with bucket views and with a static graph, each at three bucket
sizes; the best of the nine is what all others are compared with, in a second run of blocks by turns. A block is several
steps of one variant; between blocks everything that is still under way is waited for. With ``--single`` a block is one
step. Parameters may travel after ``step()`` has returned, so that blocks, and not steps, tell what a training takes.
"""

import argparse
import gc
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from interleave import interleave, table
from torch import nn

import gradsync
from gradsync.lab import SharedGpu, SharedGpuPlan
from gradsync.tools.bench.measure import Steady
from gradsync.tools.bench.peers import TorchDDP
from gradsync.tools.llm.model import GPT, GPTConfig, loss_of

DDP_SIZES = (4, 25, 100)
DDP_KINDS: Mapping[str, Mapping[str, bool]] = {
    "stock": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"gradient_as_bucket_view": True, "static_graph": True},
}
VIEW = "view 25"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, and the loss of one step of it."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module], torch.Tensor]


def gpt(batch: int) -> Workload:
    """57M parameters, as float32 under autocast. With a batch of 24 a step computes for most of its time, with 4 NCCL
    works for most of it."""
    config = GPTConfig(layers=10, heads=8, width=512, vocab_size=50257, sequence_length=256)
    tokens = torch.randint(0, config.vocab_size, (batch, config.sequence_length + 1), device="cuda")

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return loss_of(model(tokens[:, :-1]), tokens[:, 1:])

    return Workload(model=lambda: GPT(config), loss=loss)


def stacked(layers: int, width: int, batch: int) -> Workload:
    x = torch.randn(batch, width, device="cuda")

    def model() -> nn.Module:
        return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))

    return Workload(model=model, loss=lambda model: model(x).square().mean())


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "gpt": lambda: gpt(24),
    "gpt-small-batch": lambda: gpt(4),
    "mlp": lambda: stacked(8, 1024, 256),
    "layers": lambda: stacked(1000, 32, 32),
}

Make = Callable[[nn.Module], tuple[nn.Module, Any]]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def ddp(kind: str, size: int) -> Make:
    def make(model: nn.Module) -> tuple[nn.Module, Any]:
        wrapped: Any = TorchDDP(model, device_ids=[0], bucket_cap_mb=size, **DDP_KINDS[kind])  # type: ignore[arg-type]
        return wrapped, adam(wrapped.parameters())

    return make


def ours(**settings: Any) -> Make:
    def make(model: nn.Module) -> tuple[nn.Module, Any]:
        wrapped = gradsync.DistributedDataParallel(model, device_ids=[0], **settings)
        return wrapped, adam(wrapped.parameters())

    return make


def with_foreach(make: Make) -> Make:
    """With an optimizer that cannot skip a step on the device, so that the host waits before it."""

    def make_so(model: nn.Module) -> tuple[nn.Module, Any]:
        wrapped, _ = make(model)
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-4, foreach=True)

    return make_so


def sharded(mode: Any, **settings: Any) -> Make:
    def make(model: nn.Module) -> tuple[nn.Module, Any]:
        wrapped = gradsync.DistributedDataParallel(model, device_ids=[0], **settings)
        return wrapped, gradsync.ShardedOptimizer(
            torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True), wrapped, mode=mode
        )

    return make


def overlapped(model: nn.Module) -> tuple[nn.Module, Any]:
    wrapped = gradsync.DistributedDataParallel(model, device_ids=[0])
    return wrapped, gradsync.OverlappedOptimizer(adam(wrapped.parameters()), wrapped)


OURS: dict[str, Make] = {
    "gradsync": ours(),
    "gradsync 25 MiB": ours(bucket_cap_mb=25),
    "sharded": sharded("next-forward"),
    "sharded 25 MiB": sharded("next-forward", bucket_cap_mb=25),
    "sharded 50 MiB": sharded("next-forward", bucket_cap_mb=50),
    "sharded auto": sharded("auto"),
    "overlapped": overlapped,
    "bf16": ours(reduction="bf16"),
    "int8": ours(reduction="int8"),
    "no wrapper": lambda model: (model, adam(model.parameters())),
    "view 25 foreach": with_foreach(ddp("view", 25)),
    "gradsync foreach": with_foreach(ours()),
}


def make_block(make: Make, workload: Workload, steps: int) -> tuple[Steady, Any]:
    torch.manual_seed(0)
    model, optimizer = make(workload.model().cuda())

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model).backward()
        optimizer.step()

    def flush() -> None:
        if hasattr(optimizer, "flush"):
            optimizer.flush()
        torch.cuda.synchronize()

    def waited_step() -> None:
        step()
        flush()

    class Block(Steady):
        """From an idle GPU to an idle GPU, also after ``step``, which is run before the clock starts."""

        def __call__(self) -> None:
            for _ in range(self.times):
                step()
            flush()

    return Block(step=waited_step, flush=flush, times=steps), model


def settle(block: Steady, windows: int) -> None:
    for _ in range(-(-windows // block.times)):
        block()


def peak_memory(make: Make, workload: Workload, windows: int) -> float:
    block, _ = make_block(make, workload, 1)
    settle(block, windows)
    torch.cuda.reset_peak_memory_stats()
    settle(block, 3)
    peak = torch.cuda.max_memory_allocated() / 2**20
    del block
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def best_ddp(workload: Workload, options: argparse.Namespace) -> str:
    """The fastest of torch's, by a run of its own; the same on all ranks."""
    makes = {f"{kind} {size}": ddp(kind, size) for kind in DDP_KINDS for size in DDP_SIZES}
    blocks = {name: make_block(make, workload, options.steps)[0] for name, make in makes.items()}
    record = interleave(blocks, warmup=2, rounds=options.ddp_rounds)
    found: list[str] = [""]
    if dist.get_rank() == 0:
        print(table(record, [VIEW]), flush=True)
        found = [min(record.samples, key=lambda name: record.summary(name).median)]
    dist.broadcast_object_list(found)
    return found[0]


def measure(options: argparse.Namespace) -> None:
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    dist.init_process_group("nccl")
    is_first = dist.get_rank() == 0
    workload = WORKLOADS[options.model]()
    if is_first:
        count = sum(parameter.numel() for parameter in workload.model().parameters())
        sharing = "time slices" if options.slices else "MPS"
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {dist.get_world_size()} ranks by {sharing}")
        print(f"{options.model}: {count / 1e6:.1f}M parameters, blocks of {options.steps} steps", flush=True)
    best = VIEW if options.no_ddp_search else best_ddp(workload, options)
    gc.collect()
    torch.cuda.empty_cache()
    chosen = options.variants.split(",") if options.variants else list(OURS)
    makes = {best: ddp(best.split()[0], int(best.split()[1])), **{name: OURS[name] for name in chosen}}
    blocks, models = {}, {}
    for name, make in makes.items():
        if options.memory:
            peak = peak_memory(make, workload, options.settle)
            if is_first:
                print(f"peak memory {name:<20}{peak:10.1f} MiB", flush=True)
        blocks[name], models[name] = make_block(make, workload, options.steps)
        settle(blocks[name], options.settle)
        if is_first and isinstance(models[name], gradsync.DistributedDataParallel):
            sizes = [bucket.buffer.nbytes for bucket in models[name].synchronizer.buckets]
            print(f"{name}: {len(sizes)} buckets, MiB: {' '.join(f'{size / 2**20:.3g}' for size in sizes[:40])}")
    record = interleave(blocks, warmup=2, rounds=options.rounds)
    if is_first:
        print(table(record, [best]), flush=True)
    if options.profile:
        for name, block in blocks.items():
            profile(name, block)
    dist.destroy_process_group()


def profile(name: str, block: Steady) -> None:
    """What the GPU did in a block of one rank: kernels of NCCL, others, and when each kind began and ended."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    block()
    with recording(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        block()
    if dist.get_rank() != 0:
        return
    kernels = [event for event in recorded.events() if event.device_type.name == "CUDA"]
    if not kernels:
        return
    first = min(event.time_range.start for event in kernels)
    last = max(event.time_range.end for event in kernels)
    nccl = [event for event in kernels if "nccl" in event.name.lower()]
    rest = [event for event in kernels if event not in nccl]
    steps = block.times
    print(f"== {name}: {(last - first) / 1e3 / steps:.2f} ms a step")
    for title, events in (("nccl", nccl), ("other", rest)):
        spent = sum(event.time_range.elapsed_us() for event in events) / 1e3 / steps
        print(f"   {title}: {len(events) / steps:.0f} kernels a step, {spent:.2f} ms")
    times: dict[str, list[float]] = {}
    for event in rest:
        times.setdefault(event.name[:80], []).append(event.time_range.elapsed_us())
    for kernel, spent_us in sorted(times.items(), key=lambda item: -sum(item[1]))[:8]:
        print(f"      {sum(spent_us) / 1e3 / steps:7.3f} ms {len(spent_us) / steps:6.1f}×  {kernel}")
    nccl.sort(key=lambda event: event.time_range.start)
    gaps = [b.time_range.start - a.time_range.end for a, b in itertools.pairwise(nccl)]
    shown = nccl[-min(len(nccl), max(1, len(nccl) // steps)) :]
    print("   last step, start (length) ms: " + " ".join(
        f"{(e.time_range.start - shown[0].time_range.start) / 1e3:.1f}({e.time_range.elapsed_us() / 1e3:.2f})"
        for e in shown[:40]
    ))  # fmt: skip
    if gaps:
        print(
            f"   gaps between nccl kernels: {sum(max(0.0, gap) for gap in gaps) / 1e3 / steps:.2f} ms a step",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="gpt")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slices", action="store_true", help="share the GPU by time slices, not under MPS")
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    parser.add_argument("--single", dest="steps", action="store_const", const=1, help="blocks of one step")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ddp-rounds", type=int, default=5)
    parser.add_argument("--settle", type=int, default=40, help="steps of each variant before the clock starts")
    parser.add_argument("--variants", help="of gradsync, by comma; all without it")
    parser.add_argument("--no-ddp-search", action="store_true", help=f"compare with {VIEW} and look for no better")
    parser.add_argument("--memory", action="store_true", help="measure the peak of memory, too")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
        return
    plan = SharedGpuPlan(ranks=options.ranks, mps=not options.slices, channels=options.channels)
    with SharedGpu(plan) as gpu:
        sys.exit(gpu.run([sys.executable, *sys.argv]))


if __name__ == "__main__":
    main()
