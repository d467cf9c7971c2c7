"""What a feature costs: blocks of steps without it, with it and without it again take turns.

The second "off" is the noise: a difference as large as its own is none. The time is that of the slowest rank; the CPU
time that of all threads of all ranks.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from interleave import parser_of

import gradsync
from gradsync.tools.llm.model import build_model, loss_of

__all__ = ["LIMIT", "VARIANTS", "WARMUP", "Took", "Training", "arguments", "report", "take_turns", "timed"]

LIMIT = 0.005
VARIANTS = ("off", "on", "off again")
VOCABULARY = 512
# Bucket sizes are tried in the first 36 steps, where none is given.
WARMUP = 45


@dataclass(frozen=True, kw_only=True)
class Took:
    """Seconds a step."""

    wall: float
    cpu: float


class Training:
    """A GPT under gradsync with these settings."""

    def __init__(self, options: argparse.Namespace, device: str, **settings: object) -> None:
        torch.manual_seed(0)
        model = build_model(options.model, vocab_size=VOCABULARY, sequence_length=options.length)
        self.model = gradsync.DistributedDataParallel(model.to(device), **settings)  # type: ignore[arg-type]
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._tokens = torch.randint(VOCABULARY, (options.batch, options.length + 1), device=device)

    def step(self) -> None:
        loss_of(self.model(self._tokens[:, :-1]), self._tokens[:, 1:]).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


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


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = parser_of(description, rounds=120)
    parser.add_argument("--model", default="tiny", help="of gradsync train")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10, help="in a block")
    parser.add_argument("--minutes", type=float, default=6.0, help="no round begins that would end later")
    return parser


def take_turns(
    run: Callable[[str], Took], orders: Iterable[Sequence[str]], options: argparse.Namespace
) -> list[dict[str, Took]]:
    """Rounds of blocks, each in the next of the orders, as long as a further one would end in time. Collective."""
    began, rounds = time.monotonic(), list[dict[str, Took]]()
    for order in itertools.islice(orders, options.rounds):
        rounds.append({variant: run(variant) for variant in order})
        # All ranks must agree on it.
        each = (time.monotonic() - began) / len(rounds)
        goes_on = torch.tensor([each * (len(rounds) + 1) < 60 * options.minutes])
        dist.broadcast(goes_on, 0)
        if not goes_on.item():
            break
    return rounds


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
