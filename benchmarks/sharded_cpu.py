"""Time of a training step of a GPT with 25 million parameters and fused AdamW: plain gradsync, sharded, and tuned DDP.

    python benchmarks/sharded_cpu.py                    # two ranks on this machine, over shared memory
    python benchmarks/sharded_cpu.py --rate 400mbit     # two hosts of one rank each; needs root, see docs/lab.md

Every variant runs plain and with gradients clipped by their global norm. A sharded step leaves gathers under way when
it returns, so a sample is a block of steps, and variants take turns: machine speed drifts. Ratios compare the samples
of one round. Small batches (``--tokens``) show the cost of communication, large ones that of computation. The
processor time of a step is that of one rank, all its threads included; it is what to look at on a busy machine.
"""

import os
import time
import warnings
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from interleave import interleave, parser_of, table

from gradsync.lab import Lab, LabPlan, Rate, fork_ranks
from gradsync.tools.bench.measure import Parts, Steady
from gradsync.tools.bench.peers import DDP, OURS, SHARDED, TUNED, Gradsync, Peer, WrappedModel
from gradsync.tools.bench.workload import PROCESSOR, RealWorkload

CLIPPED = ", clipped"
MAX_NORM = 1.0
# Of tuned DDP, beside the view of buckets as gradients and batched copies.
BUCKET_MB = 4.0
GATHERING = Gradsync(name=SHARDED, gathers="next-forward")
PEERS: tuple[Peer, ...] = (DDP(name=TUNED, tuned=True, bucket_mb=BUCKET_MB), Gradsync(), GATHERING)


class Block(Steady):
    """Several steps in a row, and the processor time of one."""

    def __call__(self) -> Parts:  # type: ignore[override]
        began = time.process_time()
        super().__call__()
        return {PROCESSOR: (time.process_time() - began) / self.times}


def steps_of(workload: RealWorkload, wrapped: WrappedModel, *, block: int, clip: bool) -> Block:
    def step() -> None:
        wrapped.backward(workload.forward(wrapped.model))
        if clip:
            torch.nn.utils.clip_grad_norm_(wrapped.model.parameters(), MAX_NORM)
        wrapped.optimizer.step()
        wrapped.optimizer.zero_grad()

    return Block(step=step, flush=wrapped.flush, times=block)


def measure(variants: Sequence[str], *, tokens: int, block: int, rounds: int) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    workload = RealWorkload(layers=8, width=512, batch=1, length=tokens, optimizer="AdamW")
    steps = {}
    for peer in PEERS:
        for name, clip in ((peer.name, False), (peer.name + CLIPPED, True)):
            if name in variants:
                torch.manual_seed(0)
                wrapped = peer.wrap(workload.model(), partial(torch.optim.AdamW, lr=1e-4, fused=True))
                steps[name] = steps_of(workload, wrapped, block=block, clip=clip)
                # Until bucket sizes are chosen.
                for _ in range(peer.windows_to_settle):
                    steps[name].step()
                wrapped.flush()
    record = interleave(steps, warmup=1, rounds=rounds)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {tokens} tokens each, blocks of {block} steps, {rounds} rounds")
        for baselines in ([TUNED, OURS], [TUNED + CLIPPED, OURS + CLIPPED]):
            present = [name for name in baselines if name in steps]
            if present:
                print(table(record, present))
        print(
            "processor ms per step: " + ", ".join(f"{name} {record.part(name, PROCESSOR) * 1e3:.1f}" for name in steps)
        )
    dist.destroy_process_group()


def main() -> None:
    every = [peer.name + suffix for suffix in ("", CLIPPED) for peer in PEERS]
    parser = parser_of(__doc__, rounds=20)
    parser.add_argument("--rate", type=Rate.parse, help="of the links between two hosts, such as 400mbit")
    parser.add_argument("--tokens", type=int, help="in the batch of a rank; 8 on one host, 64 on two")
    parser.add_argument("--block", type=int, default=5, help="steps in a sample")
    parser.add_argument("--variants", nargs="+", choices=every, default=every)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    tokens = options.tokens or (8 if options.rate is None else 64)
    work = partial(measure, options.variants, tokens=tokens, block=options.block, rounds=options.rounds)
    if options.rate is None:
        fork_ranks(None, work, ranks=2, timeout=3600.0)
        return
    with Lab(LabPlan(name="sharded-cpu", hosts=2, rate=options.rate)) as lab:
        fork_ranks(lab, work, timeout=3600.0)


if __name__ == "__main__":
    main()
