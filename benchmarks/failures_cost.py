"""What it costs to be ready for failures: the watch, skip votes and fingerprints together, against none of them.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/failures_cost.py
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/failures_cost.py --batch 12

One model trains, and all of it is switched on and off in place, every few steps: "off", "on", once more "off", and "on"
with one comparison of fingerprints in the block, in an order that changes from round to round. Two models would differ
by up to 1 % by where their memory lies alone. The second "off" is the noise: a difference as large as its own is none.
The time is that of the slowest rank; the CPU time that of all threads of all ranks. It ends after ``--minutes`` at the
latest.
"""

import argparse
import itertools
import statistics
import threading
from typing import Any

import torch
import torch.distributed as dist
from on_and_off import LIMIT, VARIANTS, WARMUP, Took, Training, arguments, report, take_turns, timed

from gradsync import ReplicaCheck
from gradsync.health.watch.set_up import agents

COMPARED = "compared"
# Steps between two comparisons of fingerprints, for which their cost is told.
EVERY = 100


class Ready(Training):
    """A model that is ready for failures, and can be made not to be."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, "cpu", on_bad_step="raise", replica_check=ReplicaCheck(every=1))
        engine: Any = self.model.synchronizer.engine
        self._pipeline, self._exchange = engine.pipeline, engine.exchange
        self._check, self._comparison = self._pipeline._check, self._exchange._comparison
        self._is_watched = threading.Event()
        (agent,) = agents()
        self._hold(agent._selector)
        self.switch("on")
        for _ in range(WARMUP):
            self.step()

    def _hold(self, selector: Any) -> None:
        """The thread of the watch, where it sleeps anyway, as long as it is not to watch."""
        select = selector.select

        def hold(timeout: float) -> Any:
            ready = select(timeout)
            self._is_watched.wait()
            return ready

        selector.select = hold

    def switch(self, variant: str) -> None:
        is_on = variant in ("on", COMPARED)
        self._pipeline._check = self._check if is_on else None
        self._exchange._comparison = self._comparison if variant == COMPARED else None
        (self._is_watched.set if is_on else self._is_watched.clear)()

    def run(self, variant: str, steps: int) -> Took:
        # One step is not measured: the watch has time to fall asleep, or to catch up.
        self.switch("on" if variant == COMPARED else variant)
        self.step()
        self.switch(variant)
        return timed(self.step, steps)

    def step(self) -> None:
        super().step()
        # One comparison a block.
        self._exchange._comparison = None


def with_fingerprints(rounds: list[dict[str, Took]], steps: int) -> str:
    """What a comparison takes, by the blocks that have one, and what all of it comes to."""
    lines = []
    for kind in ("wall", "cpu"):
        on, compared = ([getattr(each[name], kind) for each in rounds] for name in ("on", COMPARED))
        off = [statistics.mean(getattr(each[name], kind) for name in VARIANTS if name != "on") for each in rounds]
        takes = statistics.median(a - b for a, b in zip(compared, on, strict=True)) * steps
        ready = statistics.median(a / b for a, b in zip(on, off, strict=True)) - 1
        more = ready + takes / EVERY / statistics.median(off)
        lines.append(
            f"{kind}: a comparison of fingerprints takes {1e3 * takes:.2f} ms; all of it, with one in {EVERY} steps: "
            f"{100 * more:+.2f} %, to be below {100 * LIMIT:g} %: {'yes' if more < LIMIT else 'NO'}"
        )
    return "\n".join(lines)


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Ready(options)
    orders = list(itertools.permutations((*VARIANTS, COMPARED)))
    # Not the next one in the list, which begins the same way.
    shuffled = (orders[number * 7 % len(orders)] for number in itertools.count())
    rounds = take_turns(lambda variant: training.run(variant, options.steps), shuffled, options)
    training.switch("on")
    if dist.get_rank() == 0:
        print("watch and skip votes alone:", report(rounds), with_fingerprints(rounds, options.steps), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
