"""Peak memory of a training step on the CPU, as bytes of live tensors: gradsync against torch's DDP.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/memory.py

torch's profiler reports every allocation of tensor memory; the running sum and its maximum are exact and the same in
every run, which the process's resident size is not. gradsync runs on the group's own wire here: over shared memory
buckets are no tensor memory to the profiler, though they have the same size. `gradsync bench peers` counts those, too.
"""

import gc
import time
import warnings
from functools import partial

import torch
import torch.distributed as dist
from engine import TorchDDP, Wrap, make_step, on_the_group, transformer
from torch.profiler import ProfilerActivity, profile

VARIANTS: dict[str, Wrap] = {
    "no wrapper": lambda module: module,
    "torch stock": TorchDDP,
    "torch view": partial(TorchDDP, gradient_as_bucket_view=True),
    "gradsync": on_the_group,
    "gradsync 1 MiB": partial(on_the_group, bucket_cap_mb=1),
}


def peak_bytes(wrap: Wrap) -> int:
    """The most that was live at once in two steps, beyond what was live before the wrapper was made."""
    torch.manual_seed(0)
    module, inputs = transformer()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step = make_step(wrap(module), inputs)
        for _ in range(4):
            # Gloo's threads let go of a tensor a moment after the collective is done; on busy cores a long moment.
            time.sleep(0.2)
            step()
    live = peak = 0
    changes = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(changes, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del step
    gc.collect()
    return peak


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, wrap in VARIANTS.items():
        peak = peak_bytes(wrap)
        if dist.get_rank() == 0:
            print(f"{name:<20}{peak / 2**20:10.2f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
