"""Trains with ranks that are killed at random moments and replaced, and compares every window with one process alone.

``python -m tests.elastic_soak --steps 1000 --kills 100 --ranks 4``. A window's samples follow from its number alone,
and its gradient is their mean over whoever takes part, so that in float64 every window's parameters must be those of a
single process, but for the order of additions. With torchft installed its lighthouse says who takes part.
"""

import argparse
import base64
import functools
import importlib.util
import itertools
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradsync import Accelerator, Elastic
from gradsync.accelerator import DistributedDataParallelKwargs
from gradsync.core.engine import SyncPolicy
from gradsync.health.elastic import LIGHTHOUSE, Lighthouse
from gradsync.lab import Lab, LabPlan, Rate
from gradsync.reduction import reduction_by_name
from gradsync.tools.lab.host import Host
from gradsync.tools.lab.system import enter_host, inside
from tests.roll_call import ADDRESS, RollCall, join_roll_call

GLOBAL_BATCH = 24
MICRO_BATCH = 4
FEATURES = 6
TOLERANCE = 1e-9
ENDING_SECONDS = 20.0


class Net(nn.Module):
    """With a branch that only every third window uses, and buffers that forwards change."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.second = nn.Linear(16, 1)
        self.rare = nn.Linear(FEATURES, 1)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs: torch.Tensor, uses_rare: bool) -> torch.Tensor:
        with torch.no_grad():
            self.forwards += len(inputs)
        output = self.second(torch.tanh(self.first(inputs)))
        return output + self.rare(inputs) if uses_rare else output


def samples_of(step: int, share: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of a window, by its number; ``share`` are places in it."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(GLOBAL_BATCH, FEATURES, generator=generator, dtype=torch.float64)
    targets = inputs.sum(1, keepdim=True).sin()
    return inputs[share.start : share.stop], targets[share.start : share.stop]


def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


# -- a rank ------------------------------------------------------------------------------------------------------------


def be_rank(steps: int, log: Path, pause: float, reduction: str) -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(message)s")
    host, _, port = os.environ.get(ADDRESS, "").rpartition(":")
    elastic = Elastic(
        timeout=5.0, look_every=0.5, patience=60.0, **({"join": join_roll_call(int(port), host)} if port else {})
    )
    policy = SyncPolicy(reduction=reduction_by_name(reduction))
    accelerator = Accelerator(cpu=True, elastic=elastic, kwargs_handlers=[DistributedDataParallelKwargs(policy=policy)])
    plain, optimizer, scheduler = made()
    model, optimizer, scheduler = accelerator.prepare(plain, optimizer, scheduler)
    run = accelerator.elastic
    with log.open("a", buffering=1) as file:
        for attempt in run.attempts(steps):
            before = run.step
            with attempt as step:
                size, rank = accelerator.num_processes, accelerator.process_index
                share = range(GLOBAL_BATCH * rank // size, GLOBAL_BATCH * (rank + 1) // size)
                inputs, targets = samples_of(step, share)
                batches = list(zip(inputs.split(MICRO_BATCH), targets.split(MICRO_BATCH), strict=True))
                for batch, wanted in accelerator.window(batches, model):
                    loss = nn.functional.mse_loss(model(batch, uses_rare=step % 3 == 0), wanted)
                    accelerator.backward(loss, weight=len(batch))
                    time.sleep(pause)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if run.step > before or not run.has_met:
                generation = run.generation
                told = {
                    "time": time.time(),
                    "step": run.step,
                    "lost": not run.has_met,
                    "generation": None if generation is None else generation.number,
                    "ranks": accelerator.num_processes,
                    "rank": accelerator.process_index,
                    "process": os.getpid(),
                    "buffer": float(plain.forwards),
                    "parameters": base64.b64encode(flat(plain).numpy().tobytes()).decode(),
                }
                file.write(json.dumps(told) + "\n")
    run.close()


# -- who starts and kills them ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Plan:
    steps: int = 1000
    kills: int = 100
    ranks: int = 4
    seed: int = 0
    pause: float = 0.005
    reduction: str = "mean"
    limit: float = 900.0
    hosts: int = 0


@dataclass(kw_only=True)
class Soak:
    """One run of all ranks."""

    plan: Plan
    folder: Path
    variables: dict[str, str]
    hosts: list[Host] = field(default_factory=list)
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    logs: dict[int, Path] = field(default_factory=dict)
    lives: int = 0
    killed: int = 0
    ended: list[int] = field(default_factory=list)

    def start(self, place: int) -> None:
        plan = self.plan
        log = self.folder / f"life-{self.lives:04}-rank-{place}.jsonl"
        self.lives += 1
        self.logs[place] = log
        variables = {"RANK": place, "WORLD_SIZE": plan.ranks, "LOCAL_RANK": place, "LOCAL_WORLD_SIZE": plan.ranks}
        command = [sys.executable, "-m", "tests.elastic_soak", "--log", str(log), "--steps", str(plan.steps)]
        command += ["--pause", str(plan.pause), "--reduction", plan.reduction]
        every = os.environ | {"OMP_NUM_THREADS": "1"} | self.variables | {k: str(v) for k, v in variables.items()}
        with log.with_suffix(".out").open("wb") as output:
            self.running[place] = subprocess.Popen(
                command, env=every, stdout=output, stderr=subprocess.STDOUT, preexec_fn=self._way_to(place)
            )

    def _way_to(self, place: int) -> Callable[[], None] | None:
        """To the host of a rank, in its new process."""
        if not self.hosts:
            return None
        host = self.host_of(place)
        addresses = {each.name: each.address for each in self.hosts}
        return functools.partial(enter_host, host.namespace, host.name, addresses)

    def host_of(self, place: int) -> Host:
        return self.hosts[place * len(self.hosts) // self.plan.ranks]

    def tend(self) -> None:
        """Replaces who was killed, until somebody has finished."""
        for place, process in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[place]
            if code == 0:
                self.ended.append(place)
            elif code == -signal.SIGKILL:
                if not self.ended:
                    self.start(place)
            else:
                raise RuntimeError(f"rank {place} failed with {code}; see {self.folder}:\n{self.last_words()}")

    def has_begun(self, place: int) -> bool:
        """Whether it has completed a window, and so has the state."""
        return self.logs[place].exists() and self.logs[place].stat().st_size > 0

    def last_words(self) -> str:
        newest = sorted(self.folder.glob("*.out"), key=lambda path: path.stat().st_mtime)[-3:]
        return "\n".join(f"--- {path.name}\n" + path.read_text()[-1500:] for path in newest)

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait()


@contextmanager
def on_hosts(count: int) -> Iterator[tuple[dict[str, str], list[Host]]]:
    """The same in a lab of so many hosts, and those. Their roll call is on the first one, and outlives its ranks."""
    with Lab(LabPlan(name="elastic", hosts=count, rate=Rate.parse("1gbit"))) as lab:
        first = lab.hosts[0]
        roll_call = RollCall(inside(first.namespace, lambda: socket.create_server((first.address, 0))))
        yield {ADDRESS: roll_call.address, "GLOO_SOCKET_IFNAME": first.interface}, list(lab.hosts)
        roll_call.close()


@contextmanager
def who_takes_part(hosts: int) -> Iterator[tuple[dict[str, str], list[Host]]]:
    """The variables by which ranks find torchft's lighthouse, or what stands for it here; and their hosts, if any."""
    if hosts:
        with on_hosts(hosts) as found:
            yield found
    elif importlib.util.find_spec("torchft") is not None:
        lighthouse = Lighthouse("127.0.0.1", min_ranks=1, join_seconds=10)
        yield {LIGHTHOUSE: lighthouse.address}, []
        lighthouse.close()
    else:
        roll_call = RollCall()
        yield {ADDRESS: roll_call.address}, []
        roll_call.close()


def soak(plan: Plan, folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Runs it; returns all that ranks have told, by time, and how many were killed."""
    choice = random.Random(plan.seed)
    with who_takes_part(plan.hosts) as (variables, hosts):
        run = Soak(plan=plan, folder=folder, variables=variables, hosts=hosts)
        try:
            for place in range(plan.ranks):
                run.start(place)
            _kill_at_random(run, choice)
        finally:
            run.end()
    return sorted(_told(folder), key=lambda each: each["time"]), run.killed


def _kill_at_random(run: Soak, choice: random.Random) -> None:
    plan, began = run.plan, time.monotonic()
    next_kill: float | None = None
    finished: float | None = None
    while run.running:
        time.sleep(0.02)
        run.tend()
        now = time.monotonic()
        if now - began > plan.limit:
            raise TimeoutError(f"not done after {plan.limit:g} s:\n{run.last_words()}")
        if run.ended:
            # Who takes part ends by itself; who is still on its way finds nobody any more.
            finished = finished or now
            for place in [place for place in run.running if not run.has_begun(place)]:
                run.running[place].kill()
            if now - finished > ENDING_SECONDS:
                return
        elif run.killed < plan.kills:
            at = _progress(run.folder)
            if next_kill is None and at > 0:
                next_kill = at + choice.uniform(0, 1.8) * (plan.steps - at) / (plan.kills - run.killed)
            if next_kill is not None and at >= next_kill:
                time.sleep(choice.uniform(0, 0.2))
                _kill_some(run, choice)
                next_kill = None


def _kill_some(run: Soak, choice: random.Random) -> None:
    """One that takes part, or two; one that is on its way in. Somebody who has the state is left."""
    settled = [place for place in run.running if run.has_begun(place)]
    coming = [place for place in run.running if place not in settled]
    count = min(2 if choice.random() < 0.15 else 1, len(settled) - 1)
    victims = choice.sample(settled, count) if count > 0 else []
    if coming and choice.random() < 0.3:
        victims = [choice.choice(coming)]
    if run.hosts and choice.random() < 0.5:
        # A whole host, if somebody elsewhere has the state.
        lost = choice.choice(run.hosts)
        there = [place for place in run.running if run.host_of(place) == lost]
        victims = there if set(settled) - set(there) else victims
    for place in victims:
        run.running[place].kill()
        run.killed += 1


def _progress(folder: Path) -> int:
    best = 0
    for path in folder.glob("*.jsonl"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 12000))
            lines = file.read().splitlines()
        for line in reversed(lines):
            try:
                best = max(best, json.loads(line)["step"])
                break
            except ValueError:
                continue
    return best


def _told(folder: Path) -> Iterator[dict[str, Any]]:
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                # Its last one, when it was killed.
                continue


# -- what it must have been -------------------------------------------------------------------------------------------


def replay(steps: int) -> list[torch.Tensor]:
    """The parameters before window 0, 1, …, of one process with all samples."""
    model, optimizer, scheduler = made()
    course = [flat(model).clone()]
    for step in range(steps):
        inputs, targets = samples_of(step, range(GLOBAL_BATCH))
        nn.functional.mse_loss(model(inputs, uses_rare=step % 3 == 0), targets).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        course.append(flat(model).clone())
    return course


def worst_difference(told: list[dict[str, Any]], steps: int) -> float:
    course, worst = replay(steps), 0.0
    for each in told:
        parameters = torch.frombuffer(bytearray(base64.b64decode(each["parameters"])), dtype=torch.float64)
        worst = max(worst, float((parameters - course[each["step"]]).abs().max()))
    return worst


def longest_pause(told: list[dict[str, Any]]) -> float:
    """Seconds in which no rank has completed a window."""
    times, best = [], 0
    for each in told:
        if each["step"] > best:
            best = each["step"]
            times.append(each["time"])
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.005)
    parser.add_argument("--limit", type=float, default=900.0)
    parser.add_argument("--reduction", default="mean")
    parser.add_argument("--hosts", type=int, default=0, help="of a lab, which needs root; whole ones are lost, too")
    parser.add_argument("--log", type=Path, help="be a rank, and tell this file")
    parser.add_argument("--folder", type=Path, help="keep what ranks wrote here")
    options = vars(parser.parse_args())
    log, folder = options.pop("log"), options.pop("folder")
    if log is not None:
        be_rank(options["steps"], log, options["pause"], options["reduction"])
        return
    plan = Plan(**options)
    with tempfile.TemporaryDirectory() as scratch:
        place = folder or Path(scratch)
        place.mkdir(exist_ok=True)
        began = time.monotonic()
        told, killed = soak(plan, place)
    generations = {each["generation"] for each in told if each["generation"]}
    print(
        f"{plan.steps} steps, {plan.ranks} ranks, seed {plan.seed}: {killed} ranks killed, {len(generations)} "
        f"generations, {time.monotonic() - began:.0f} s, longest pause {longest_pause(told):.1f} s, "
        f"ranks that took part {min(e['ranks'] for e in told)} to {max(e['ranks'] for e in told)}"
    )
    if plan.reduction == "mean":
        worst = worst_difference(told, plan.steps)
        print(f"largest difference to one process alone, of any parameter after any window: {worst:.1e}")
        if worst > TOLERANCE:
            sys.exit(1)


if __name__ == "__main__":
    main()
