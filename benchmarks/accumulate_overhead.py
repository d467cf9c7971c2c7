"""What `accumulate` adds to a micro-batch that does nothing: bookkeeping alone, no forward and no backward.

    python benchmarks/accumulate_overhead.py
    torchrun --nproc-per-node 2 benchmarks/accumulate_overhead.py

Rounds of an empty loop and of the three forms take turns; the table shows the difference per micro-batch. Windows never
end (`last=False`), because the end of a window is communication, which other benchmarks measure.
"""

import argparse
import time
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradsync import Accelerator
from gradsync.bench.statistics import summarize

Loop = Callable[[Iterable[object]], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--micro-batches", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(gradient_accumulation_steps=10**9, cpu=True)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)))
    model = accelerator.prepare(module)
    handle = accelerator.models.handle_of(model)
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
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(options.rounds):
        # Inside a prepared loader, as in a real loop: the accelerator then asks it for its last batch.
        for _ in loader:
            for name, loop in loops.items():
                batches = range(options.micro_batches)
                start = time.perf_counter()
                loop(batches)
                times[name].append((time.perf_counter() - start) / options.micro_batches * 1e6)
            break
    accelerator.print(
        f"{options.rounds} rounds of {options.micro_batches} micro-batches, {accelerator.num_processes} ranks"
    )
    summaries = {name: summarize(samples) for name, samples in times.items()}
    for name, seen in summaries.items():
        more = seen.median - summaries["empty loop"].median
        accelerator.print(
            f"{name:40} {more:6.2f} µs a micro-batch over the empty loop ({seen.p5:.2f}–{seen.p95:.2f} with it)"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
