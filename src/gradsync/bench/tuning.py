"""A peer at its best: the bucket size that suits it, found by trying.

Models are scaled down so that many rounds fit into minutes, and a default of 25 MiB, made for whole models, would put
all of a scaled one into one bucket. So torch's wrapper gets the best of some shares of the gradients.
"""

from collections.abc import Sequence

from gradsync.bench.measure import Rounds
from gradsync.bench.peers import DDP
from gradsync.bench.real_workload import RealWorkload
from gradsync.bench.windows import plain_step
from gradsync.bench.workload import Workload

__all__ = ["best_bucket_mb"]

MIB = 2**20
# Of all gradients; and what DDP has by itself, which is tried where there is more than that.
SHARES, DEFAULT = (1, 2, 4, 8), 25.0


def best_bucket_mb(
    rounds: Rounds,
    workload: Workload | RealWorkload,
    *,
    tuned: bool = True,
    shares: Sequence[int] = SHARES,
    warmup: int = 3,
) -> float:
    """The size in MiB with which torch's DDP was fastest in a few rounds; noted among the facts of the cell."""
    whole = workload.nbytes / MIB
    sizes = {round(whole / share, 3) for share in shares} | ({DEFAULT} if whole > DEFAULT else set())
    steps = {f"{size:g}": plain_step(workload, DDP(tuned=tuned, bucket_mb=size)) for size in sorted(sizes)}
    best = rounds.best(steps, warmup=warmup)
    rounds.fact("DDP bucket MiB", f"{best}, the best of {', '.join(steps)}")
    return float(best)
