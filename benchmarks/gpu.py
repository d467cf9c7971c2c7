"""Ranks on one GPU: what gradsync adds to a step, what sharding saves, and how both compare with torch's DDP.

    python benchmarks/gpu.py                                          # GPT-2 124M in bf16, alone over NCCL
    python benchmarks/gpu.py --steps 5 --variants "gradsync,sharded"  # the sharded optimizer, alone
    python benchmarks/gpu.py --ranks 2 --backend gloo --batch 4 --steps 5 --variants "gradsync,sharded" --rounds 20
    python benchmarks/gpu.py --model gpt --ranks 2 --search --steps 5 --variants all
    python benchmarks/gpu.py --model layers --ranks 2 --slices --search --steps 5 --variants all

A single rank runs the whole path: hooks, buckets, NCCL's all-reduce. What is measured is the cost of the engine itself.
Several ranks share the GPU under MPS, or with ``--slices`` by time slices; NCCL connects them by sockets over loopback,
see docs/lab.md. Gloo goes through the host's memory.

The baseline is torch's DDP with bucket views. With ``--search``, DDP is first tried stock, with bucket views and with a
static graph, each at three bucket sizes, and the fastest of the nine is the baseline of a second run. A sample is a
block of ``--steps`` steps of one variant, from an idle GPU to an idle GPU: parameters may travel after ``step()`` has
returned, so blocks rather than steps tell how long a training takes.
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
from interleave import interleave, parser_of, table
from torch import nn

import gradsync
from gradsync.lab import SharedGpu, SharedGpuPlan
from gradsync.tools.bench.measure import Steady
from gradsync.tools.bench.peers import ALONE, TorchDDP
from gradsync.tools.llm.model import GPT, GPTConfig, build_model, loss_of

DDP_SIZES = (4, 25, 100)
DDP_KINDS: Mapping[str, Mapping[str, bool]] = {
    "stock": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"gradient_as_bucket_view": True, "static_graph": True},
}
VIEW = "view 25"
VOCABULARY = 50257
WARMUP = 2


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, and the loss of one step of it."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module], torch.Tensor]


def language(model: Callable[[], nn.Module], batch: int, length: int) -> Workload:
    """A GPT with float32 parameters under bf16 autocast."""
    tokens = torch.randint(0, VOCABULARY, (batch, length + 1), device="cuda")

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return loss_of(model(tokens[:, :-1]), tokens[:, 1:])

    return Workload(model=model, loss=loss)


def gpt2(batch: int | None) -> Workload:
    return language(lambda: build_model("gpt2", vocab_size=VOCABULARY, sequence_length=1024), batch or 16, 1024)


def gpt(batch: int | None) -> Workload:
    """57M parameters. With a batch of 24 a step computes for most of its time, with 4 NCCL works for most of it."""
    config = GPTConfig(layers=10, heads=8, width=512, vocab_size=VOCABULARY, sequence_length=256)
    return language(lambda: GPT(config), batch or 24, config.sequence_length)


def stacked(layers: int, width: int, batch: int) -> Workload:
    x = torch.randn(batch, width, device="cuda")

    def model() -> nn.Module:
        return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))

    return Workload(model=model, loss=lambda model: model(x).square().mean())


WORKLOADS: dict[str, Callable[[int | None], Workload]] = {
    "gpt2": gpt2,
    "gpt": gpt,
    "mlp": lambda batch: stacked(8, 1024, batch or 256),
    "layers": lambda batch: stacked(1000, 32, batch or 32),
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
        wrapped, optimizer = ours(**settings)(model)
        return wrapped, gradsync.ShardedOptimizer(optimizer, wrapped, mode=mode)

    return make


def overlapped(model: nn.Module) -> tuple[nn.Module, Any]:
    wrapped, optimizer = ours()(model)
    return wrapped, gradsync.OverlappedOptimizer(optimizer, wrapped)


DDPS: dict[str, Make] = {f"{kind} {size}": ddp(kind, size) for kind in DDP_KINDS for size in DDP_SIZES}
OTHERS: dict[str, Make] = {
    ALONE: lambda model: (model, adam(model.parameters())),
    "gradsync": ours(),
    "gradsync 25 MiB": ours(bucket_cap_mb=25),
    "gradsync 100 MiB": ours(bucket_cap_mb=100),
    "sharded": sharded("next-forward"),
    "sharded 25 MiB": sharded("next-forward", bucket_cap_mb=25),
    "sharded 50 MiB": sharded("next-forward", bucket_cap_mb=50),
    "sharded auto": sharded("auto"),
    "overlapped": overlapped,
    "bf16": ours(reduction="bf16"),
    "int8": ours(reduction="int8"),
    "view 25 foreach": with_foreach(ddp("view", 25)),
    "gradsync foreach": with_foreach(ours()),
}
ENGINE = (ALONE, "stock 25", "gradsync", "gradsync 100 MiB")


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


def memory(make: Make, workload: Workload, windows: int) -> tuple[float, float]:
    """What is held between two steps, and the most within one, in MiB."""
    block, _ = make_block(make, workload, 1)
    settle(block, windows)
    torch.cuda.reset_peak_memory_stats()
    settle(block, 3)
    held, peak = torch.cuda.memory_allocated() / 2**20, torch.cuda.max_memory_allocated() / 2**20
    del block
    gc.collect()
    torch.cuda.empty_cache()
    return held, peak


def best_ddp(workload: Workload, options: argparse.Namespace) -> str:
    """The fastest of torch's, by a run of its own; the same on all ranks."""
    blocks = {name: make_block(make, workload, options.steps)[0] for name, make in DDPS.items()}
    record = interleave(blocks, warmup=WARMUP, rounds=options.ddp_rounds)
    found: list[str] = [""]
    if dist.get_rank() == 0:
        print(table(record, [VIEW]), flush=True)
        found = [min(record.samples, key=lambda name: record.summary(name).median)]
    dist.broadcast_object_list(found)
    return found[0]


def measure(options: argparse.Namespace) -> None:
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device("cuda", 0) if options.ranks == 1 else None
    dist.init_process_group(options.backend, device_id=device)
    is_first = dist.get_rank() == 0
    workload = WORKLOADS[options.model](options.batch)
    if is_first:
        count = sum(parameter.numel() for parameter in workload.model().parameters())
        sharing = "" if options.ranks == 1 else f" by {'time slices' if options.slices else 'MPS'}"
        ranks = f"{options.ranks} {options.backend} ranks{sharing}"
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {ranks}")
        print(f"{options.model}: {count / 1e6:.1f}M parameters, blocks of {options.steps} steps", flush=True)
    best = best_ddp(workload, options) if options.search else VIEW
    gc.collect()
    torch.cuda.empty_cache()
    known = {**DDPS, **OTHERS}
    chosen = list(OTHERS) if options.variants == "all" else options.variants.split(",")
    blocks = {}
    for name in dict.fromkeys([best, *chosen]):
        if options.memory:
            held, peak = memory(known[name], workload, options.settle)
            if is_first:
                print(f"memory {name:<20} held {held:9.1f} MiB, peak {peak:9.1f} MiB", flush=True)
        blocks[name], model = make_block(known[name], workload, options.steps)
        settle(blocks[name], options.settle)
        if is_first and isinstance(model, gradsync.DistributedDataParallel):
            sizes = [bucket.buffer.nbytes for bucket in model.synchronizer.buckets]
            print(f"{name}: {len(sizes)} buckets, MiB: {' '.join(f'{size / 2**20:.3g}' for size in sizes[:40])}")
    record = interleave(blocks, warmup=WARMUP, rounds=options.rounds)
    if is_first:
        print(table(record, [best, *([ALONE] if ALONE in blocks else [])]), flush=True)
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
    parser = parser_of(__doc__, rounds=100)
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="gpt2")
    parser.add_argument("--batch", type=int, help="of a rank")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--slices", action="store_true", help="share the GPU by time slices, not under MPS")
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1, help="of a block")
    parser.add_argument("--settle", type=int, default=40, help="steps of each variant before the clock starts")
    parser.add_argument("--variants", default=",".join(ENGINE), help=f"comma-separated, or all: {', '.join(OTHERS)}")
    parser.add_argument("--search", action="store_true", help="find the fastest setting of torch's DDP first")
    parser.add_argument("--ddp-rounds", type=int, default=5, help="of the search")
    parser.add_argument("--memory", action="store_true", help="measure the memory of each variant, too")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
    elif options.ranks == 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
        measure(options)
    else:
        plan = SharedGpuPlan(ranks=options.ranks, mps=not options.slices, channels=options.channels)
        with SharedGpu(plan) as gpu:
            sys.exit(gpu.run([sys.executable, *sys.argv]))


if __name__ == "__main__":
    main()
