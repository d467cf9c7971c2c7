"""A communicator of one's own: ranks write files into a folder that all of them see, and read those of the others.
It trains a model, beside a twin whose gradients are averaged by `average_gradients` over Gloo.

    torchrun --nproc-per-node 2 examples/own_communicator.py
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from gradsync import DistributedDataParallel, PeerFailedError, average_gradients
from gradsync.communicator import BaseCommunicator, Collective, Handle, ReduceOp, Shares
from gradsync.communicator.reducing import combine_in_order


class FolderCommunicator(BaseCommunicator):
    """Ranks that see one folder, which must be empty at first and belong to no other communicator."""

    def __init__(self, folder: str | Path, rank: int, world_size: int, timeout: float = 60.0) -> None:
        super().__init__(rank, world_size)
        self._folder, self._timeout, self._written = folder, timeout, list[Path]()

    def _swap(self, collective: Collective, put: Callable[[list[Tensor]], object], *parts: Tensor) -> Handle:
        def run() -> None:
            """Write one part for all ranks, or one for each, and `put` what every rank wrote for this one."""
            stem, deadline = f"{self._folder}/{collective.number}", time.monotonic() + self._timeout
            old, self._written = self._written, [Path(f"{stem}-{self.rank}-{to}") for to in range(len(parts))]
            for path, part in zip(self._written, parts, strict=True):
                torch.cat([part.detach().flatten()]).view(torch.uint8).numpy().tofile(f"{path}.part")
                Path(f"{path}.part").rename(path)  # it is whole. (`cat` copies: numpy() would pin the engine's memory)
            paths = [Path(f"{stem}-{rank}-{min(self.rank, len(parts) - 1)}") for rank in range(self.world_size)]
            while missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
                if time.monotonic() > deadline:
                    raise PeerFailedError(f"rank {self.rank} misses ranks {missing} in {collective.describe()}")
                time.sleep(0.001)
            for path in old:  # whoever has come to this collective has read all that it needs of the one before
                path.unlink()
            put([torch.from_file(str(p), size=p.stat().st_size, dtype=torch.uint8).view(parts[0].dtype) for p in paths])

        return self._queue_up(collective, run)

    def _all_reduce(self, collective: Collective, tensor: Tensor, op: ReduceOp):
        return self._swap(collective, lambda xs: combine_in_order([x.view_as(tensor) for x in xs], tensor, op), tensor)

    def _broadcast(self, collective: Collective, tensor: Tensor, source: int):
        return self._swap(collective, lambda xs: tensor.copy_(xs[source].view_as(tensor)), tensor)

    def _all_gather(self, collective: Collective, output: Tensor, tensor: Tensor, shares: Shares):
        return self._swap(collective, lambda xs: output.copy_(torch.cat(xs)), tensor)

    def _reduce_scatter(self, collective: Collective, output: Tensor, tensor: Tensor, op: ReduceOp, shares: Shares):
        return self._swap(collective, lambda xs: combine_in_order(xs, output, op), *tensor.split(shares or len(output)))

    def _all_to_all(self, collective: Collective, output: Tensor, tensor: Tensor, arriving: Shares, leaving: Shares):
        return self._swap(collective, lambda xs: output.copy_(torch.cat(xs)), *tensor.split(leaving))


def main() -> None:
    torch.distributed.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as path:
        torch.distributed.broadcast_object_list(paths := [path])  # all take that of rank 0
        folder = FolderCommunicator(paths[0], torch.distributed.get_rank(), torch.distributed.get_world_size())
        model = DistributedDataParallel(nn.Linear(16, 1), communicator=folder)
        twin = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        optimizer = torch.optim.SGD([*model.parameters(), *twin], lr=0.05)
        for step, inputs in enumerate(torch.randn(20, 64, 16)):
            losses = [(output - 1).square().mean() for output in (model(inputs), nn.functional.linear(inputs, *twin))]
            optimizer.zero_grad()
            sum(losses).backward()
            average_gradients(twin)
            optimizer.step()
            print(f"step {step}: loss {losses[0].item():.4f}, with average_gradients {losses[1].item():.4f}")


if __name__ == "__main__":
    main()
