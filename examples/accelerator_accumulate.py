"""The Accelerator with `accumulate`: it knows where windows end, and divides by what they had.

    torchrun --nproc-per-node 2 examples/accelerator_accumulate.py

Runs unchanged with `python` as a world of one.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradsync import Accelerator

ACCUMULATE = 4


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE)
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
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
            if last:
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    print(f"parameters sum to {sum(parameter.sum().item() for parameter in model.parameters()):.6f}")


if __name__ == "__main__":
    main()
