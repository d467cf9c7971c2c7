"""What it costs that every model keeps when it computed, sent, waited and stepped: recording, against none.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/recording_cost.py
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/recording_cost.py --bucket-cap-mb 0.05

Three models live in the same processes: "off", "on" (in memory, as every model on the CPU is recorded) and once more
"off". Short blocks of their steps take turns, in an order that changes from round to round, so that what else goes on
meets all of them. The second "off" is the noise: a difference as large as its own is none. The time is that of the
slowest rank; the CPU time that of all threads of all ranks. Marks are a few a bucket: small buckets are the worst case.
It ends after ``--minutes`` at the latest.
"""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

import gradsync
from gradsync.llm.model import build_model, loss_of

VOCABULARY = 512
# Bucket sizes are tried in the first 36 steps, where none is given.
WARMUP = 45
LIMIT = 0.005
VARIANTS = ("off", "on", "off again")


@dataclass(frozen=True, kw_only=True)
class Took:
    """Seconds a step."""

    wall: float
    cpu: float


class Variant:
    """A model that is recorded, or not."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        os.environ["GRADSYNC_RECORD"] = "" if name == "on" else "off"
        torch.manual_seed(0)
        model = build_model(options.model, vocab_size=VOCABULARY, sequence_length=options.length)
        self._model = gradsync.DistributedDataParallel(model, bucket_cap_mb=options.bucket_cap_mb)
        if (self._model.replica.recorder is not None) is not (name == "on"):
            raise SystemExit(f"the variant {name!r} is not what it says")
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._tokens = torch.randint(VOCABULARY, (options.batch, options.length + 1))

    @property
    def buckets(self) -> int:
        layout = self._model.synchronizer.layout
        return 0 if layout is None else len(layout.buckets)

    def run(self, steps: int) -> Took:
        self._step()
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._step()
        took = torch.tensor([time.perf_counter() - began, time.process_time() - used], dtype=torch.float64)
        slowest = took.clone()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(took)
        return Took(wall=slowest[0].item() / steps, cpu=took[1].item() / steps)

    def _step(self) -> None:
        loss_of(self._model(self._tokens[:, :-1]), self._tokens[:, 1:]).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def ratios(rounds: Sequence[dict[str, Took]], variant: str, kind: str) -> list[float]:
    """Against the mean of the two that are not recorded, of the same round."""
    return [
        getattr(each[variant], kind) / statistics.mean(getattr(each[name], kind) for name in VARIANTS if name != "on")
        for each in rounds
    ]


def report(rounds: Sequence[dict[str, Took]]) -> str:
    lines = [f"{len(rounds)} rounds", f"{'':12s}{'ms a step':>11s}{'CPU ms':>9s}   more time: median (middle half)"]
    for variant in VARIANTS:
        wall, cpu = (statistics.median(getattr(each[variant], kind) for each in rounds) for kind in ("wall", "cpu"))
        told = []
        for kind in ("wall", "cpu"):
            found = ratios(rounds, variant, kind)
            low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
            told.append(f"{kind} {_percent(middle)} ({_percent(low)} … {_percent(high)})")
        lines.append(f"{variant:12s}{1e3 * wall:11.2f}{1e3 * cpu:9.2f}   {'   '.join(told)}")
    for kind in ("wall", "cpu"):
        more = statistics.median(ratios(rounds, "on", kind)) - 1
        held = "yes" if more < LIMIT else "NO"
        lines.append(f"{kind}: {100 * more:+.2f} %, to be below {100 * LIMIT:g} %: {held}")
    return "\n".join(lines)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="of gradsync train")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--bucket-cap-mb", type=float, default=None, help="chosen by the wire, unless given")
    parser.add_argument("--steps", type=int, default=10, help="in a block")
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--minutes", type=float, default=6.0, help="no round begins that would end later")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    variants = {name: Variant(name, options) for name in VARIANTS}
    for variant in variants.values():
        variant.run(WARMUP)
    began, rounds = time.monotonic(), list[dict[str, Took]]()
    orders = itertools.cycle(itertools.permutations(VARIANTS))
    for number in range(options.rounds):
        took = {name: variants[name].run(options.steps) for name in next(orders)}
        rounds.append(took)
        spent = time.monotonic() - began
        # All ranks must agree on it.
        goes_on = torch.tensor([spent * (number + 2) / (number + 1) < 60 * options.minutes])
        dist.broadcast(goes_on, 0)
        if not goes_on.item():
            break
    if dist.get_rank() == 0:
        print(f"{options.model}, {variants['on'].buckets} buckets")
        print(report(rounds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
