"""The Accelerator with `no_sync`, for loops that say themselves where a window ends.

    torchrun --nproc-per-node 2 examples/accelerator_no_sync.py

Runs unchanged with `python` as a world of one. (`torch.enable_grad()` is the context that changes nothing here.)
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradsync import Accelerator

ACCUMULATE = 4


def main() -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)
    inputs = torch.randn(1024, 16)
    data = TensorDataset(inputs, inputs[:, :4].sum(1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(8):
        for number, (inputs, targets) in enumerate(loader, start=1):
            last = number % ACCUMULATE == 0 or number == len(loader)
            loss = nn.functional.mse_loss(model(inputs), targets)
            with torch.enable_grad() if last else accelerator.no_sync(model):
                accelerator.backward(loss / ACCUMULATE)
            if last:
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    print(f"parameters sum to {sum(parameter.sum().item() for parameter in model.parameters()):.6f}")


if __name__ == "__main__":
    main()
