"""The sharded optimizer on one GPU: GPT-2 124M in bf16, beside the plain one under torch's DDP and under gradsync.

    PYTHONPATH=src torchrun --standalone --nproc-per-node 1 benchmarks/sharded_gpu.py
    PYTHONPATH=src torchrun --standalone --nproc-per-node 2 benchmarks/sharded_gpu.py --batch 4 --rounds 20

Alone a rank has NCCL and nobody to share with: what is measured is what the wrapper of the optimizer costs. Two ranks
on one GPU need Gloo, whose way leads through the host's memory; both compute on the same GPU. Parameters may still be
on their way when a step has ended, so several steps in a row are timed.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from engine_gpu import Make, make_training
from interleave import interleave, table
from torch import nn

import gradsync
from gradsync.tools.bench.measure import Steady
from gradsync.tools.bench.peers import TorchDDP

IN_A_ROW = 5


def variants() -> dict[str, Make]:
    def torch_view(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        wrapped = TorchDDP(model, device_ids=[0], gradient_as_bucket_view=True)
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)

    def plain(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        wrapped = gradsync.DistributedDataParallel(model, device_ids=[0])
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)

    def sharded(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        wrapped = gradsync.DistributedDataParallel(model, device_ids=[0])
        return wrapped, gradsync.ShardedOptimizer(torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True), wrapped)

    return {"torch view": torch_view, "gradsync": plain, "gradsync sharded": sharded}


def make_steps(make: Make, batch: int, length: int) -> Steady:
    step, optimizer = make_training(make, batch, length)

    def flush() -> None:
        if isinstance(optimizer, gradsync.ShardedOptimizer):
            optimizer.flush()
        torch.cuda.synchronize()

    return Steady(step=step, flush=flush, times=IN_A_ROW)


def memory(make: Make, batch: int, length: int) -> tuple[float, float]:
    """What is held between two steps, and the most within one, in GiB."""
    steps = make_steps(make, batch, length)
    steps()
    torch.cuda.reset_peak_memory_stats()
    steps()
    steps.flush()
    held, peak = torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
    del steps
    gc.collect()
    torch.cuda.empty_cache()
    return held, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    alone = os.environ["WORLD_SIZE"] == "1"
    dist.init_process_group("nccl" if alone else "gloo", device_id=torch.device("cuda", 0) if alone else None)
    is_first = dist.get_rank() == 0
    if is_first:
        size = f"{dist.get_world_size()} × {options.batch}×{options.length}"
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {dist.get_backend()}, {size}")
    for name, make in variants().items():
        held, peak = memory(make, options.batch, options.length)
        if is_first:
            print(f"memory {name:<20} held {held:7.3f} GiB, peak {peak:7.3f} GiB", flush=True)
    steps = {name: make_steps(make, options.batch, options.length) for name, make in variants().items()}
    record = interleave(steps, warmup=3, rounds=options.rounds)
    if is_first:
        print(table(record, ["torch view", "gradsync"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
