"""A first DDP script: a group, a wrapped model, a loop, a checkpoint that one rank writes and all ranks read.

    torchrun --nproc-per-node 2 examples/unchanged/ddp_basics.py

With ``--spawn N`` it starts N processes by itself instead.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.norm = nn.BatchNorm1d(10)
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(torch.relu(self.norm(self.net1(x))))


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(160, 10, generator=generator, dtype=torch.float64)
    data = TensorDataset(inputs, inputs[:, :5].sin())
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=True, seed=3))


def demo_basic(rank: int, epochs: int, out: str) -> None:
    torch.manual_seed(rank)  # DDP takes rank 0's parameters
    model = ToyModel().double()
    ddp_model = DDP(model)
    assert isinstance(ddp_model, torch.nn.parallel.DistributedDataParallel)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)
    batches = loader()
    for epoch in range(epochs):
        batches.sampler.set_epoch(epoch)
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss = loss_fn(ddp_model(inputs), labels)
            loss.backward()
            optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.5f}")

    path = Path(tempfile.gettempdir()) / f"ddp_basics_{os.environ['MASTER_PORT']}.pt"
    if rank == 0:
        torch.save(ddp_model.state_dict(), path)
    dist.barrier()  # the others read when the file is there
    ddp_model.load_state_dict(torch.load(path))
    dist.barrier()
    if rank == 0:
        path.unlink()
        if out:
            torch.save({"model": ddp_model.module.state_dict()}, out)


def work(rank: int, world_size: int, epochs: int, out: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    demo_basic(rank, epochs, out)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--spawn", type=int, default=0)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    if options.spawn:
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "12355")
        mp.spawn(work, args=(options.spawn, options.epochs, options.out), nprocs=options.spawn)
    else:
        work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options.epochs, options.out)


if __name__ == "__main__":
    main()
