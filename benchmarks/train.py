"""Tokens a second of the loop of `gradsync train`: with gradsync, and as it is written without it.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/train.py
    python benchmarks/train.py --device cuda

A step is a window of `--grad-accum` micro-batches with clipping and AdamW. Every variant has a model and an optimizer
of its own, and all have the same data; they take turns step by step in the same processes. On CPU ranks gradsync is
compared with torch's DDP, stock and tuned, and with Accelerate; `no_sync` is used properly, around forward and
backward. On one GPU it is GPT-2 124M in bf16 with gradsync and without: losses are divided by their number, and
`torch.nn.utils.clip_grad_norm_` clips.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from engine import group_communicator
from interleave import Step, interleave, on_gpu, parser_of, ratio, table
from torch import nn

from gradsync import Accelerator
from gradsync.tools.bench.peers import TorchDDP, tuned_options
from gradsync.tools.bench.record import CellRecord
from gradsync.tools.llm.model import build_model, loss_of
from gradsync.tools.llm.tokens import Batches, BatchPlan, MicroBatch, prepare_tokens

OURS, WITHOUT = "gradsync", "without gradsync"


class Work:
    """What all variants train: a model of this name, on this rank's part of every window."""

    def __init__(self, options: argparse.Namespace, rank: int, ranks: int, *, vocab_size: int | None = None) -> None:
        tokens = prepare_tokens("stdlib")
        sequences = options.batch * options.grad_accum * ranks
        plan = BatchPlan(sequence_length=options.length, global_batch=sequences, micro_batch=options.batch)
        self.options = options
        self.tokens_a_step = sequences * options.length
        self.vocab_size = vocab_size or tokens.vocab_size
        self.batches = Batches(tokens.split()[0], plan, rank, ranks)


class Loop:
    """A model with its optimizer and its place in the data."""

    def __init__(self, work: Work, *, device: str = "cpu", lr: float = 1e-3) -> None:
        torch.manual_seed(0)
        options = work.options
        model = build_model(options.model, vocab_size=work.vocab_size, sequence_length=options.length)
        self.model: nn.Module = model.to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True if device == "cuda" else None
        )
        self._batches, self._on_gpu = work.batches, device == "cuda"
        self._number = 0

    def window(self) -> Sequence[MicroBatch]:
        self._number += 1
        window = self._batches.window(self._number)
        if not self._on_gpu:
            return window
        return [
            (inputs.pin_memory().cuda(non_blocking=True), targets.pin_memory().cuda(non_blocking=True))
            for inputs, targets in window
        ]


def on_gradsync(loop: Loop, accelerator: Accelerator) -> Step:
    model, optimizer = accelerator.prepare(loop.model, loop.optimizer)

    def step() -> None:
        for inputs, targets in accelerator.window(loop.window(), model):
            accelerator.backward(loss_of(model(inputs), targets), weight=targets.numel())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand(loop: Loop, model: nn.Module, autocast: Callable[[], AbstractContextManager[None]] = nullcontext) -> Step:
    """`model` is that of the loop, or torch's wrapper of it, with `no_sync` around forward and backward."""

    def step() -> None:
        window = loop.window()
        for number, (inputs, targets) in enumerate(window, start=1):
            apart = number < len(window) and isinstance(model, nn.parallel.DistributedDataParallel)
            with model.no_sync() if apart else nullcontext():
                with autocast():
                    loss = loss_of(model(inputs), targets)
                (loss / len(window)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    return step


def on_accelerate(loop: Loop, steps: int) -> Step:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps)
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


def show(record: CellRecord, work: Work, baseline: str, pairs: Sequence[tuple[str, str]], digits: int) -> None:
    print(table(record, [baseline]))
    for name in record.samples:
        print(f"{name:20} {work.tokens_a_step / record.summary(name).median:12,.0f} tokens/s")
    for ours, theirs in pairs:
        print(f"time of {ours} / {theirs}: {ratio(record, ours, theirs, digits)}")


def compare_on_gpu(options: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    work = Work(options, 0, 1, vocab_size=50257)
    plain, ours = (Loop(work, device="cuda", lr=3e-4) for _ in range(2))
    variants = {
        WITHOUT: on_gpu(by_hand(plain, plain.model, partial(torch.autocast, "cuda", torch.bfloat16))),
        OURS: on_gpu(on_gradsync(ours, Accelerator(mixed_precision="bf16"))),
    }
    record = interleave(variants, warmup=5, rounds=options.rounds)
    gpu = torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {gpu}, {options.model}, {work.tokens_a_step} tokens a step")
    show(record, work, WITHOUT, [(OURS, WITHOUT)], digits=4)


def compare_on_cpu(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    work = Work(options, accelerator.process_index, accelerator.num_processes)
    makers: dict[str, Callable[[Loop], Step]] = {
        "gradsync": lambda loop: on_gradsync(loop, accelerator),
        "gradsync, Gloo": lambda loop: on_gradsync(loop, Accelerator(cpu=True, communicator=group_communicator())),
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


def main() -> None:
    parser = parser_of(__doc__, rounds=30)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", help="by default tiny, and gpt2 on a GPU")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--grad-accum", type=int, default=4)
    parser.add_argument("--length", type=int)
    options = parser.parse_args()
    is_gpu = options.device == "cuda"
    model, batch, length = ("gpt2", 16, 1024) if is_gpu else ("tiny", 8, 128)
    options.model = options.model or model
    options.batch, options.length = options.batch or batch, options.length or length
    (compare_on_gpu if is_gpu else compare_on_cpu)(options)


if __name__ == "__main__":
    main()
