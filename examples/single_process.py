"""The loop the other examples start from: one process, an optimizer step every four micro-batches.

    python examples/single_process.py

Windows are full here, so every loss may be divided by the same number.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 4


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(1024, 16)
    data = TensorDataset(inputs, inputs[:, :4].sum(1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    for epoch in range(8):
        for number, (inputs, targets) in enumerate(loader, start=1):
            last = number % ACCUMULATE == 0 or number == len(loader)
            loss = nn.functional.mse_loss(model(inputs), targets)
            (loss / ACCUMULATE).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    print(f"parameters sum to {sum(parameter.sum().item() for parameter in model.parameters()):.6f}")


if __name__ == "__main__":
    main()
