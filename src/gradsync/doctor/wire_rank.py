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

from gradsync.communicator import Communicator, choose_communicator, fit_communicator

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
    wire = choose_communicator()
    result: dict[str, Any] = {"seconds": _median_seconds(wire, device)}
    if backend == "gloo":
        choice = fit_communicator(wire, device)
        result |= {"choice": str(choice), "chosen": _median_seconds(choice.communicator, device)}
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


def _median_seconds(wire: Communicator, device: torch.device) -> dict[int, float]:
    """By bytes."""
    medians, ranks = {}, wire.world_size
    for nbytes, repeats in REPEATS.items():
        readings = []
        tensor = wire.allocate(nbytes // 4, torch.float32, device)
        for _ in range(WARM_UP + repeats):
            tensor.fill_(1.0)
            dist.barrier()
            _wait_for(device)
            started = time.perf_counter()
            wire.all_reduce(tensor).wait()
            _wait_for(device)
            readings.append(time.perf_counter() - started)
            if not bool((tensor == ranks).all()):
                raise ArithmeticError(f"an all-reduce of ones over {ranks} ranks gave {tensor.min()} to {tensor.max()}")
        medians[nbytes] = statistics.median(readings[WARM_UP:])
    return medians


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
