"""One step, drawn: when each bucket was ready, started and reduced, and when backward ended.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/overlap.py

Collectives that start left of the ``|`` overlap backward. The same model is run with ``schedule="bucketed"`` and
``schedule="naive"`` for comparison.
"""

import torch
import torch.distributed as dist
from engine import make_step, transformer

import gradsync


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for schedule in ("overlapped", "bucketed", "naive"):
        torch.manual_seed(0)
        module, inputs = transformer()
        timeline = gradsync.Timeline()
        wrapped = gradsync.DistributedDataParallel(module, bucket_cap_mb=2, schedule=schedule, observer=timeline)
        step = make_step(wrapped, inputs)
        for _ in range(7):
            step()
        if dist.get_rank() == 0:
            last = timeline.steps[-1]
            print(
                f"\n{schedule}: {'collectives start before backward ends' if last.overlaps else 'no overlap'}, "
                f"{last.exposed * 1e3:.1f} ms exposed"
            )
            print("\n".join(str(timeline).splitlines()[:14]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
