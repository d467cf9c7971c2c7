"""GPT-2 124M in bf16 on one GPU: tokens a second of the loop of `gradsync train`, with gradsync and without it.

    python benchmarks/train_gpu.py --rounds 30

The loops take turns step by step in one process. Without gradsync, losses are divided by their number and
`torch.nn.utils.clip_grad_norm_` clips.
"""

from functools import partial

import torch
from interleave import interleave, on_gpu
from training import Loop, Work, arguments, by_hand, on_gradsync, show

from gradsync import Accelerator

OURS, WITHOUT = "gradsync", "without gradsync"


def main() -> None:
    options = arguments(__doc__, model="gpt2", batch=16, length=1024)
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


if __name__ == "__main__":
    main()
