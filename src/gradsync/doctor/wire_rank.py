"""One rank of the measurement of the wire: ``python wire_rank.py BACKEND SECONDS``, with torchrun's environment.

A rank says when it is ready, and rank 0 prints the median seconds by bytes as JSON. Whatever goes wrong is an
exception, whose last line the doctor shows.
"""

import json
import os
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["READY"]

READY = "ready\n"
KIB, MIB = 2**10, 2**20
# The numbers of repeats keep all of it well under a second on a wire of 1 GB/s.
REPEATS = {4 * KIB: 20, 256 * KIB: 20, 4 * MIB: 8, 32 * MIB: 4}
WARM_UP = 2


def main() -> None:
    backend, seconds = sys.argv[1:]
    print(READY, end="", flush=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=float(seconds)))
    result: dict[str, Any] = {"seconds": _median_seconds(Tensors(device))}
    if backend == "gloo":
        # Imported now, because the measurement before needs it not.
        from gradsync.communicator import choose_communicator, fit_communicator

        choice = fit_communicator(choose_communicator(), device)
        result |= {"choice": str(choice), "chosen": _median_seconds(Tensors(device, choice.communicator))}
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


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


def _median_seconds(tensors: Tensors) -> dict[int, float]:
    """By bytes."""
    medians = {}
    for nbytes, repeats in REPEATS.items():
        readings = []
        tensor = tensors.ones(nbytes // 4)
        for _ in range(WARM_UP + repeats):
            tensor.fill_(1.0)
            dist.barrier()
            _wait_for(tensors.device)
            started = time.perf_counter()
            tensors.all_reduce(tensor)
            _wait_for(tensors.device)
            readings.append(time.perf_counter() - started)
            ranks = dist.get_world_size()
            if not bool((tensor == ranks).all()):
                raise ArithmeticError(f"an all-reduce of ones over {ranks} ranks gave {tensor.min()} to {tensor.max()}")
        medians[nbytes] = statistics.median(readings[WARM_UP:])
    return medians


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
