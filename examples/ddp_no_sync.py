"""The wrapper with `no_sync`: only the last backward of a window synchronizes, while it runs.

    torchrun --nproc-per-node 2 examples/ddp_no_sync.py

Around the backward alone is enough. (`torch.enable_grad()` is the context that changes nothing here.)
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradsync

ACCUMULATE = 4


def main() -> None:
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(1024, 16)
    data = TensorDataset(inputs, inputs[:, :4].sum(1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    model = gradsync.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=16, sampler=torch.utils.data.DistributedSampler(data))
    for epoch in range(8):
        for number, (inputs, targets) in enumerate(loader, start=1):
            last = number % ACCUMULATE == 0 or number == len(loader)
            loss = nn.functional.mse_loss(model(inputs), targets)
            with torch.enable_grad() if last else model.no_sync():
                (loss / ACCUMULATE).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    print(f"parameters sum to {sum(parameter.sum().item() for parameter in model.parameters()):.6f}")


if __name__ == "__main__":
    main()
