"""The engine on one GPU under NCCL with a world of one: GPT-2 124M in bf16, against no wrapper and torch's DDP.

    PYTHONPATH=src python benchmarks/engine_gpu.py

A world of one runs the whole path: hooks, buckets, NCCL's all-reduce. What is measured is what the engine itself costs.
"""

import argparse
import gc
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from interleave import Step, interleave, on_gpu, table
from torch import nn

import gradsync
from gradsync.tools.bench.peers import TorchDDP
from gradsync.tools.llm.model import build_model, loss_of

VOCABULARY = 50257


def variants() -> dict[str, Callable[[nn.Module], nn.Module]]:
    tuned = {"gradient_as_bucket_view": True}
    return {
        "no wrapper": lambda model: model,
        "torch stock": lambda model: TorchDDP(model, device_ids=[0]),
        "torch view": lambda model: TorchDDP(model, device_ids=[0], **tuned),
        "gradsync": lambda model: gradsync.DistributedDataParallel(model, device_ids=[0]),
        "gradsync 100 MiB": lambda model: gradsync.DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=100),
    }


Make = Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]


def make_training(make: Make, batch: int, length: int) -> tuple[Step, torch.optim.Optimizer]:
    """A step of GPT-2, wrapped and with the optimizer that ``make`` makes; and that optimizer."""
    torch.manual_seed(0)
    model, optimizer = make(build_model("gpt2", vocab_size=VOCABULARY, sequence_length=length).cuda())
    tokens = torch.randint(0, VOCABULARY, (batch, length + 1), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()

    return on_gpu(step), optimizer


def make_step(wrap: Callable[[nn.Module], nn.Module], batch: int, length: int) -> Step:
    def make(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        wrapped = wrap(model)
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)

    return make_training(make, batch, length)[0]


def connect(port: str) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", port)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    torch.backends.cuda.matmul.allow_tf32 = True


def peak_memory(wrap: Callable[[nn.Module], nn.Module], batch: int, length: int) -> float:
    step = make_step(wrap, batch, length)
    for _ in range(4):
        step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    peak = torch.cuda.max_memory_allocated() / 2**30
    del step
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    connect("29511")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, batch {options.batch}×{options.length}")
    for name, wrap in variants().items():
        print(f"peak memory {name:<20}{peak_memory(wrap, options.batch, options.length):8.3f} GiB")
    steps = {name: make_step(wrap, options.batch, options.length) for name, wrap in variants().items()}
    print(table(interleave(steps, warmup=12, rounds=options.rounds), ["no wrapper", "torch view"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
