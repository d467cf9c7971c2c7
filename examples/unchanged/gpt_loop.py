"""A character model in the manner of small GPT trainings: DDP, accumulation by a flag, autocast, a gradient scaler.

It knows torch alone, and runs in one process or under torchrun:

    torchrun --nproc-per-node 2 examples/unchanged/gpt_loop.py --max_iters=30
"""

import math
import os
import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# Settings, which the command line may override as --name=value.
max_iters = 20
gradient_accumulation_steps = 4  # over all ranks
batch_size = 4
block_size = 32
n_layer, n_head, n_embd = 2, 2, 32
learning_rate, warmup_iters, grad_clip = 1e-2, 5, 1.0
eval_interval = 10
out = ""  # a file for the parameters
dtype = "float32"
for argument in sys.argv[1:]:
    name, _, value = argument.removeprefix("--").partition("=")
    if name not in globals():
        raise ValueError(f"unknown setting {argument}")
    globals()[name] = type(globals()[name])(value)

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    init_process_group(backend=backend)
    ddp_rank, ddp_local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    device = f"cuda:{ddp_local_rank}" if backend == "nccl" else "cpu"
    master_process, seed_offset = ddp_rank == 0, ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    master_process, seed_offset, ddp_world_size = True, 0, 1

device_type = "cuda" if device.startswith("cuda") else "cpu"
ptdtype = getattr(torch, dtype)
narrow = dtype in ("bfloat16", "float16")
ctx = torch.autocast(device_type=device_type, dtype=ptdtype) if narrow else nullcontext()

text = "".join(f"{n} times {m} is {n * m}. " for n in range(1, 40) for m in range(1, 40))
characters = sorted(set(text))
data = torch.tensor([characters.index(each) for each in text])
generator = torch.Generator().manual_seed(1337 + seed_offset)


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - block_size, (batch_size,), generator=generator)
    x = torch.stack([data[i : i + block_size] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in starts])
    return x.to(device), y.to(device)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = [
            each.view(batch, length, n_head, width // n_head).transpose(1, 2)
            for each in self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        ]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(characters), n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, len(characters), bias=False)
        self.wte.weight = self.lm_head.weight  # tied

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    return learning_rate * 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / max(1, max_iters - warmup_iters)))


torch.manual_seed(1337)
model = GPT().to(device)
if dtype == "float64":
    model = model.double()
scaler = torch.amp.GradScaler(device_type, enabled=dtype == "float16")
decayed = [p for p in model.parameters() if p.dim() >= 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() < 2]}],
    lr=learning_rate,
    betas=(0.9, 0.95),
)
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank] if device_type == "cuda" else None)
raw_model = model.module if ddp else model


@torch.no_grad()
def estimate_loss() -> float:
    model.eval()
    losses = [model(*get_batch())[1].item() for _ in range(2)]
    model.train()
    return sum(losses) / len(losses)


X, Y = get_batch()
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and master_process:
        print(f"step {iter_num}: validation {estimate_loss():.4f}")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            # Gradients are exchanged with the last micro-batch alone.
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    if grad_clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")

if out and master_process:
    torch.save({"model": raw_model.state_dict(), "iter_num": max_iters}, out)
if ddp:
    destroy_process_group()
