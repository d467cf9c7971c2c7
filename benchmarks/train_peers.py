"""Tokens a second of the training loop on gradsync, torch's DDP and Accelerate: the same model, data and windows.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/train_peers.py

Peers use `no_sync` properly (around forward and backward), DDP stock and tuned. Every variant has its own model and
optimizer; they take turns step by step in the same processes. A step is a window of `--grad-accum` micro-batches, with
clipping and AdamW.
"""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from accelerate import Accelerator as TheirAccelerator
from engine import group_wire
from interleave import Step, interleave
from training import Loop, Work, arguments, by_hand, on_gradsync, show

from gradsync import Accelerator
from gradsync.tools.bench.peers import TorchDDP, tuned_options
from gradsync.tools.llm.model import loss_of


def on_accelerate(loop: Loop, steps: int) -> Step:
    accelerator = TheirAccelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer = accelerator.prepare(loop.model, loop.optimizer)

    def step() -> None:
        for inputs, targets in loop.window():
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return step


def main() -> None:
    options = arguments(__doc__, model="tiny", batch=8, length=128)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    work = Work(options, accelerator.process_index, accelerator.num_processes)
    makers: dict[str, Callable[[Loop], Step]] = {
        "gradsync": lambda loop: on_gradsync(loop, accelerator),
        "gradsync, Gloo": lambda loop: on_gradsync(loop, Accelerator(cpu=True, communicator=group_wire())),
        "torch stock": lambda loop: by_hand(loop, TorchDDP(loop.model)),
        "torch tuned": lambda loop: by_hand(loop, TorchDDP(loop.model, **tuned_options())),
        "accelerate": lambda loop: on_accelerate(loop, options.grad_accum),
    }
    # Whoever is made first gets other memory, and is a percent or two slower for it: this one is not measured.
    first = makers["torch stock"](Loop(work))
    first()
    record = interleave({name: make(Loop(work)) for name, make in makers.items()}, warmup=5, rounds=options.rounds)
    if dist.get_rank() == 0:
        print(f"\n{options.model}, {accelerator.num_processes} ranks, windows of {options.grad_accum} micro-batches")
        ours, peers = list(makers)[:2], list(makers)[2:]
        pairs = [(name, peer) for peer, name in itertools.product(peers, ours)]
        show(record, work, "torch tuned", pairs, digits=3)
    accelerator.end_training()


if __name__ == "__main__":
    main()
