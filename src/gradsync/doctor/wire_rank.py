"""One rank of the measurement of the wire: ``python wire_rank.py BACKEND RANK RANKS STORE SECONDS``.

A rank says when it is ready, and rank 0 prints the median seconds by bytes as JSON. Whatever goes wrong is an
exception, whose last line the doctor shows.
"""

import json
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["BYTES", "READY"]

READY = "ready\n"
KIB, MIB = 2**10, 2**20
# The numbers of repeats keep all of it well under a second on a wire of 1 GB/s.
REPEATS = {4 * KIB: 20, 256 * KIB: 20, 4 * MIB: 8, 32 * MIB: 4}
BYTES = tuple(REPEATS)
WARM_UP = 2


def main() -> None:
    backend, rank, ranks, store, seconds = sys.argv[1:]
    print(READY, end="", flush=True)
    device = torch.device("cuda", int(rank)) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=float(seconds)),
    )
    result: dict[str, Any] = {
        "seconds": {nbytes: _median_seconds(Tensors(device), nbytes, int(ranks)) for nbytes in BYTES}
    }
    if backend == "gloo":
        # Imported now, because the measurement before needs it not.
        from gradsync.communicator import choose_communicator, fit_communicator

        choice = fit_communicator(choose_communicator(), device)
        wire = Tensors(device, choice.communicator)
        chosen = {nbytes: _median_seconds(wire, nbytes, int(ranks)) for nbytes in BYTES}
        result |= {"choice": str(choice), "chosen": chosen}
    dist.barrier()
    dist.destroy_process_group()
    if rank == "0":
        print(json.dumps(result))


class Tensors:
    """All-reduces over the group, or over ``wire`` in memory of its own."""

    def __init__(self, device: torch.device, wire: Any = None) -> None:
        self.device, self._wire = device, wire

    def ones(self, count: int) -> torch.Tensor:
        if self._wire is None:
            return torch.ones(count, device=self.device)
        tensor: torch.Tensor = self._wire.allocate(count, torch.float32, self.device)
        return tensor.fill_(1.0)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if self._wire is None:
            dist.all_reduce(tensor)
        else:
            self._wire.all_reduce(tensor).wait()


def _median_seconds(tensors: Tensors, nbytes: int, ranks: int) -> float:
    readings = []
    tensor = tensors.ones(nbytes // 4)
    for _ in range(WARM_UP + REPEATS[nbytes]):
        tensor.fill_(1.0)
        dist.barrier()
        _wait_for(tensors.device)
        started = time.perf_counter()
        tensors.all_reduce(tensor)
        _wait_for(tensors.device)
        readings.append(time.perf_counter() - started)
        if not bool((tensor == ranks).all()):
            raise ArithmeticError(f"an all-reduce of ones over {ranks} ranks gave {tensor.min()} to {tensor.max()}")
    return statistics.median(readings[WARM_UP:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
