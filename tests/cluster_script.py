"""Trains on all ranks that torchrun has started, then writes what it saw: FOLDER. See tests/tools/test_clusters.py."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gradsync import DistributedDataParallel

LISTENS = "0A"
LOOPBACKS = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def listening_ports() -> list[int]:
    """The ports of this network at which something listens for other hosts."""
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, _, port = local.partition(":")
            if state == LISTENS and address not in LOOPBACKS:
                ports.add(int(port, 16))
    return sorted(ports)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Linear(8, 1).double())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = model.module.weight.tolist()
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8).double()).square().mean().backward()
    optimizer.step()
seen = {
    "before": before,
    "weights": model.module.weight.tolist(),
    "ports": listening_ports(),
    "node": int(os.environ["GROUP_RANK"]),
    "ranks": dist.get_world_size(),
}
(Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(seen))
dist.barrier()
dist.destroy_process_group()
