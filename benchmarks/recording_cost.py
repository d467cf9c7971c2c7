"""What it costs that every model keeps when it computed, sent, waited and stepped: recording, against none.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/recording_cost.py
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/recording_cost.py --bucket-cap-mb 0.05
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 1 benchmarks/recording_cost.py --device cuda --model mini

Three models live in the same processes: "off", "on" (in memory, as every model on the CPU is recorded, and on a GPU one
that is asked to be) and once more "off". Short blocks of their steps take turns, in an order that changes from round to
round, so that what else goes on meets all of them. The second "off" is the noise: a difference as large as its own is
none. The time is that of the slowest rank; the CPU time that of all threads of all ranks. Marks are a few a bucket:
small buckets are the worst case, and steps of a GPU that waits for its host. It ends after ``--minutes`` at the latest.
"""

import argparse
import itertools
import os

import torch
import torch.distributed as dist
from on_and_off import VARIANTS, WARMUP, Took, Training, arguments, report, take_turns, timed

from gradsync.observe.recording import Recorder


class Variant(Training):
    """A model that is recorded, or not."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        os.environ["GRADSYNC_RECORD"] = "off"
        observer = Recorder() if name == "on" else None
        super().__init__(options, options.device, bucket_cap_mb=options.bucket_cap_mb, observer=observer)
        if (self.model.replica.recorder is not None) is not (name == "on"):
            raise SystemExit(f"the variant {name!r} is not what it says")

    @property
    def buckets(self) -> int:
        layout = self.model.synchronizer.layout
        return 0 if layout is None else len(layout.buckets)

    def run(self, steps: int) -> Took:
        self.step()
        return timed(self.step, steps)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--bucket-cap-mb", type=float, default=None, help="chosen by measurement, unless given")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl")
    variants = {name: Variant(name, options) for name in VARIANTS}
    for variant in variants.values():
        variant.run(WARMUP)
    orders = itertools.cycle(itertools.permutations(VARIANTS))
    rounds = take_turns(lambda name: variants[name].run(options.steps), orders, options)
    if dist.get_rank() == 0:
        print(f"{options.model}, {variants['on'].buckets} buckets")
        print(report(rounds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
