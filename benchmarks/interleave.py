"""Time variants of a training step in turns, so that whatever disturbs the machine disturbs all of them.

Every round runs each variant once, in an order that changes from round to round; the slowest rank's time counts. What
is reported is the median, the spread (5th to 95th percentile), and the median over rounds of the ratio to a baseline
with an interval from resampling the rounds.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

Step = Callable[[], None]


def interleave(
    variants: Mapping[str, Step], *, warmup: int, rounds: int, device: torch.device | None = None
) -> dict[str, list[float]]:
    """Seconds per step and variant, in the order of the rounds; the same numbers on all ranks."""
    names = list(variants)
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        for name in order.sample(names, len(names)):
            seconds = _time(variants[name], device)
            if number >= warmup:
                times[name].append(seconds)
    if dist.is_initialized() and dist.get_world_size() > 1:
        for name in names:
            slowest = torch.tensor(times[name], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times[name] = slowest.tolist()
    return times


def _time(step: Step, device: torch.device | None) -> float:
    if device is not None and device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        begin.record()
        step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    if dist.is_initialized():
        dist.barrier()
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def ratio(times: Sequence[float], baseline: Sequence[float]) -> tuple[float, float, float]:
    """Median of the per-round ratios, with the 95 % interval of that median under resampling."""
    ratios = [ours / theirs for ours, theirs in zip(times, baseline, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return statistics.median(ratios), medians[25], medians[974]


def table(times: Mapping[str, Sequence[float]], baselines: Sequence[str]) -> str:
    """The results as text, with one column of ratios per baseline."""
    head = f"{'variant':<24}{'median ms':>11}{'p5':>9}{'p95':>9}" + "".join(
        f"{'/ ' + name + ' (95 %)':>28}" for name in baselines
    )
    lines = [head]
    for name, values in times.items():
        row = f"{name:<24}{statistics.median(values) * 1e3:>11.2f}"
        row += f"{percentile(values, 0.05) * 1e3:>9.2f}{percentile(values, 0.95) * 1e3:>9.2f}"
        for baseline in baselines:
            middle, low, high = ratio(values, times[baseline])
            row += f"{f'{middle:.3f} ({low:.3f}–{high:.3f})':>28}"
        lines.append(row)
    return "\n".join(lines)
