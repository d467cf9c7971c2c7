"""What a feature costs: blocks of steps without it, with it and without it again take turns.

The second "off" is the noise: a difference as large as its own is none. The time is that of the slowest rank; the CPU
time that of all threads of all ranks.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["LIMIT", "VARIANTS", "Took", "has_time", "report", "timed"]

LIMIT = 0.005
VARIANTS = ("off", "on", "off again")


@dataclass(frozen=True, kw_only=True)
class Took:
    """Seconds a step."""

    wall: float
    cpu: float


def timed(step: Callable[[], None], steps: int, group: dist.ProcessGroup | None = None) -> Took:
    """So many steps, from when all ranks have come. Collective."""
    dist.barrier(group)
    _device_ends()
    began, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    _device_ends()
    took = torch.tensor([time.perf_counter() - began, time.process_time() - used], dtype=torch.float64)
    slowest = took.clone()
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(took, group=group)
    return Took(wall=slowest[0].item() / steps, cpu=took[1].item() / steps)


def _device_ends() -> None:
    """The host is ahead of a device, where there is one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def has_time(began: float, rounds: int, minutes: float) -> bool:
    """Whether a further round would end in time, after so many. All ranks must agree on it. Collective."""
    goes_on = torch.tensor([(time.monotonic() - began) * (rounds + 1) / rounds < 60 * minutes])
    dist.broadcast(goes_on, 0)
    return bool(goes_on.item())


def report(rounds: Sequence[dict[str, Took]]) -> str:
    lines = [f"{len(rounds)} rounds", f"{'':12s}{'ms a step':>11s}{'CPU ms':>9s}   more time: median (middle half)"]
    for variant in VARIANTS:
        wall, cpu = (statistics.median(getattr(each[variant], kind) for each in rounds) for kind in ("wall", "cpu"))
        told = []
        for kind in ("wall", "cpu"):
            found = _ratios(rounds, variant, kind)
            low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
            told.append(f"{kind} {_percent(middle)} ({_percent(low)} … {_percent(high)})")
        lines.append(f"{variant:12s}{1e3 * wall:11.2f}{1e3 * cpu:9.2f}   {'   '.join(told)}")
    for kind in ("wall", "cpu"):
        more = statistics.median(_ratios(rounds, "on", kind)) - 1
        lines.append(f"{kind}: {100 * more:+.2f} %, to be below {100 * LIMIT:g} %: {'yes' if more < LIMIT else 'NO'}")
    return "\n".join(lines)


def _ratios(rounds: Sequence[dict[str, Took]], variant: str, kind: str) -> list[float]:
    """Against the mean of the two blocks without, of the same round."""
    return [
        getattr(each[variant], kind) / statistics.mean(getattr(each[name], kind) for name in VARIANTS if name != "on")
        for each in rounds
    ]


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"
