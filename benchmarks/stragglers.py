"""After how many steps a slow rank, or a slow link, is named; what the watch's thread costs; what is said of nobody.

    python benchmarks/stragglers.py                        all, three times each: some minutes, as root
    python benchmarks/stragglers.py --parts ranks,cost     without hosts
    python benchmarks/stragglers.py --parts device         on a CUDA device, which all ranks share

Steps sleep for most of their time, as one whose work is on other cores does; on a device it is a kernel that spins. A
rank becomes slow after 40 steps; the table counts from there (from the first step, for one that is slow from the
beginning) to the step in which rank 0 logged its name. "Nobody" are loops without a slow rank, or in which ranks differ
and none is to blame. The network is that of three hosts in network namespaces, where the link of one gets a quarter
of its rate.
"""

import json
import logging
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from interleave import parser_of
from torch import nn

import gradsync
from gradsync.lab import Lab, LabPlan, Rate, fork_ranks

BECOMES = 40
MOST_STEPS = 60
WARMUP = 20
COST_SECONDS = 10
RANKS = 3
STEPS_MS = (10, 20, 100, 300)
DEVICE_STEPS_MS = (20, 100)
SHARES = (0.10, 0.15, 0.30, 1.0)
QUIET_STEPS = 500
RATE, SLOW_RATE = "400mbit", "100mbit"
LOGGER = logging.getLogger("gradsync")
PARTS = ("ranks", "nobody", "cost", "network")  # and, where there is one, "device"


@dataclass(frozen=True, kw_only=True)
class Loop:
    """So many ``steps``, in which a rank sleeps ``pause`` times ``seconds``."""

    seconds: float
    steps: int
    pause: Callable[[int, int], float]
    width: int = 64
    before_step: Callable[[int], None] = lambda step: None
    device: str = "cpu"

    def run(self) -> dict[str, Any]:
        """On one rank: what was said there, and in which step; and what the watch's thread has cost."""
        group = dist.new_group()
        layer = nn.Linear(self.width, self.width, device=self.device)
        model = gradsync.DistributedDataParallel(layer, process_group=group)
        inputs, rank = torch.randn(2, self.width, device=self.device), dist.get_rank()
        sleep = time.sleep if self.device == "cpu" else device_sleep()
        began = used = 0.0
        with Listener() as listener:
            for listener.step in range(1, self.steps + 1):
                self.before_step(listener.step)
                sleep(self.seconds * self.pause(rank, listener.step))
                model(inputs).mean().backward()
                model.zero_grad()
                if listener.step == WARMUP:
                    began, used = time.perf_counter(), watch_seconds()
        cost = (watch_seconds() - used) / (time.perf_counter() - began)
        dist.barrier(group)
        del model
        dist.destroy_process_group(group)
        # What watches over the group finds that it is gone at its next beat.
        time.sleep(1.1)
        return {"said": listener.said, "cost": cost}


def device_sleep() -> Callable[[float], None]:
    """Queues a kernel that spins for so many seconds. The host is not held."""
    cycles = 100_000_000
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    rate = cycles / (time.perf_counter() - began)
    return lambda seconds: torch.cuda._sleep(round(rate * seconds))


class Listener(logging.Handler):
    """Hears what the watch logs, and in which step. It takes no part in a collective: the watch must not be helped."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.step, self.said = 0, list[tuple[int, str]]()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((self.step, record.getMessage()))

    def __enter__(self) -> "Listener":
        LOGGER.addHandler(self)
        LOGGER.propagate = False
        return self

    def __exit__(self, *error: object) -> None:
        LOGGER.removeHandler(self)


def watch_seconds() -> float:
    """CPU time of the watch's thread, of this process."""
    ticks = os.sysconf("SC_CLK_TCK")
    for thread in threading.enumerate():
        if thread.name == "gradsync watch" and thread.native_id is not None:
            # In nanoseconds, where the kernel keeps them.
            times = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            if times.exists():
                return int(times.read_text().split()[0]) / 1e9
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(") ")[2].split()
            return (int(fields[11]) + int(fields[12])) / ticks
    return 0.0


def run(loops: Sequence[Loop], lab: Lab | None = None) -> list[dict[str, Any]]:
    """One after the other, as processes are started once. What rank 0 says of each."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"

        def work() -> None:
            dist.init_process_group("gloo")
            told = [loop.run() for loop in loops]
            if dist.get_rank() == 0:
                answer.write_text(json.dumps(told))
            dist.destroy_process_group()

        fork_ranks(lab, work, ranks=None if lab else RANKS, timeout=3000.0)
        told: list[dict[str, Any]] = json.loads(answer.read_text())
        return told


def slow_rank(share: float, since: int) -> Callable[[int, int], float]:
    return lambda rank, step: 1 + share * (rank == 1 and step > since)


# Nobody is to blame.
def equal(rank: int, step: int) -> float:
    return 1.0


def checkpoints(rank: int, step: int) -> float:
    return 1.0 + 5 * (rank == 0 and step % 10 == 0)


def uneven(rank: int, step: int) -> float:
    return 1.5 if (rank + step) % 2 else 1.0


def pauses(rank: int, step: int) -> float:
    return 1.0 + 30 * (step % 50 == 0)


INNOCENT = {"equal": equal, "rank 0 saves each 10 steps": checkpoints, "uneven data": uneven, "evaluation": pauses}


def first(said: list[list[Any]], words: str, since: int) -> float:
    return next((step - since for step, text in said if words in text and "any more" not in text), float("inf"))


def shown(values: list[float]) -> str:
    named = [value for value in values if value != float("inf")]
    if not named:
        return "not named"
    missed = f", {len(values) - len(named)} of {len(values)} not" if len(named) < len(values) else ""
    return f"{statistics.median(named):g} ({min(named):g}–{max(named):g}){missed}"


def ranks_table(rounds: int) -> Iterator[str]:
    yield "Steps until a slow rank was named: median (least–most)\n"
    yield "| step | slow since | " + " | ".join(f"{share:.0%} slower" for share in SHARES) + " |"
    yield "|---|---|" + "---|" * len(SHARES)
    for milliseconds in STEPS_MS:
        for since, name in ((BECOMES, f"step {BECOMES}"), (0, "the first step")):
            loops = [
                Loop(seconds=milliseconds / 1e3, steps=since + MOST_STEPS, pause=slow_rank(share, since))
                for share in SHARES
                for _ in range(rounds)
            ]
            steps = [first(told["said"], "rank 1 ", since) for told in run(loops)]
            cells = [shown(steps[start : start + rounds]) for start in range(0, len(steps), rounds)]
            yield f"| {milliseconds} ms | {name} | " + " | ".join(cells) + " |"


def device_table(rounds: int) -> Iterator[str]:
    yield "\nThe same with steps on a CUDA device; and lines about somebody where nobody is to blame\n"
    yield "| step | " + " | ".join(f"{share:.0%} slower" for share in SHARES) + f" | equal, {QUIET_STEPS} steps |"
    yield "|---|" + "---|" * (len(SHARES) + 1)
    for milliseconds in DEVICE_STEPS_MS:
        begun = partial(Loop, seconds=milliseconds / 1e3, device="cuda")
        slow = [
            begun(steps=BECOMES + MOST_STEPS, pause=slow_rank(share, BECOMES))
            for share in SHARES
            for _ in range(rounds)
        ]
        told = run([*slow, begun(steps=QUIET_STEPS, pause=equal)])
        steps = [first(each["said"], "rank 1 ", BECOMES) for each in told[:-1]]
        cells = [shown(steps[start : start + rounds]) for start in range(0, len(steps), rounds)]
        yield f"| {milliseconds} ms | {' | '.join(cells)} | {len(told[-1]['said'])} |"


def nobody_table(rounds: int) -> Iterator[str]:
    yield f"\nLines about somebody, in {rounds} runs of {QUIET_STEPS} steps of 20 ms where nobody is to blame\n"
    yield "| loop | lines |"
    yield "|---|---|"
    for name, pause in INNOCENT.items():
        told = run([Loop(seconds=0.02, steps=QUIET_STEPS, pause=pause)] * rounds)
        said = [line for each in told for line in each["said"]]
        yield f"| {name} | {len(said)} |"
        yield from (f"    step {step}: {words}" for step, words in said)


def cost_table(rounds: int) -> Iterator[str]:
    yield "\nCPU time of the watch's thread on rank 0, which hears the others\n"
    yield "| step | of one core |"
    yield "|---|---|"
    for milliseconds in STEPS_MS:
        steps = WARMUP + COST_SECONDS * 1000 // milliseconds
        told = run([Loop(seconds=milliseconds / 1e3, steps=steps, pause=equal)] * rounds)
        yield f"| {milliseconds} ms | {statistics.median(each['cost'] for each in told):.3%} |"


def network_table(rounds: int) -> Iterator[str]:
    yield f"\nSteps until a link of three that has {SLOW_RATE}, where the others have {RATE}, was named\n"
    yield "| slow link | since | that communication is slow | whose link it is | what was said, in the last run |"
    yield "|---|---|---|---|---|"
    with Lab(LabPlan(name=f"stragglers{os.getpid()}", hosts=RANKS, rate=Rate.parse(RATE))) as lab:
        for slow, since in ((0, BECOMES), (1, BECOMES), (2, BECOMES), (1, 0)):
            lab.set_rate(Rate.parse(RATE))
            change = partial(fall, lab, slow, since)
            loop = Loop(seconds=0.05, steps=since + MOST_STEPS, pause=equal, width=512, before_step=change)
            told = run([loop] * rounds, lab)
            cells = (
                shown([first(each["said"], words, since) for each in told]) for words in ("has become", "the link")
            )
            words = "; ".join(text for _, text in told[-1]["said"])
            yield f"| host{slow} | step {since} | {' | '.join(cells)} | {words} |"


def fall(lab: Lab, slow: int, since: int, step: int) -> None:
    """On the slow host's rank: the machine is one, and root may change all links from any of its networks."""
    if dist.get_rank() == slow and step in (1, since + 1):
        lab.set_rate(Rate.parse(SLOW_RATE if step == since + 1 else RATE), host=slow)


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args()
    tables = {
        "ranks": ranks_table,
        "nobody": nobody_table,
        "cost": cost_table,
        "network": network_table,
        "device": device_table,
    }
    for part in options.parts.split(","):
        for line in tables[part](options.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
