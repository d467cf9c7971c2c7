"""One rank of the measurement of the wire: ``python wire_rank.py BACKEND RANK RANKS STORE SECONDS``.

A rank says when it is ready, and rank 0 prints the median seconds by bytes as JSON. Whatever goes wrong is an
exception, whose last line the doctor shows.
"""

import json
import statistics
import sys
import time
from datetime import timedelta

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
    medians = {nbytes: _median_seconds(nbytes, device, int(ranks)) for nbytes in BYTES}
    dist.destroy_process_group()
    if rank == "0":
        print(json.dumps(medians))


def _median_seconds(nbytes: int, device: torch.device, ranks: int) -> float:
    readings = []
    for _ in range(WARM_UP + REPEATS[nbytes]):
        tensor = torch.ones(nbytes // 4, device=device)
        dist.barrier()
        _wait_for(device)
        started = time.perf_counter()
        dist.all_reduce(tensor)
        _wait_for(device)
        readings.append(time.perf_counter() - started)
        if not bool((tensor == ranks).all()):
            raise ArithmeticError(f"an all-reduce of ones over {ranks} ranks gave {tensor.min()} to {tensor.max()}")
    return statistics.median(readings[WARM_UP:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
