"""GPT-2 124M in bf16 on one GPU: tokens a second of the loop of `gradsync train`, with gradsync and without it.

    python benchmarks/train_gpu.py --rounds 30

The loops take turns step by step in one process. A step is a window of `--grad-accum` micro-batches with clipping and
AdamW. Without gradsync, losses are divided by their number and `torch.nn.utils.clip_grad_norm_` clips.
"""

import argparse

import torch
from interleave import Step, interleave, ratio, table
from torch import nn

from gradsync import Accelerator
from gradsync.llm.batches import Batches, BatchPlan
from gradsync.llm.model import build_model, count_targets, loss_of
from gradsync.llm.tokens import prepare_tokens


class Loop:
    """A model with its optimizer and its place in the data."""

    def __init__(self, arguments: argparse.Namespace, batches: Batches, vocab_size: int) -> None:
        torch.manual_seed(0)
        model = build_model(arguments.model, vocab_size=vocab_size, sequence_length=arguments.length)
        self.model: nn.Module = model.cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
        self.batches = batches
        self.number = 0

    def window(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self.number += 1
        return [
            (inputs.pin_memory().cuda(non_blocking=True), targets.pin_memory().cuda(non_blocking=True))
            for inputs, targets in self.batches.window(self.number)
        ]


def with_gradsync(loop: Loop) -> Step:
    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer = accelerator.prepare(loop.model, loop.optimizer)

    def step() -> None:
        for inputs, targets in accelerator.window(loop.window(), model):
            with accelerator.autocast():
                loss = loss_of(model(inputs), targets)
            accelerator.backward(loss, weight=targets.numel())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def without(loop: Loop) -> Step:
    def step() -> None:
        window = loop.window()
        for inputs, targets in window:
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(loop.model(inputs).float(), targets)
            (loss / len(window)).backward()
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--grad-accum", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    tokens = prepare_tokens("stdlib")
    plan = BatchPlan(
        sequence_length=arguments.length,
        global_batch=arguments.batch * arguments.grad_accum,
        micro_batch=arguments.batch,
        seed=0,
    )
    batches = Batches(tokens.split()[0], plan, 0, 1)
    assert count_targets(batches.window(0)[0][1]) == arguments.batch * arguments.length
    variants = {
        "without gradsync": without(Loop(arguments, batches, 50257)),
        "gradsync": with_gradsync(Loop(arguments, batches, 50257)),
    }
    samples = interleave(variants, warmup=5, rounds=arguments.rounds, device=torch.device("cuda"))
    tokens_a_step = plan.global_batch * arguments.length
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {arguments.model}, {tokens_a_step} tokens a step"
    )
    print(table(samples, ["without gradsync"]))
    for name, times in samples.items():
        print(f"{name:20} {tokens_a_step / sorted(times)[len(times) // 2]:12,.0f} tokens/s")
    middle, low, high = ratio(samples["gradsync"], samples["without gradsync"])
    print(f"time of gradsync / without: {middle:.4f} ({low:.4f}–{high:.4f})")


if __name__ == "__main__":
    main()
