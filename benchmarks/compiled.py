"""Time of a training step of compiled blocks with fused AdamW: gradsync, sharded or not, and DDP.

    python benchmarks/compiled.py --rate 1gbit      # two hosts of one rank each; needs root, see docs/lab.md

What is compiled is in the name of a variant: the model as a whole, or its blocks one by one. DDP is compiled with and
without torch's cuts of the graph (``optimize_ddp``). A sharded step leaves gathers under way when it returns, so a
sample is a block of steps. The backend only traces by default: ``--backend inductor`` takes minutes to compile.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from interleave import interleave, parser_of, table
from torch import nn

from gradsync import DistributedDataParallel, ShardedOptimizer
from gradsync.lab import Lab, LabPlan, Rate, fork_ranks
from gradsync.tools.bench.measure import Steady

WIDTH, BLOCKS = 512, 6
# Until bucket sizes are chosen.
SETTLING = 12
UNCUT, CUT = "DDP model uncut", "DDP model"
VARIANTS = [CUT, UNCUT, "DDP blocks", "gradsync model", "gradsync blocks", "sharded model", "sharded blocks"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Blocks(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def own(kind: type[nn.Module]) -> type[nn.Module]:
    """A class like ``kind`` whose forward shares no compiled code with it."""
    forward: Any = kind.forward
    return type(kind.__name__, (kind,), {"forward": FunctionType(forward.__code__.replace(), forward.__globals__)})


def variant(name: str, data: torch.Tensor, *, backend: str, block: int) -> Steady:
    torch.manual_seed(0)
    model: Any = own(Blocks)(own(Block))
    for part in [model] if "model" in name else model.blocks:
        part.compile(backend=backend)
    kind = name.split()[0]
    wrapper: Callable[[nn.Module], Any] = (
        partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True, bucket_cap_mb=4)
        if kind == "DDP"
        else DistributedDataParallel
    )
    wrapped = wrapper(model)
    optimizer: Any = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)
    if kind == "sharded":
        optimizer = ShardedOptimizer(optimizer, wrapped)

    def step() -> None:
        wrapped(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    flush = optimizer.flush if kind == "sharded" else lambda: None
    with torch._dynamo.config.patch(optimize_ddp=name != UNCUT):
        for _ in range(SETTLING):
            step()
    flush()
    return Steady(step=step, flush=flush, times=block)


def measure(variants: Sequence[str], *, tokens: int, backend: str, block: int, rounds: int) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    data = torch.randn(tokens, WIDTH)
    steps = {name: variant(name, data, backend=backend, block=block) for name in variants}
    record = interleave(steps, warmup=1, rounds=rounds)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {tokens} tokens each, blocks of {block} steps, {rounds} rounds")
        print(table(record, [name for name in (CUT, UNCUT) if name in steps]))
    dist.destroy_process_group()


def main() -> None:
    parser = parser_of(__doc__, rounds=10)
    parser.add_argument("--rate", type=Rate.parse, help="of the links between two hosts, such as 1gbit")
    parser.add_argument("--tokens", type=int, default=192, help="in the batch of a rank")
    parser.add_argument("--block", type=int, default=3, help="steps in a sample")
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    settings = {"tokens": options.tokens, "backend": options.backend, "block": options.block, "rounds": options.rounds}
    work = partial(measure, options.variants, **settings)
    if options.rate is None:
        fork_ranks(None, work, ranks=2, timeout=3600.0)
        return
    with Lab(LabPlan(name="compiled", hosts=2, rate=options.rate)) as lab:
        fork_ranks(lab, work, timeout=3600.0)


if __name__ == "__main__":
    main()
