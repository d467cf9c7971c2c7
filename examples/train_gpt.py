"""The recipe of `gradsync train` in a page, to copy: a small GPT, windows weighted by tokens, exact resuming.

    torchrun --nproc-per-node 2 examples/train_gpt.py --steps 30

Run it again with more steps and it goes on where it was. Needs the extra `train`: `pip install '.[train]'` in a clone.
"""

import argparse
import time

import torch

from gradsync import Accelerator, GradientAccumulationPlugin
from gradsync.tools.llm.model import build_model, count_targets, loss_of
from gradsync.tools.llm.tokens import Batches, BatchPlan, prepare_tokens
from gradsync.tools.llm.trainer import warmup_cosine


class Progress:
    """The number of the next window: all that the data's position is."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--grad-accum", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--checkpoints", default="checkpoints")
    arguments = parser.parse_args()

    # The schedule below counts windows, not the batches of one process.
    accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(scheduler_steps="once"))
    torch.manual_seed(0)
    with accelerator.main_process_first():  # builds the token file once
        tokens = prepare_tokens(arguments.data)
    model = build_model(arguments.model, vocab_size=tokens.vocab_size, sequence_length=arguments.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(20, 1000))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if accelerator.has_state(arguments.checkpoints):
        accelerator.load_state(arguments.checkpoints)
        accelerator.print(f"goes on after step {progress.step}")

    ranks = accelerator.num_processes
    plan = BatchPlan(
        sequence_length=arguments.length,
        global_batch=arguments.batch * arguments.grad_accum * ranks,
        micro_batch=arguments.batch,
        seed=0,
    )
    batches = Batches(tokens.split()[0], plan, accelerator.process_index, ranks)
    while progress.step < arguments.steps:
        began, losses = time.perf_counter(), []
        for inputs, targets in accelerator.window(batches.window(progress.step), model):
            inputs, targets = inputs.to(accelerator.device), targets.to(accelerator.device)
            loss = loss_of(model(inputs), targets)
            accelerator.backward(loss, weight=count_targets(targets))
            losses.append(loss.detach())
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.step += 1
        loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
        if progress.step % 10 == 0:
            speed = plan.global_batch * plan.sequence_length / (time.perf_counter() - began)
            accelerator.print(
                f"step {progress.step}: loss {loss.item():.4f}, norm {norm.item():.3f}, {speed:,.0f} tokens/s"
            )
    accelerator.save_state(arguments.checkpoints)
    accelerator.end_training()


if __name__ == "__main__":
    main()
