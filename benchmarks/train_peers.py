"""Tokens a second of the training loop on gradsync, torch's DDP and Accelerate: the same model, data and windows.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/train_peers.py

Peers use `no_sync` properly (around forward and backward), DDP stock and tuned. Every variant has its own model and
optimizer; they take turns step by step in the same processes. A step is a window of `--grad-accum` micro-batches, with
clipping and AdamW.
"""

import argparse
import contextlib
import inspect
from collections.abc import Callable

import torch
import torch.distributed as dist
from accelerate import Accelerator as TheirAccelerator
from interleave import Step, interleave, ratio, table
from torch import nn

from gradsync import Accelerator
from gradsync.communicator import ProcessGroupCommunicator
from gradsync.llm.batches import Batches, BatchPlan
from gradsync.llm.model import build_model, loss_of
from gradsync.llm.tokens import prepare_tokens

TorchDDP = nn.parallel.DistributedDataParallel
Window = list[tuple[torch.Tensor, torch.Tensor]]


class Loop:
    """A model with its optimizer; `step` runs window after window."""

    def __init__(self, arguments: argparse.Namespace, batches: Batches, vocab_size: int) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = build_model(arguments.model, vocab_size=vocab_size, sequence_length=arguments.length)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        self.batches = batches
        self.number = 0

    def next_window(self) -> Window:
        self.number += 1
        return self.batches.window(self.number)


def on_gradsync(loop: Loop, accelerator: Accelerator) -> Step:
    model, optimizer = accelerator.prepare(loop.model, loop.optimizer)

    def step() -> None:
        for inputs, targets in accelerator.window(loop.next_window(), model):
            accelerator.backward(loss_of(model(inputs), targets), weight=targets.numel())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def group_wire() -> ProcessGroupCommunicator:
    """The group's own wire; gradsync would take shared memory."""
    return ProcessGroupCommunicator(dist.distributed_c10d._get_default_group())


def on_ddp(loop: Loop, **options: bool) -> Step:
    model = TorchDDP(loop.model, **options)

    def step() -> None:
        window = loop.next_window()
        for number, (inputs, targets) in enumerate(window, start=1):
            with contextlib.nullcontext() if number == len(window) else model.no_sync():
                (loss_of(model(inputs), targets) / len(window)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    return step


def on_accelerate(loop: Loop, steps: int) -> Step:
    accelerator = TheirAccelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer = accelerator.prepare(loop.model, loop.optimizer)

    def step() -> None:
        for inputs, targets in loop.next_window():
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return step


def tuned() -> dict[str, bool]:
    options = {"gradient_as_bucket_view": True}
    if "batched_grad_copy" in inspect.signature(TorchDDP).parameters:
        options["batched_grad_copy"] = True
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--grad-accum", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    tokens = prepare_tokens("stdlib")
    plan = BatchPlan(
        sequence_length=arguments.length,
        global_batch=arguments.batch * arguments.grad_accum * accelerator.num_processes,
        micro_batch=arguments.batch,
        seed=0,
    )
    batches = Batches(tokens.split()[0], plan, accelerator.process_index, accelerator.num_processes)
    makers: dict[str, Callable[[Loop], Step]] = {
        "gradsync": lambda loop: on_gradsync(loop, accelerator),
        "gradsync, Gloo": lambda loop: on_gradsync(loop, Accelerator(cpu=True, communicator=group_wire())),
        "torch stock": on_ddp,
        "torch tuned": lambda loop: on_ddp(loop, **tuned()),
        "accelerate": lambda loop: on_accelerate(loop, arguments.grad_accum),
    }
    # Whoever is made first gets other memory, and is a percent or two slower for it: this one is not measured.
    first = on_ddp(Loop(arguments, batches, tokens.vocab_size))
    first()
    variants = {name: make(Loop(arguments, batches, tokens.vocab_size)) for name, make in makers.items()}
    samples = interleave(variants, warmup=5, rounds=arguments.rounds)
    if dist.get_rank() == 0:
        tokens_a_step = plan.global_batch * arguments.length
        print(
            f"\n{arguments.model}, {accelerator.num_processes} ranks, windows of {arguments.grad_accum} micro-batches"
        )
        print(table(samples, ["torch tuned"]))
        for name, times in samples.items():
            print(f"{name:20} {tokens_a_step / sorted(times)[len(times) // 2]:10,.0f} tokens/s")
        for peer in ("torch stock", "torch tuned", "accelerate"):
            for ours in ("gradsync", "gradsync, Gloo"):
                middle, low, high = ratio(samples[ours], samples[peer])
                print(f"time of {ours} / {peer}: {middle:.3f} ({low:.3f}–{high:.3f})")
    accelerator.end_training()


if __name__ == "__main__":
    main()
