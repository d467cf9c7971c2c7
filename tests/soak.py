"""Random trainings for as long as asked, to find the next edge: ``make soak ARGS="--minutes 30"``.

A seed draws a case: ranks (threads or processes) and their communicator, a model with shared, unused and frozen layers,
bucket sizes and schedule, and a row of windows of all kinds with different numbers of micro-batches on each rank, or
none; backwards that fail on one rank, observers that raise, parameters that are trained again, gradients that are only
looked at. Every rank computes what the gradients of every window must be, alone, and compares.

The seed of each case is printed when it fails, and ``--seed`` runs it again.
"""

import argparse
import collections
import importlib
import itertools
import logging
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from gradsync import DistributedDataParallel, PeerFailedError
from gradsync.communicator import choose_communicator
from tests.fuse import Explosion, Fuse
from tests.ranks import RankFailure, RankPool, Ranks, ThreadRanks

WIDTH = 4
KINDS = ("plain", "no_sync", "accumulate", "weighted", "loose")
WORLDS = (("threads", 1), ("threads", 2), ("threads", 3), ("processes", 2), ("processes", 3), ("processes", 4))
CASE_SECONDS = 60.0
SHOWN_EVERY = 5.0
MOST_FAILURES = 5
# Of a case that fails.
LINES_SHOWN = 80
TOLERANCE = 1e-9


# -- what is drawn -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The layers it runs through, in order; its weight; whether its gradient is looked at before."""

    layers: tuple[int, ...]
    seed: int
    weight: int
    looked_at: bool


@dataclass(frozen=True, kw_only=True)
class SoakWindow:
    """The micro-batches of each rank. ``fails``: the rank whose last backward does, at that layer of it."""

    kind: str
    batches: tuple[tuple[MicroBatch, ...], ...]
    fails: tuple[int, int] | None
    frozen: tuple[frozenset[int], ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything about one training."""

    seed: int
    world: tuple[str, int]
    communicator: str
    layers: int
    settings: dict[str, Any]
    windows: tuple[SoakWindow, ...]
    saboteur: str | None = None

    def __str__(self) -> str:
        kinds = collections.Counter(window.kind for window in self.windows)
        faults = sum(window.fails is not None for window in self.windows)
        shape = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        return (
            f"seed {self.seed}: {self.world[1]} {self.world[0]} over {self.communicator}, {self.layers} layers, "
            f"{self.settings}; {shape}; {faults} failing, observer raises in {self.saboteur}"
        )


def draw(seed: int, worlds: tuple[tuple[str, int], ...] | None = None) -> Case:
    """The case of a seed."""
    chance = random.Random(seed)
    world = chance.choice(worlds or WORLDS)
    layers = chance.randint(1, 6)
    # One is always trained: a model without any is refused.
    frozen = frozenset(layer for layer in range(layers) if chance.random() < 0.15) - {chance.randrange(layers)}
    by_rank = [frozen] * world[1]
    windows = []
    for _ in range(chance.randint(2, 9)):
        if chance.random() < 0.2:
            # Layers are frozen and trained again: on all ranks, or on one that is ahead of the others.
            freed = chance.choice(range(layers))
            one = chance.choice([None, chance.randrange(world[1])])
            by_rank = [now - {freed} if one in (None, rank) else now for rank, now in enumerate(by_rank)]
        windows.append(draw_window(chance, world[1], layers, tuple(by_rank)))
    return Case(
        seed=seed,
        world=world,
        communicator=chance.choice(["auto", "group"]) if world[0] == "processes" else "memory",
        layers=layers,
        settings={
            "bucket_cap_mb": chance.choice([None, 1e-4, 3e-4, 1e-3, 25]),
            "schedule": chance.choice(["overlapped", "overlapped", "bucketed", "naive"]),
        },
        windows=tuple(windows),
        saboteur=chance.choice([None, None, None, "bucket_ready", "bucket_started", "backward_ended"]),
    )


def draw_window(
    chance: random.Random,
    world_size: int,
    layers: int,
    frozen: tuple[frozenset[int], ...],
    *,
    synchronized: bool = False,
) -> SoakWindow:
    """``synchronized``: means are there before the step. So every rank has a micro-batch, and none goes past the
    wrapper, where a backward that does not reach the model's last layer is only noticed by the step."""
    kind = chance.choice([kind for kind in KINDS if kind != "loose" or not synchronized])
    most = 1 if kind in ("plain", "loose") else 3
    least = 1 if kind == "no_sync" or synchronized else 0
    fails = None
    batches = tuple(
        tuple(_draw_batch(chance, layers, frozen[rank]) for _ in range(chance.randint(least, most)))
        for rank in range(world_size)
    )
    # A backward that begins at a parameter is not noticed before: what fails earlier is nobody's.
    if chance.random() < 0.12 and kind != "loose":
        rank = chance.randrange(world_size)
        if batches[rank]:
            fails = (rank, chance.randrange(len(batches[rank][-1].layers)))
    return SoakWindow(kind=kind, batches=batches, fails=fails, frozen=frozen)


def _draw_batch(chance: random.Random, layers: int, frozen: frozenset[int]) -> MicroBatch:
    trained = [layer for layer in range(layers) if layer not in frozen]
    path = [chance.randrange(layers) for _ in range(chance.randint(0, 2 * layers))]
    # At least one that is trained: there is no backward otherwise.
    path.insert(chance.randint(0, len(path)), chance.choice(trained))
    return MicroBatch(
        layers=tuple(path), seed=chance.randrange(10**6), weight=chance.randint(1, 9), looked_at=chance.random() < 0.1
    )


# -- a training --------------------------------------------------------------------------------------------------------


class Paths(nn.Module):
    """Layers that are run through in any order, any number of times."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(layers))
        generator = torch.Generator().manual_seed(layers)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, batch: MicroBatch, explodes_at: int | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(batch.seed)
        x = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
        for number, layer in enumerate(batch.layers):
            if number == explodes_at:
                # Behind the layers that run later, so that some of their gradients are there already.
                x = Fuse.apply(x.requires_grad_(), True)
            x = self.layers[layer](x).tanh()
        return x.square().mean()

    def freeze(self, layers: frozenset[int]) -> None:
        for number, layer in enumerate(self.layers):
            layer.requires_grad_(number not in layers)


class Saboteur:
    """An observer that raises in one event, now and then."""

    def __init__(self, event: str | None, chance: random.Random) -> None:
        self._event, self._chance = event, chance

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def tell(*_: Any, **__: Any) -> None:
            if name == self._event and self._chance.random() < 0.3:
                raise ZeroDivisionError(name)

        return tell


@dataclass(kw_only=True)
class _Run:
    """One rank's part in a case."""

    case: Case
    rank: int
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    plain: Paths
    wrong: list[str] = field(default_factory=list)

    def run(self) -> None:
        for number, window in enumerate(self.case.windows):
            self.model.module.freeze(window.frozen[self.rank])
            try:
                self.train(window)
            except (Explosion, PeerFailedError) as error:
                if window.fails is None:
                    self.wrong.append(f"window {number} ({window.kind}) raised {error!r}")
                self.model.zero_grad()
                self.optimizer.step()
                continue
            if window.fails is not None:
                self.wrong.append(f"window {number} ({window.kind}) should have failed: {window.fails}")
            self.compare(number, window)
            self.optimizer.zero_grad()

    def train(self, window: SoakWindow) -> None:
        batches = window.batches[self.rank]
        if window.kind in ("accumulate", "weighted"):
            self.accumulate(window, batches)
        else:
            for number, batch in enumerate(batches):
                last = number == len(batches) - 1
                with nullcontext() if last else self.model.no_sync():
                    loss = self.forward(window, batch, last)
                    # A loss that no output of the wrapper tells of is noticed at the first parameter.
                    loss.backward()
            if not batches:
                self.model(MicroBatch(layers=(0,), seed=0, weight=1, looked_at=False))
        self.optimizer.step()

    def accumulate(self, window: SoakWindow, batches: tuple[MicroBatch, ...]) -> None:
        rows: list[MicroBatch | None] = [*batches] or [None]
        for number, batch in enumerate(rows):
            last = number == len(rows) - 1
            with self.model.accumulate(last=last):
                if batch is None:
                    continue
                loss = self.forward(window, batch, last)
                if window.kind == "weighted":
                    self.model.backward(loss, weight=batch.weight)
                else:
                    loss.backward()

    def forward(self, window: SoakWindow, batch: MicroBatch, last: bool) -> torch.Tensor:
        failing = last and window.fails is not None and window.fails[0] == self.rank
        explodes_at = window.fails[1] if failing and window.fails is not None else None
        model: Any = self.model.module if window.kind == "loose" else self.model
        loss: torch.Tensor = model(batch, explodes_at)
        if batch.looked_at and not failing:
            torch.autograd.grad(
                loss, [p for p in self.model.parameters() if p.requires_grad], retain_graph=True, allow_unused=True
            )
        return loss

    def compare(self, number: int, window: SoakWindow) -> None:
        expected = expected_gradients(self.plain, window)
        for (name, parameter), exact in zip(self.model.module.named_parameters(), expected, strict=True):
            came = parameter.grad
            if (came is None) != (exact is None):
                self.wrong.append(f"window {number} ({window.kind}), {name}: {came} for {exact}")
            elif (
                came is not None
                and exact is not None
                and not torch.allclose(came, exact, rtol=TOLERANCE, atol=TOLERANCE)
            ):
                worst = float((came - exact).abs().max())
                self.wrong.append(f"window {number} ({window.kind}), {name}: off by {worst:g}")


def expected_gradients(plain: Paths, window: SoakWindow) -> list[torch.Tensor | None]:
    """What the gradients must be: computed alone, micro-batch by micro-batch."""
    world_size = len(window.batches)
    weighs = {"weighted": lambda batch: float(batch.weight), "accumulate": lambda batch: 1.0}.get(window.kind)
    total = sum(weighs(batch) for batches in window.batches for batch in batches) if weighs else float(world_size)
    sums: list[torch.Tensor | None] = [None for _ in plain.parameters()]
    for batches, frozen in zip(window.batches, window.frozen, strict=True):
        plain.freeze(frozen)
        for batch in batches:
            plain.zero_grad()
            plain(batch).backward()
            share = (weighs(batch) if weighs else 1.0) / total
            for index, parameter in enumerate(plain.parameters()):
                if parameter.grad is not None:
                    before = sums[index]
                    sums[index] = parameter.grad * share if before is None else before + parameter.grad * share
    return sums


def train(seed: int, worlds: tuple[tuple[str, int], ...] | None = None) -> list[str]:
    """One rank's part in the case of a seed: what was wrong."""
    case, communicator = draw(seed, worlds), choose_communicator()
    logging.getLogger("gradsync").disabled = True
    with mock.patch.dict(os.environ, {"GRADSYNC_TRANSPORT": case.communicator} if case.world[0] == "processes" else {}):
        model = DistributedDataParallel(
            Paths(case.layers),
            observer=Saboteur(case.saboteur, random.Random(seed + communicator.rank)),
            **case.settings,
        )
    model.module.freeze(case.windows[0].frozen[communicator.rank])
    run = _Run(
        case=case,
        rank=communicator.rank,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        plain=Paths(case.layers),
    )
    try:
        run.run()
    finally:
        logging.getLogger("gradsync").disabled = False
    return run.wrong


# -- on and on ---------------------------------------------------------------------------------------------------------


class Worlds:
    """Ranks of all kinds, kept."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __enter__(self) -> "Worlds":
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def of(self, world: tuple[str, int]) -> Ranks:
        kind, size = world
        return ThreadRanks(size) if kind == "threads" else self._pools.setdefault(size, RankPool(size))

    def run(self, seed: int) -> list[str]:
        """What went wrong in the case of the seed, rank by rank."""
        case = draw(seed)
        ranks = self.of(case.world)
        try:
            if isinstance(ranks, RankPool):
                told = ranks.run(train, seed, timeout=CASE_SECONDS)
            else:
                told = ranks.run(train, seed)
        except (RankFailure, Exception) as error:
            return [str(error)]
        return [f"rank {rank}: {line}" for rank, lines in enumerate(told) for line in lines]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default: 5)")
    parser.add_argument("--seed", type=int, help="run the case of this seed alone, and say all about it")
    parser.add_argument("--first", type=int, help="the seed to begin with (default: the time)")
    options = parser.parse_args(arguments)
    with Worlds() as worlds:
        if options.seed is not None:
            print(draw(options.seed))
            wrong = worlds.run(options.seed)
            print("\n".join(wrong) or "clean")
            return int(bool(wrong))
        return _soak(worlds, options.minutes, int(time.time()) if options.first is None else options.first)


def _soak(worlds: Worlds, minutes: float, first: int) -> int:
    print(f"soak: {minutes:g} minutes, seeds from {first}", flush=True)
    counts: collections.Counter[str] = collections.Counter()

    def run(seed: int) -> list[str]:
        kind, size = draw(seed).world
        counts[f"{size} {kind}"] += 1
        return worlds.run(seed)

    again = "make soak ARGS='--seed {}'"
    count, failures = hunt(run, itertools.count(first), describe=draw, again=again.format, minutes=minutes)
    shape = ", ".join(f"{count} of {world}" for world, count in sorted(counts.items()))
    print(f"soak: {count} cases ({shape}), seeds {first} to {first + count - 1}, {failures} failed")
    return int(failures > 0)


def hunt(
    run: Callable[[int], list[str]],
    seeds: Iterable[int],
    *,
    describe: Callable[[int], object],
    again: Callable[[int], str],
    minutes: float,
    most: float = math.inf,
) -> tuple[int, int]:
    """Run what is drawn from the seeds until the time is up, ``most`` have run or too many have failed. Returns how
    many have run, and how many of them failed."""
    count = failures = 0
    shown = time.monotonic()
    deadline = shown + 60 * minutes
    for seed in seeds:
        now = time.monotonic()
        if now >= deadline or count >= most or failures >= MOST_FAILURES:
            break
        if now - shown > SHOWN_EVERY:
            shown = now
            left = f"{deadline - now:.0f} s to go" if most == math.inf else f"{most - count} to go"
            print(f"{count} have run, next seed {seed}, {failures} failed, {left}", flush=True)
        wrong = run(seed)
        count += 1
        if wrong:
            failures += 1
            print(f"FAILED {describe(seed)}\n  again with: {again(seed)}", *wrong[:LINES_SHOWN], sep="\n  ", flush=True)
    return count, failures


if __name__ == "__main__":
    # Under its own name, by which ranks find what they are to run.
    sys.exit(importlib.import_module("tests.soak").main())
