"""Resident memory of a rank while it trains on the CPU: gradsync on its own choice of wire against torch's DDP.

    python benchmarks/resident.py
    python benchmarks/resident.py --model much-wire --repeats 5

What `memory.py` counts are live tensors; memory that ranks share is none to torch's profiler, and what the allocator
keeps is not seen there either. Here it is all counted: the proportional set size of Linux, in which pages that several
processes share count once. Every variant runs in processes of its own, because no allocator gives everything back.
"settled" is after the last step, "peak" the most at any time from the making of the wrapper on.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import warnings

import torch
import torch.distributed as dist
from engine import MODELS, make_step, variants

from gradsync.tools.bench.device import PeakMemory, used_bytes

MIB = 2**20
STEPS = 40
VARIANTS = ("no wrapper", "torch stock", "torch tuned", "gradsync", "gradsync, Gloo")


def be_rank(variant: str, model: str) -> None:
    """One rank of one run. Rank 0 prints the mean growth over ranks, in bytes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module, inputs = MODELS[model]()
    dist.barrier()
    with PeakMemory() as memory:
        step = make_step(variants(model)[variant](module), inputs)
        for _ in range(STEPS):
            step()
        dist.barrier()
        settled = used_bytes() - memory.before
        dist.barrier()
    grown = torch.tensor([memory.growth, settled], dtype=torch.float64)
    dist.all_reduce(grown)
    if dist.get_rank() == 0:
        peak, settled = (grown / dist.get_world_size()).tolist()
        print(json.dumps({"peak": peak, "settled": settled}))
    dist.barrier()


def run(variant: str, model: str) -> dict[str, float]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    own = [__file__, "--model", model, "--variant", variant]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, *own]
    answer = subprocess.run(command, check=True, env=environment, timeout=300, stdout=subprocess.PIPE, text=True)
    return json.loads(answer.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="transformer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant is not None:
        be_rank(options.variant, options.model)
        return
    # In turns, so that what changes on the machine meanwhile meets all of them.
    readings: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for number in range(options.repeats):
        for variant, seen in readings.items():
            print(f"repeat {number + 1} of {options.repeats}: {variant}", file=sys.stderr)
            seen.append(run(variant, options.model))
    print(f"{options.model}: 2 ranks, {STEPS} steps, MiB per rank beyond the module; median (least–most)")
    print(f"{'variant':<18}{'peak':>26}{'settled':>26}")
    for variant, seen in readings.items():
        cells = [[reading[what] / MIB for reading in seen] for what in ("peak", "settled")]
        texts = [f"{statistics.median(cell):.1f} ({min(cell):.1f}–{max(cell):.1f})" for cell in cells]
        print(f"{variant:<18}{texts[0]:>26}{texts[1]:>26}")


if __name__ == "__main__":
    main()
