"""What `accumulate` adds to a micro-batch that does nothing: bookkeeping alone, no forward and no backward.

    python benchmarks/accumulate_overhead.py
    torchrun --nproc-per-node 2 benchmarks/accumulate_overhead.py

Rounds of an empty loop and of the three forms take turns; the table shows the difference per micro-batch. Windows never
end (`last=False`), because the end of a window is communication, which other benchmarks measure.
"""

import argparse
from collections.abc import Callable, Iterable
from functools import partial

import torch
from interleave import interleave, parser_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradsync import Accelerator
from gradsync.tools.bench.record import CellRecord

Loop = Callable[[Iterable[object]], None]


def main() -> None:
    parser = parser_of(__doc__, rounds=200)
    parser.add_argument("--micro-batches", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(gradient_accumulation_steps=10**9, cpu=True)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)))
    model = accelerator.prepare(module)
    handle = accelerator.models.attachment_of(model)
    inner = DataLoader(TensorDataset(torch.zeros(4)))
    loader = accelerator.prepare(inner)

    def empty(batches: Iterable[object]) -> None:
        for _ in batches:
            pass

    def blocks(batches: Iterable[object]) -> None:
        for _ in batches:
            with handle.accumulate(last=False):
                pass

    def prepared(batches: Iterable[object]) -> None:
        for _ in batches:
            with accelerator.accumulate(model):
                pass

    def iterator(batches: Iterable[object]) -> None:
        for _ in handle.accumulate(batches):
            pass

    loops: dict[str, Loop] = {
        "empty loop": empty,
        "with model.accumulate(last=False)": blocks,
        "with accelerator.accumulate(model)": prepared,
        "for batch in model.accumulate(batches)": iterator,
    }
    # Inside a prepared loader, as in a real loop: the accelerator then asks it for its last batch.
    for _ in loader:
        steps = {name: partial(loop, range(options.micro_batches)) for name, loop in loops.items()}
        record = interleave(steps, warmup=0, rounds=options.rounds)
        break
    print_results(accelerator, record, options)
    accelerator.end_training()


def print_results(accelerator: Accelerator, record: CellRecord, options: argparse.Namespace) -> None:
    if not accelerator.is_main_process:
        return
    count, micro = accelerator.num_processes, 1e6 / options.micro_batches
    print(f"{options.rounds} rounds of {options.micro_batches} micro-batches, {count} ranks")
    for name in record.samples:
        seen = record.summary(name)
        more = (seen.median - record.summary("empty loop").median) * micro
        spread = f"{seen.p5 * micro:.2f}–{seen.p95 * micro:.2f}"
        print(f"{name:40} {more:6.2f} µs a micro-batch over the empty loop ({spread} with it)")


if __name__ == "__main__":
    main()
