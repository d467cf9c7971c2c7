"""Gradients averaged within subgroups of two ranks: each group trains a model of its own.

    torchrun --nproc-per-node 4 examples/subgroup_averaging.py

All ranks of a group must start from the same parameters; here the seed sees to it.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradsync

ACCUMULATE = 4


def main() -> None:
    torch.distributed.init_process_group("gloo")
    group, _ = torch.distributed.new_subgroups(group_size=2)
    torch.manual_seed(0)
    inputs = torch.randn(1024, 16)
    data = TensorDataset(inputs, inputs[:, :4].sum(1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=16, sampler=torch.utils.data.DistributedSampler(data))
    for epoch in range(8):
        for number, (inputs, targets) in enumerate(loader, start=1):
            last = number % ACCUMULATE == 0 or number == len(loader)
            loss = nn.functional.mse_loss(model(inputs), targets)
            (loss / ACCUMULATE).backward()
            if last:
                gradsync.average_gradients(model, group)
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    print(f"parameters sum to {sum(parameter.sum().item() for parameter in model.parameters()):.6f}")


if __name__ == "__main__":
    main()
