"""What it costs to be ready for failures: the watch, vetoes and fingerprints together, against none of them.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/failures_cost.py

Blocks of as many steps as lie between two comparisons of fingerprints take turns, so that each block of "on" has one
comparison: "off", "on" and once more "off", in an order that changes from round to round. The second "off" is the
noise: a difference as large as its own is none. Every block has a process group and a model of its own, whose set-up is
not measured, since a watch lives as long as its group. The time is that of the slowest rank; the CPU time that of all
threads of all ranks. It ends after ``--minutes`` at the latest.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from on_and_off import VARIANTS, Took, has_time, report, timed

import gradsync
from gradsync.llm.model import build_model, loss_of

VOCABULARY = 512
WARMUP = 15


class Block:
    """The steps of one variant, over a group of its own."""

    def __init__(self, variant: str, options: argparse.Namespace) -> None:
        is_on = variant == "on"
        os.environ["GRADSYNC_WATCH"] = "on" if is_on else "off"
        self._group = dist.new_group()
        torch.manual_seed(0)
        model = build_model(options.model, vocab_size=VOCABULARY, sequence_length=options.length)
        self._model = gradsync.DistributedDataParallel(
            model,
            process_group=self._group,
            on_veto="raise" if is_on else None,
            fingerprints=gradsync.Fingerprints(every=options.steps) if is_on else None,
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._tokens = torch.randint(VOCABULARY, (options.batch, options.length + 1))
        self._steps = options.steps

    def run(self) -> Took:
        for _ in range(WARMUP):
            self._step()
        return timed(self._step, self._steps, self._group)

    def _step(self) -> None:
        loss_of(self._model(self._tokens[:, :-1]), self._tokens[:, 1:]).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        dist.barrier(self._group)
        dist.destroy_process_group(self._group)
        # What still watches over the group finds that it is gone at its next beat.
        time.sleep(1.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="of gradsync train")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100, help="in a block, and between two fingerprints")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=8.0, help="no round begins that would end later")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    began, rounds = time.monotonic(), list[dict[str, Took]]()
    for number in range(options.rounds):
        took = {}
        for variant in (VARIANTS, VARIANTS[::-1], ("on", "off", "off again"))[number % 3]:
            block = Block(variant, options)
            took[variant] = block.run()
            block.close()
        rounds.append(took)
        if not has_time(began, len(rounds), options.minutes):
            break
    if dist.get_rank() == 0:
        print(report(rounds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
