"""A peer at its best: the bucket size that suits it, found by trying.

Models are scaled down so that many rounds fit into minutes, and a default of 25 MiB, made for whole models, would put
all of a scaled one into one bucket. So torch's wrapper gets the best of some shares of the gradients.
"""

from gradsync.bench.measure import Rounds
from gradsync.bench.peers import DDP
from gradsync.bench.windows import Pattern, window_step
from gradsync.bench.workload import Workload

__all__ = ["best_bucket_mb"]

MIB = 2**20
SHARES = (1, 2, 4, 8)


def best_bucket_mb(rounds: Rounds, workload: Workload, *, tuned: bool = True) -> float:
    """The size in MiB with which torch's DDP was fastest in a few rounds; noted among the facts of the cell."""
    candidates = {f"{workload.nbytes / share / MIB:.3f}": share for share in SHARES}
    wrapped = {size: workload.wrap(DDP(tuned=tuned, bucket_mb=float(size))) for size in candidates}
    steps = {
        size: window_step(each, workload.forward, count=1, pattern=Pattern.EVERY) for size, each in wrapped.items()
    }
    best = rounds.best(steps)
    rounds.fact("DDP bucket MiB", f"{best}, the best of {', '.join(candidates)}")
    return float(best)
