"""The loop of `gradsync train` as a step to be timed: with gradsync, and as it is written by hand without it.

A step is a window of `--grad-accum` micro-batches with clipping and AdamW. Every variant has a model and an optimizer
of its own, all of them the same data.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from interleave import Step, ratio, table
from torch import nn

from gradsync import Accelerator
from gradsync.tools.bench.record import CellRecord
from gradsync.tools.llm.model import build_model, loss_of
from gradsync.tools.llm.tokens import Batches, BatchPlan, MicroBatch, prepare_tokens


def arguments(description: str | None, *, model: str, batch: int, length: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=model)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--grad-accum", type=int, default=4)
    parser.add_argument("--length", type=int, default=length)
    return parser.parse_args()


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


def show(record: CellRecord, work: Work, baseline: str, pairs: Sequence[tuple[str, str]], digits: int) -> None:
    print(table(record, [baseline]))
    for name in record.samples:
        print(f"{name:20} {work.tokens_a_step / record.summary(name).median:12,.0f} tokens/s")
    for ours, theirs in pairs:
        print(f"time of {ours} / {theirs}: {ratio(record, ours, theirs, digits)}")
